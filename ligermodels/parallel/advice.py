"""Which plan fits a number of GPUs, and which is the fastest of those that do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from ligermodels.arguments import check_count
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers.context_parallel import check_context_parallel
from ligermodels.models.causal_lm import CausalLM
from ligermodels.parallel.cost import Hardware, ModelSize, StepCost, step_cost
from ligermodels.parallel.expert import check_expert_parallel
from ligermodels.parallel.memory import StepMemory, StepTrace, step_memory
from ligermodels.parallel.shares import Shares

CHECKPOINTING: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
MOST_GPUS = 2**17
"""Beyond that there would be more ways to divide them than anybody reads."""
RESERVED = 0.06
"""Fraction of a GPU's memory that is left free: the CUDA context, NCCL's buffers, fragmentation."""
EXPERT_LOAD = 1.25
"""Rows that come to a rank's experts, relative to an equal part of all, which a plan has to have memory for. (A usual
capacity factor, https://arxiv.org/abs/2101.03961, section 2.2: there what is beyond it is dropped, here nothing is.)"""


class Degrees(NamedTuple):
    """Those of a `ParallelPlan`."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1


@dataclass(frozen=True)
class Candidate:
    """A plan, its micro-batch in sequences for each group of `context` and `tensor` ranks, and what it takes on each
    GPU. Of `expert` ranks `memory` is with EXPERT_LOAD."""

    degrees: Degrees
    activation_checkpointing: Literal["none", "selective", "full"]
    micro_batch: int
    memory: StepMemory
    cost: StepCost


def candidates(
    model: CausalLM,
    gpus: int,
    memory: int,
    batch_tokens: int,
    seq_len: int,
    *,
    optimizer: str = "adamw",
    hardware: Hardware | None = None,
) -> list[Candidate]:
    """Plans that fit, the fastest first by `step_cost`: each way to divide the GPUs into replicas and shards, and the
    experts of mixtures over these, with each kind of activation checkpointing, and the largest micro-batch that fits.
    Where there are none, or fewer sequences than GPUs, each sequence (`context`), or each matrix product within a host
    (`tensor`), is divided over as few GPUs as that takes.

    Args:
        model: on the meta device, as it will be trained: with LoRA, if it is to have it.
        gpus: how many.
        memory: bytes of one, of which RESERVED are left free.
        batch_tokens: tokens of an optimizer step, over all GPUs.
        seq_len: tokens per sequence.
        optimizer: "adamw", or on one GPU "adafactor".
        hardware: by default an H200.

    Raises:
        InputError: sizes below 1, more GPUs than MOST_GPUS, or `batch_tokens` that cannot be divided evenly.
        ConfigError: no plan fits; the message has what the smallest one needs, and what would help. Adafactor on
            several GPUs.
    """
    check_count("gpus", gpus, most=MOST_GPUS)
    check_count("memory", memory, most=2**63 - 1)
    check_count("tokens", batch_tokens)
    check_count("seq_len", seq_len)
    if optimizer == "adafactor" and gpus > 1:
        raise ConfigError("optimizer: adafactor does not work on sharded parameters; use adamw")
    hardware = hardware or Hardware()
    groups = _groups(model, gpus, hardware)
    fewer = batch_tokens < seq_len * gpus and groups[-1] != (1, 1)
    if batch_tokens % (seq_len if fewer else seq_len * gpus):
        raise InputError(
            f"tokens: {batch_tokens} must be a multiple of seq_len x gpus ({seq_len} x {gpus} = {seq_len * gpus}), for "
            f"each GPU to have whole sequences"
        )
    usable, size, found = int(memory * (1 - RESERVED)), ModelSize.of(model), list[Candidate]()
    before = model.activation_checkpointing
    try:
        for width, alike in groupby(groups, key=lambda group: group[0] * group[1]):
            ranks = gpus // width
            sequences, rest = divmod(batch_tokens, seq_len * ranks)
            if rest or not sequences:
                continue
            for context, tensor in alike:
                for mode in CHECKPOINTING:
                    model.activation_checkpointing = mode
                    divisions = list(_divisions(model, ranks, context, tensor))
                    fitting = _largest_that_fit(model, usable, sequences, seq_len, divisions, optimizer)
                    for each, (micro, needed) in fitting.items():
                        cost = step_cost(
                            size,
                            micro * seq_len,
                            seq_len,
                            each._asdict(),
                            passes=sequences // micro,
                            activation_checkpointing=mode,
                            hardware=hardware,
                        )
                        found.append(Candidate(each, mode, micro, needed, cost))
            if found:
                break
        if not found:
            model.activation_checkpointing = "full"
            raise ConfigError(_refusal(model, gpus, usable, seq_len, groups, optimizer))
    finally:
        model.activation_checkpointing = before
    # Of plans equally fast the one that computes less again, then the one with less memory.
    return sorted(
        found,
        key=lambda each: (
            round(each.cost.seconds, 6),
            CHECKPOINTING.index(each.activation_checkpointing),
            each.memory.total,
        ),
    )


def _groups(model: CausalLM, gpus: int, hardware: Hardware) -> list[tuple[int, int]]:
    """(context, tensor), over how many GPUs each sequence, or each matrix product, can be divided; those of fewer GPUs
    first."""
    found = []
    for context in _divisors(gpus):
        for tensor in _divisors(gpus // context):
            if tensor <= hardware.gpus_per_host and _can_be_divided(model, context, tensor):
                found.append((context, tensor))
    return sorted(found, key=lambda group: (group[0] * group[1], group[1]))


def _can_be_divided(model: CausalLM, context: int, tensor: int) -> bool:
    try:
        if context > 1:
            check_context_parallel(model.decoder)
        if tensor > 1:
            Shares(model, tensor=tensor)
    except ConfigError:
        return False
    return True


def _divisions(model: CausalLM, ranks: int, context: int, tensor: int) -> Iterator[Degrees]:
    """Ways to divide so many groups of GPUs into replicas and shards, and the experts over shards."""
    for shard in _divisors(ranks):
        for expert in _divisors(shard * context if tensor == 1 else 1):
            try:
                if expert > 1:
                    check_expert_parallel(model, expert)
            except ConfigError:
                continue
            yield Degrees(ranks // shard, shard, context, tensor, expert)


def _divisors(number: int) -> Iterator[int]:
    """From 1 up."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    yield from small
    yield from (number // n for n in reversed(small) if n * n != number)


def _largest_that_fit(
    model: CausalLM, usable: int, sequences: int, seq_len: int, divisions: list[Degrees], optimizer: str
) -> dict[Degrees, tuple[int, StepMemory]]:
    """For each of the divisions, of the same context and tensor, the largest micro-batch that divides `sequences` and
    fits, and its memory. A step is followed once for all of those that spread experts, and once for all others."""
    found = {}
    for spread in (False, True):
        left = [each for each in divisions if (each.expert > 1) == spread]
        for micro in _divisors(sequences):
            if not left:
                break
            step = _follow(model, micro, seq_len, left[0])
            needed = {each: step.memory(shard=each.shard, expert=each.expert, optimizer=optimizer) for each in left}
            left = [each for each in left if needed[each].total <= usable]
            found.update({each: (micro, needed[each]) for each in left})
    return found


def worst_memory(model: CausalLM, found: Candidate, seq_len: int, *, optimizer: str = "adamw") -> StepMemory:
    """The memory of a plan where all tokens of all ranks go to the experts of one, which is that one's; arguments as of
    `candidates`, and the model with the plan's activation checkpointing."""
    spread = {name: size for name, size in found.degrees._asdict().items() if name != "replicate"}
    load = float(found.degrees.expert)
    return step_memory(model, found.micro_batch, seq_len, **spread, expert_load=load, optimizer=optimizer)


def _follow(model: CausalLM, micro: int, seq_len: int, degrees: Degrees) -> StepTrace:
    load = EXPERT_LOAD if degrees.expert > 1 else 1.0
    over = {"context": degrees.context, "tensor": degrees.tensor, "expert": degrees.expert}
    return StepTrace(model, micro, seq_len, **over, expert_load=load)


def _refusal(
    model: CausalLM, gpus: int, usable: int, seq_len: int, groups: list[tuple[int, int]], optimizer: str
) -> str:
    found = []
    for context, tensor in groups:
        (*_, most) = _divisions(model, gpus // (context * tensor), context, tensor)
        step = _follow(model, 1, seq_len, most)
        found.append((context * tensor, step.memory(shard=most.shard, optimizer=optimizer)))
    width, least = min(found, key=lambda each: each[1].total)
    states = least.weights + least.optimizer_states
    advice = [f"more GPUs (weights and optimizer states take {_gib(states * gpus)} in all)"]
    if least.activations > states:
        advice = ["shorter sequences"]
    if any(parameter.requires_grad and parameter.ndim > 1 for parameter in model.decoder.embed.parameters()):
        advice.append("LoRA" if optimizer == "adafactor" or gpus > 1 else "LoRA, or adafactor in place of AdamW")
    where = "over all" if width > 1 else "on each"
    return (
        f"no plan fits: one sequence of {seq_len} tokens {where} of {gpus} GPUs, all sharded and recomputed, takes "
        f"{_gib(least.total)}, and {_gib(usable)} are usable; what would help: {'; '.join(advice)}"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size:,} bytes"
