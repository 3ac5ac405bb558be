"""The least time of a training step on this very GPU, of limits that are measured here.

What it counts: attention by the fastest backend and the GEMMs of all projections, forward and for both gradients,
through cuBLAS, in CUDA graphs of some blocks, at the clock that a second of such load leaves the card; the fewest bytes
of norms, rotations, gated activations and the loss, and 14 bytes a parameter for AdamW in bf16, at the rate of a large
device copy. Past attention in the last block only tokens with a target count. The embedding, biases and launches are
left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn

import ligermodels as lm
from benchmarks import attention, measure
from benchmarks.case import random
from ligermodels.layers import Block

ADAMW_BYTES = 14
"""A parameter: it and two states read and written, its gradient read, all in bf16."""


ROW = 4
"""Equal blocks, or heads, that are timed in a row, on the same tensors: part of these may be in the cache."""
BOTH = ("input", "weight")
"""The gradients of a projection."""

Call = Callable[[], object]
Shape = tuple[int, int, int]


class Work(NamedTuple):
    """Of a block: its attention, and rows, size and width of each projection."""

    attention: attention.Case
    projections: tuple[Shape, ...]


def gemms(shape: Shape, gradients: Sequence[str] = BOTH) -> list[Call]:
    """x (rows, width) times a weight (size, width), and the gradients named."""
    rows, size, width = shape
    x, weight, gradient = random(rows, width), random(size, width) * width**-0.5, random(rows, size)
    of_gradients: dict[str, Call] = {"input": lambda: gradient @ weight, "weight": lambda: gradient.t() @ x}
    return [lambda: x @ weight.t(), *(of_gradients[name] for name in gradients)]


def fastest_attention(case: attention.Case, backward: bool = True) -> Call:
    """Forward and, if wanted, backward by the fastest backend."""
    *inputs, seed = case.inputs()
    leaves = [x.requires_grad_(backward) for x in inputs]

    def passes(provider: attention.Call) -> object:
        out = provider(*leaves)
        return torch.autograd.grad(out, leaves, seed) if backward else out

    times, failures = dict[Call, float](), list[Exception]()
    for provider in attention.providers(case).values():
        call = partial(passes, provider)
        try:
            times[call] = measure.in_a_row(ROW * [call])
        except Exception as failure:  # It cannot serve this case, or not be captured.
            failures.append(failure)
    if not times:
        raise RuntimeError(f"no backend of attention can be timed for {case.name}: {failures}")
    return min(times, key=lambda call: times[call])


def one_ms(calls: list[Call]) -> float:
    """Time of all these calls, among repetitions of them."""
    return measure.sustained(measure.graphed(lambda: [call() for call in ROW * calls])) / ROW


def block_ms(work: Work, gradients: Sequence[str] = BOTH) -> float:
    """Time of a block's attention and GEMMs."""
    calls = [call for shape in work.projections for call in gemms(shape, gradients)]
    return one_ms([*calls, fastest_attention(work.attention, bool(gradients))])


def head_ms(shape: Shape, gradients: Sequence[str] = BOTH) -> float:
    """Time of the GEMMs of a projection by itself."""
    return one_ms(gemms(shape, gradients))


def least_bytes(model: lm.CausalLM, tokens: int, targets: int) -> int:
    """Of norms, each with an addition where there is one, rotations, gated activations and the loss."""
    config = model.config
    total = 16 * targets * config.hidden_size + 4 * targets * config.vocab_size
    for left, block in enumerate(reversed(config.blocks)):
        late = tokens if left else targets
        heads = (block.attention.num_heads + block.attention.num_kv_heads) * block.attention.head_dim
        total += (8 if block.attention.qk_norm is None else 10) * tokens * heads
        total += (16 * block.pre_norm * (tokens + late) + 10 * block.post_norm * 2 * late) * config.hidden_size
        total += 16 * late * getattr(block.mlp, "size", 0)
    return total


def floor(config: dict[str, Any], batch: int, length: int, ignored: float) -> dict[str, float]:
    """`floor_ms` of a step of a dense model, and its parts."""
    model = lm.from_config(config, dtype=torch.bfloat16, device="meta")
    tokens = batch * length
    targets = int(tokens * (1 - ignored))
    blocks = sum(count * block_ms(work) for work, count in _blocks(model, batch, length, targets).items())
    rate = measure.copy_rate() / 1e3
    parts = {
        "blocks": blocks,
        "head": head_ms((targets, *model.head.weight.shape)),
        "memory_bound": least_bytes(model, tokens, targets) / rate,
        "optimizer": ADAMW_BYTES * sum(p.numel() for p in model.parameters()) / rate,
    }
    measure.free()
    return {"floor_ms": sum(parts.values())} | {f"floor_{name}_ms": part for name, part in parts.items()}


def medusa_floor(config: dict[str, Any], num_heads: int, batch: int, length: int, ignored: float) -> dict[str, float]:
    """`floor_ms` of a step of Medusa stage 1: the backbone's forward pass, and heads of one ResBlock and an lm_head of
    their own with the gradients that these need."""
    model = lm.from_config(config, dtype=torch.bfloat16, device="meta")
    (vocab, hidden), tokens = model.head.weight.shape, batch * length
    targets = int(tokens * (1 - ignored))
    moved = 4 * num_heads * targets * vocab
    for block in model.config.blocks:
        heads = block.attention.num_heads + block.attention.num_kv_heads
        moved += tokens * (16 * hidden + 4 * heads * block.attention.head_dim + 6 * getattr(block.mlp, "size", 0))
    rate = measure.copy_rate() / 1e3
    parts = {
        "blocks": sum(count * block_ms(work, ()) for work, count in _blocks(model, batch, length, tokens).items()),
        "heads": num_heads * (head_ms((targets, vocab, hidden)) + head_ms((targets, hidden, hidden), ("weight",))),
        "memory_bound": moved / rate,
        "optimizer": ADAMW_BYTES * num_heads * (vocab + hidden + 1) * hidden / rate,
    }
    measure.free()
    return {"floor_ms": sum(parts.values())} | {f"floor_{name}_ms": part for name, part in parts.items()}


def _blocks(model: lm.CausalLM, batch: int, length: int, targets: int) -> Counter[Work]:
    """How often there is which work. `targets` are the rows past attention in the last block."""
    found: Counter[Work] = Counter()
    blocks = cast(Iterable[Block], reversed(model.blocks))
    for left, (block, config) in enumerate(zip(blocks, reversed(model.config.blocks), strict=True)):
        a, late = config.attention, {block.attention.o, *block.mlp.modules()}
        shapes = [
            (batch * length if left or m not in late else targets, m.out_features, m.in_features)
            for m in block.modules()
            if isinstance(m, nn.Linear)
        ]
        case = attention.Case(batch, length, a.num_heads, a.num_kv_heads, a.head_dim, a.window, a.softcap)
        found[Work(case, tuple(shapes))] += 1
    return found
