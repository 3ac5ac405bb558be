"""Which plan fits a number of GPUs, and which is the fastest of those that do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ligermodels.archs.causal_lm import CausalLM
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers.context_parallel import check_context_parallel
from ligermodels.parallel.cost import Hardware, ModelSize, StepCost, step_cost
from ligermodels.parallel.memory import StepMemory, step_memory

CHECKPOINTING: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
RESERVED = 0.06
"""Fraction of a GPU's memory that is left free: the CUDA context, NCCL's buffers, fragmentation."""


@dataclass(frozen=True)
class Candidate:
    """A plan, its micro-batch in sequences for each GPU, and what it takes."""

    replicate: int
    shard: int
    activation_checkpointing: Literal["none", "selective", "full"]
    micro_batch: int
    memory: StepMemory
    cost: StepCost
    context: int = 1


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
    """Plans that fit, the fastest first by `step_cost`: each way to divide the GPUs into replicas and shards with each
    kind of activation checkpointing, with the largest micro-batch that fits. Where there are none, or fewer sequences
    than GPUs, each sequence is divided over as few GPUs as that takes (`context`).

    Args:
        model: on the meta device, as it will be trained: with LoRA, if it is to have it.
        gpus: how many.
        memory: bytes of one, of which RESERVED are left free.
        batch_tokens: tokens of an optimizer step, over all GPUs.
        seq_len: tokens per sequence.
        optimizer: "adamw" or "adafactor".
        hardware: by default an H200.

    Raises:
        InputError: sizes below 1, or `batch_tokens` that cannot be divided evenly.
        ConfigError: no plan fits; the message has what the smallest one needs, and what would help.
    """
    for name, value in (("gpus", gpus), ("memory", memory), ("tokens", batch_tokens), ("seq_len", seq_len)):
        if value < 1:
            raise InputError(f"{name}: must be at least 1, got {value}")
    contexts = _contexts(model, gpus)
    fewer = batch_tokens < seq_len * gpus and contexts[-1] > 1
    if batch_tokens % (seq_len if fewer else seq_len * gpus):
        raise InputError(
            f"tokens: {batch_tokens} must be a multiple of seq_len x gpus ({seq_len} x {gpus} = {seq_len * gpus}), for "
            f"each GPU to have whole sequences"
        )
    usable, size, found = int(memory * (1 - RESERVED)), ModelSize.of(model), list[Candidate]()
    before = model.activation_checkpointing
    try:
        for context, mode, shard in _divisions(contexts, gpus):
            if found and context > found[0].context:
                break
            ranks = gpus // context
            sequences, rest = divmod(batch_tokens, seq_len * ranks)
            if not rest and sequences:
                model.activation_checkpointing = mode
                fitting = _largest_that_fits(model, usable, sequences, seq_len, shard, context, optimizer)
                if fitting is None:
                    continue
                micro, needed = fitting
                degrees = {"replicate": ranks // shard, "shard": shard, "context": context}
                cost = step_cost(
                    size,
                    micro * seq_len,
                    seq_len,
                    degrees,
                    passes=sequences // micro,
                    activation_checkpointing=mode,
                    hardware=hardware,
                )
                found.append(Candidate(ranks // shard, shard, mode, micro, needed, cost, context))
        if not found:
            model.activation_checkpointing = "full"
            raise ConfigError(_refusal(model, gpus, usable, seq_len, optimizer))
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


def _contexts(model: CausalLM, gpus: int) -> list[int]:
    """Over how many GPUs each sequence can be divided."""
    try:
        check_context_parallel(model.decoder)
    except ConfigError:
        return [1]
    return list(_divisors(gpus))


def _divisions(contexts: list[int], gpus: int) -> Iterator[tuple[int, Literal["none", "selective", "full"], int]]:
    """(context, activation checkpointing, shard), those of a smaller context first."""
    for context in contexts:
        for mode in CHECKPOINTING:
            for shard in _divisors(gpus // context):
                yield context, mode, shard


def _divisors(number: int) -> Iterator[int]:
    return (n for n in range(1, number + 1) if number % n == 0)


def _largest_that_fits(
    model: CausalLM, usable: int, sequences: int, seq_len: int, shard: int, context: int, optimizer: str
) -> tuple[int, StepMemory] | None:
    """A micro-batch that divides `sequences`, and its memory; None where not even one sequence fits."""
    fitting = None
    for micro in _divisors(sequences):
        needed = step_memory(model, micro, seq_len, shard=shard, context=context, optimizer=optimizer)
        if needed.total > usable:
            break
        fitting = micro, needed
    return fitting


def _refusal(model: CausalLM, gpus: int, usable: int, seq_len: int, optimizer: str) -> str:
    context = _contexts(model, gpus)[-1]
    least = step_memory(model, 1, seq_len, shard=gpus // context, context=context, optimizer=optimizer)
    states = least.weights + least.optimizer_states
    advice = [f"more GPUs (weights and optimizer states take {_gib(states * gpus)} in all)"]
    if least.activations > states:
        advice = ["shorter sequences"]
    if any(parameter.requires_grad and parameter.ndim > 1 for parameter in model.decoder.embed.parameters()):
        advice.append("LoRA" if optimizer == "adafactor" else "LoRA, or adafactor in place of AdamW")
    where = "over all" if context > 1 else "on each"
    return (
        f"no plan fits: one sequence of {seq_len} tokens {where} of {gpus} GPUs, all sharded and recomputed, takes "
        f"{_gib(least.total)}, and {_gib(usable)} are usable; what would help: {'; '.join(advice)}"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
