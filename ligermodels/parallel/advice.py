"""Find the parallel plans that fit into the memory of a number of GPUs, and rank them by time per step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from typing import Any, NamedTuple, get_args

from ligermodels.arguments import ActivationCheckpointing, OptimizerName, check_count, check_optimizer
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers.context_parallel import check_context_parallel
from ligermodels.models.causal_lm import CausalLM
from ligermodels.parallel.cost import Degrees, Hardware, ModelSize, StepCost, step_cost
from ligermodels.parallel.expert import check_expert_parallel
from ligermodels.parallel.fsdp import check_one_unit
from ligermodels.parallel.memory import StepMemory, StepTrace, step_memory
from ligermodels.parallel.plan import DtypeName, FsdpUnit
from ligermodels.parallel.shares import Shares

CHECKPOINTING: tuple[ActivationCheckpointing, ...] = get_args(ActivationCheckpointing)
MOST_GPUS = 2**17
"""Largest number of GPUs to plan for; with more, the list of divisions would be too long to be useful."""
RESERVED = 0.06
"""Fraction of a GPU's memory to leave free for the CUDA context, NCCL's buffers and fragmentation."""
EXPERT_LOAD = 1.25
"""Tokens that a rank's experts receive, relative to perfect balance, for which a plan must have memory. It is a usual
capacity factor (https://arxiv.org/abs/2101.03961, section 2.2), but here tokens beyond it are not dropped."""


class States(NamedTuple):
    """How parameters are updated: options of `StepTrace.memory`."""

    optimizer: OptimizerName
    optimizer_in_bwd: bool
    reduce_dtype: DtypeName | None = None


@dataclass(frozen=True)
class Candidate:
    """A plan that fits, and its memory and time.

    Args:
        degrees: degrees of parallelism.
        fsdp_unit: what FSDP2 gathers at once.
        activation_checkpointing: kind of activation checkpointing.
        micro_batch: sequences per forward pass of each group of `context` x `tensor` ranks.
        passes: forward passes per step.
        memory: memory of each GPU; with expert parallelism, at an expert load of EXPERT_LOAD.
        cost: operations, communication and time of an optimizer step.
        cost_gathered_once: the same if blocks stay gathered after their forward pass (`reshard_after_forward=False`).
    """

    degrees: Degrees
    fsdp_unit: FsdpUnit
    activation_checkpointing: ActivationCheckpointing
    micro_batch: int
    passes: int
    memory: StepMemory
    cost: StepCost
    cost_gathered_once: StepCost


def candidates(
    model: CausalLM,
    gpus: int,
    memory: int,
    batch_tokens: int,
    seq_len: int,
    *,
    optimizer: OptimizerName = "adamw",
    optimizer_in_bwd: bool = False,
    reduce_dtype: DtypeName | None = None,
    hardware: Hardware | None = None,
) -> list[Candidate]:
    """Plans that fit into memory, the fastest first by `step_cost`.

    Tries each way to divide the GPUs into replicas and shards, and the experts over these, with each kind of activation
    checkpointing but "offload", and the largest micro-batch that fits. FSDP2's unit is a block, or the model where that
    is faster. If no such plan fits, or there are fewer
    sequences than GPUs, each sequence (`context`) or each matrix product within a host (`tensor`) is also divided, over
    as few GPUs as possible. If still none fits, all this is tried with "offload".

    Args:
        model: the model on the meta device as it will be trained, with LoRA if it is used.
        gpus: number of GPUs.
        memory: memory of a GPU in bytes; the fraction RESERVED is left free.
        batch_tokens: tokens per optimizer step over all GPUs.
        seq_len: tokens per sequence.
        optimizer: "adamw", "adamw8bit", "muon", "muon8bit", or on one GPU "adafactor".
        optimizer_in_bwd: whether the backward pass updates each parameter and frees its gradient. Then a step has one
            micro-batch.
        reduce_dtype: dtype of sums of gradients over ranks, as in `ParallelPlan`.
        hardware: speed of a GPU and its links; by default an H200.

    Raises:
        InputError: sizes below 1, more GPUs than MOST_GPUS, or `batch_tokens` that cannot be divided evenly.
        ConfigError: no plan fits (the message says how much memory the smallest plan needs, and how to reduce it), or
            an optimizer that does not work with several GPUs, or with `optimizer_in_bwd`.
    """
    check_count("gpus", gpus, most=MOST_GPUS)
    check_count("memory", memory, most=2**63 - 1)
    check_count("tokens", batch_tokens)
    check_count("seq_len", seq_len)
    check_optimizer(optimizer, in_backward=optimizer_in_bwd, is_sharded=gpus > 1)
    states = States(optimizer, optimizer_in_bwd, reduce_dtype)
    hardware = hardware or Hardware()
    groups = _groups(model, gpus, hardware)
    fewer = batch_tokens < seq_len * gpus and groups[-1] != (1, 1)
    if batch_tokens % (seq_len if fewer else seq_len * gpus):
        raise InputError(
            f"tokens: {batch_tokens} must be a multiple of seq_len x gpus ({seq_len} x {gpus} = {seq_len * gpus}), for "
            f"each GPU to have whole sequences"
        )
    usable, size = int(memory * (1 - RESERVED)), ModelSize.of(model, reduce_dtype)
    plans: dict[tuple[Degrees, ActivationCheckpointing], Candidate] = {}
    before = model.activation_checkpointing
    try:
        widths = [(width, [*same]) for width, same in groupby(groups, key=lambda group: group[0] * group[1])]
        for modes, (width, same_width) in product((CHECKPOINTING[:-1], CHECKPOINTING[-1:]), widths):
            ranks = gpus // width
            sequences, rest = divmod(batch_tokens, seq_len * ranks)
            if rest or not sequences:
                continue
            for (context, tensor), mode in product(same_width, modes):
                model.activation_checkpointing = mode
                divisions = list(_divisions(model, ranks, context, tensor))
                fitting = _largest_that_fit(model, usable, sequences, seq_len, divisions, states)
                for (degrees, unit), (micro, needed) in fitting.items():
                    passes = sequences // micro
                    cost = partial(
                        step_cost,
                        size,
                        micro * seq_len,
                        seq_len,
                        degrees._asdict(),
                        passes=passes,
                        activation_checkpointing=mode,
                        fsdp_unit=unit,
                        hardware=hardware,
                    )
                    times = cost(), cost(reshard_after_forward=False)
                    found = Candidate(degrees, unit, mode, micro, passes, needed, *times)
                    other = plans.get((degrees, mode), found)  # with blocks as units
                    plans[degrees, mode] = min(other, found, key=lambda plan: plan.cost.seconds)
            if plans:
                break
        if not plans:
            model.activation_checkpointing = CHECKPOINTING[-1]
            raise ConfigError(_refusal(model, gpus, usable, batch_tokens, seq_len, groups, states))
    finally:
        model.activation_checkpointing = before
    # Plans of equal speed are ordered by how much they recompute, then by memory.
    return sorted(
        plans.values(),
        key=lambda plan: (
            round(plan.cost.seconds, 6),
            CHECKPOINTING.index(plan.activation_checkpointing),
            plan.memory.total,
        ),
    )


def _groups(model: CausalLM, gpus: int, hardware: Hardware) -> list[tuple[int, int]]:
    """Possible pairs of degrees (context, tensor), the smallest product first."""
    groups = []
    for context in _divisors(gpus):
        for tensor in _divisors(gpus // context):
            if tensor <= hardware.gpus_per_host and _can_be_divided(model, context, tensor):
                groups.append((context, tensor))
    return sorted(groups, key=lambda group: (group[0] * group[1], group[1]))


def _can_be_divided(model: CausalLM, context: int, tensor: int) -> bool:
    try:
        if context > 1:
            check_context_parallel(model.decoder, context * tensor)
        if tensor > 1:
            Shares(model, tensor=tensor)
    except ConfigError:
        return False
    return True


def _divisions(model: CausalLM, ranks: int, context: int, tensor: int) -> Iterator[Degrees]:
    """Ways to divide `ranks` groups of `context` x `tensor` GPUs into replicas and shards, and experts over shards."""
    for shard in _divisors(ranks):
        for expert in _divisors(shard * context if tensor == 1 else 1):
            try:
                if expert > 1:
                    check_expert_parallel(model, expert)
            except ConfigError:
                continue
            yield Degrees(ranks // shard, shard, context, tensor, expert)


def _divisors(number: int) -> Iterator[int]:
    """Divisors of `number` in increasing order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    yield from small
    yield from (number // n for n in reversed(small) if n * n != number)


def _largest_that_fit(
    model: CausalLM, usable: int, sequences: int, seq_len: int, divisions: list[Degrees], states: States
) -> dict[tuple[Degrees, FsdpUnit], tuple[int, StepMemory]]:
    """For each division and unit of FSDP2 that fit, the largest micro-batch that divides `sequences` and fits, and its
    memory.

    All `divisions` have the same context and tensor degrees. For each micro-batch the step is traced at most twice: for
    the divisions that spread experts, and for the others.
    """
    fitting: dict[tuple[Degrees, FsdpUnit], tuple[int, StepMemory]] = {}
    tries = [(degrees, unit) for degrees in divisions for unit in _units(model, degrees)]
    for spread in (False, True):
        remaining = alike = [each for each in tries if (each[0].expert > 1) == spread]
        for micro in [sequences] if states.optimizer_in_bwd else _divisors(sequences):
            if micro == sequences:  # in one pass, without the gradients of passes before
                remaining = alike
            if not remaining:
                continue
            step = _trace(model, micro, seq_len, remaining[0][0])
            needed = {
                (d, unit): step.memory(
                    replicate=d.replicate,
                    shard=d.shard,
                    expert=d.expert,
                    fsdp_unit=unit,
                    passes=sequences // micro,
                    **states._asdict(),
                )
                for d, unit in remaining
            }
            remaining = [each for each in remaining if needed[each].total <= usable]
            fitting.update({each: (micro, needed[each]) for each in remaining})
    return fitting


def _units(model: CausalLM, degrees: Degrees) -> Iterator[FsdpUnit]:
    """The units of FSDP2 that are possible."""
    yield "block"
    if degrees.replicate * degrees.divided > 1:
        with suppress(ConfigError):
            check_one_unit(model, degrees._asdict(), None)
            yield "model"


def memory_of(
    model: CausalLM,
    plan: Candidate,
    seq_len: int,
    *,
    expert_load: float | None = None,
    reshard_after_forward: bool = True,
    optimizer: OptimizerName = "adamw",
    optimizer_in_bwd: bool = False,
    reduce_dtype: DtypeName | None = None,
) -> StepMemory:
    """Memory of a rank for a variant of a plan.

    Args:
        model: the model on the meta device, with the plan's activation checkpointing.
        plan: a plan of `candidates`.
        seq_len: tokens per sequence.
        expert_load: tokens that a rank's experts receive, relative to perfect balance, at most `plan.degrees.expert`:
            then all tokens of all ranks go to this rank's experts. Default: the plan's own load.
        reshard_after_forward: whether blocks are sharded again after their forward pass.
        optimizer: name of the optimizer.
        optimizer_in_bwd: whether the backward pass updates each parameter and frees its gradient.
        reduce_dtype: dtype of sums of gradients over ranks, as in `ParallelPlan`.
    """
    if expert_load is None:
        expert_load = EXPERT_LOAD if plan.degrees.expert > 1 else 1.0
    return step_memory(
        model,
        plan.micro_batch,
        seq_len,
        **plan.degrees._asdict(),
        fsdp_unit=plan.fsdp_unit,
        expert_load=expert_load,
        reshard_after_forward=reshard_after_forward,
        optimizer=optimizer,
        optimizer_in_bwd=optimizer_in_bwd,
        reduce_dtype=reduce_dtype,
        passes=plan.passes,
    )


def _trace(model: CausalLM, micro: int, seq_len: int, degrees: Degrees) -> StepTrace:
    load = EXPERT_LOAD if degrees.expert > 1 else 1.0
    over: dict[str, Any] = {"context": degrees.context, "tensor": degrees.tensor, "expert": degrees.expert}
    return StepTrace(model, micro, seq_len, **over, expert_load=load)


def _refusal(
    model: CausalLM,
    gpus: int,
    usable: int,
    batch_tokens: int,
    seq_len: int,
    groups: list[tuple[int, int]],
    states: States,
) -> str:
    """The message if no plan fits: memory of the smallest plan, and how to reduce it."""
    memories = []
    for context, tensor in groups:
        (*_, most) = _divisions(model, gpus // (context * tensor), context, tensor)
        step, sequences = _trace(model, 1, seq_len, most), batch_tokens // (seq_len * most.replicate * most.shard)
        passes = 1 if states.optimizer_in_bwd else max(1, sequences)
        needed = step.memory(replicate=most.replicate, shard=most.shard, passes=passes, **states._asdict())
        memories.append((context * tensor, needed))
    width, least = min(memories, key=lambda item: item[1].total)
    held = least.weights + least.optimizer_states
    advice = [f"more GPUs (weights and optimizer states take {_gib(held * gpus)} in all)"]
    if least.activations + least.backward > held:
        advice = ["shorter sequences"]
    if any(parameter.requires_grad and parameter.ndim > 1 for parameter in model.decoder.embed.parameters()):
        advice.append("LoRA")
        if states.optimizer in ("adamw", "muon"):
            advice.append(f"states in 8 bits (optimizer {states.optimizer}8bit)")
        if not states.optimizer_in_bwd and states.optimizer.startswith("adamw"):
            advice.append("updates in the backward pass (optimizer_in_bwd), with a micro-batch per step")
    where = "over all" if width > 1 else "on each"
    return (
        f"no plan fits: one sequence of {seq_len} tokens {where} of {gpus} GPUs, all sharded and recomputed, with the "
        f"inputs of blocks in host memory, takes {_gib(least.total)}, and {_gib(usable)} are usable; what would help: "
        + "; ".join(advice)
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size:,} bytes"
