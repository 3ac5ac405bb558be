"""The least time of a training step on this very GPU: a step of nothing but what nobody can leave out.

What is in it: attention by the fastest backend and the GEMMs of all projections, forward and for both gradients,
through cuBLAS; in place of norms, rotations, gated activations and the loss a copy of the fewest bytes that they move;
and in place of AdamW in bf16 one of 14 bytes a parameter. Past attention in the last block only tokens with a target
count. The embedding, biases and launches are left out: it is one CUDA graph. It is timed among others like it, once a
second of them has warmed the card; its parts by themselves, which draw less power, take less time.
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
from ligermodels.layers import AttentionConfig, Block

ADAMW_BYTES = 14
"""A parameter: it and two states read and written, its gradient read, all in bf16."""

ATTEMPTS = 4
"""Calls of a backend of attention in a row, to find the fastest."""
PASS = 2**31
"""Bytes that a copy moves at most."""
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
            times[call] = measure.in_a_row(ATTEMPTS * [call])
        except Exception as failure:  # It cannot serve this case, or not be captured.
            failures.append(failure)
    if not times:
        raise RuntimeError(f"no backend of attention can be timed for {case.name}: {failures}")
    return min(times, key=lambda call: times[call])


def block(work: Work, gradients: Sequence[str] = BOTH) -> list[Call]:
    """A block's attention and GEMMs."""
    calls = [call for shape in work.projections for call in gemms(shape, gradients)]
    return [*calls, fastest_attention(work.attention, bool(gradients))]


def copies(count: int) -> list[Call]:
    """What moves `count` bytes, half of them read and half written."""
    whole, rest = divmod(count, PASS)
    return [*(whole * [measure.moving(PASS)] if whole else ()), measure.moving(rest)]


def step_ms(calls: Sequence[Call]) -> float:
    """Time of all these calls, whose results nobody keeps, among other such steps."""

    def step() -> None:
        for call in calls:
            call()

    return measure.sustained(measure.graphed(step))


def least_bytes(model: lm.CausalLM, tokens: int, targets: int) -> int:
    """Of norms, each with an addition where there is one, rotations, gated activations and the loss."""
    config = model.config
    total = 16 * targets * config.hidden_size + 4 * targets * config.vocab_size
    for left, block in enumerate(reversed(config.blocks)):
        late = tokens if left else targets
        a = cast(AttentionConfig, block.mixer)
        heads = (a.num_heads + a.num_kv_heads) * a.head_dim
        total += (8 if a.qk_norm is None else 10) * tokens * heads
        total += (16 * block.pre_norm * (tokens + late) + 10 * block.post_norm * 2 * late) * config.hidden_size
        total += 16 * late * getattr(block.mlp, "size", 0)
    return total


def floor(config: dict[str, Any], batch: int, length: int, ignored: float) -> float:
    """Milliseconds of the least step of a dense model; ValueError where a layer is neither attention nor an MLP."""
    model = lm.from_config(config, dtype=torch.bfloat16, device="meta")
    targets = int(batch * length * (1 - ignored))
    works = _blocks(model, batch, length, targets)
    of_a_block = copies(least_bytes(model, batch * length, targets) // len(model.decoder.blocks))
    calls = gemms((targets, *model.head.weight.shape))
    for work, count in works.items():
        calls += count * [*block(work), *of_a_block]
    return step_ms([*calls, *copies(ADAMW_BYTES * sum(p.numel() for p in model.parameters()))])


def medusa_floor(config: dict[str, Any], num_heads: int, batch: int, length: int, ignored: float) -> float:
    """The same of Medusa stage 1: the backbone's forward pass, and heads of one ResBlock and an lm_head of their own
    with the gradients that these need."""
    model = lm.from_config(config, dtype=torch.bfloat16, device="meta")
    (vocab, hidden), tokens = model.head.weight.shape, batch * length
    targets = int(tokens * (1 - ignored))
    moved = 4 * num_heads * targets * vocab
    for each in model.config.blocks:
        a = cast(AttentionConfig, each.mixer)
        heads = a.num_heads + a.num_kv_heads
        moved += tokens * (16 * hidden + 4 * heads * a.head_dim + 6 * getattr(each.mlp, "size", 0))
    of_a_block = copies(moved // len(model.decoder.blocks))
    calls = num_heads * [*gemms((targets, vocab, hidden)), *gemms((targets, hidden, hidden), ("weight",))]
    for work, count in _blocks(model, batch, length, tokens).items():
        calls += count * [*block(work, ()), *of_a_block]
    return step_ms([*calls, *copies(ADAMW_BYTES * num_heads * (vocab + hidden + 1) * hidden)])


def _blocks(model: lm.CausalLM, batch: int, length: int, targets: int) -> Counter[Work]:
    """How often there is which work. `targets` are the rows past attention in the last block."""
    found: Counter[Work] = Counter()
    if other := {type(b.mixer).__name__ for b in model.config.blocks if not isinstance(b.mixer, AttentionConfig)}:
        raise ValueError(f"no lower bound is known of {', '.join(sorted(other))}")
    blocks = cast(Iterable[Block], reversed(model.decoder.blocks))
    for left, (block, config) in enumerate(zip(blocks, reversed(model.config.blocks), strict=True)):
        a, late = cast(AttentionConfig, config.mixer), {block.mixer.o, *block.mlp.modules()}
        shapes = [
            (batch * length if left or m not in late else targets, m.out_features, m.in_features)
            for m in block.modules()
            if isinstance(m, nn.Linear)
        ]
        case = attention.Case(batch, length, a.num_heads, a.num_kv_heads, a.head_dim, a.window, a.softcap)
        found[Work(case, tuple(shapes))] += 1
    return found
