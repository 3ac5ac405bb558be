"""The least time of a training step on this very GPU: a step of nothing but what nobody can leave out.

What is in it: attention by the fastest backend and the GEMMs of all projections, forward and for both gradients,
through cuBLAS; in place of norms, rotations, gated activations and the loss a copy of the fewest bytes that they move;
and in place of AdamW in bf16 one of 14 bytes a parameter. Past attention in the last block only tokens with a target
count. The embedding, biases and launches are left out: it is one CUDA graph. It is timed among others like it, once a
second of them has warmed the card; its parts by themselves, which draw less power, take less time.

In float8 the projections of the blocks multiply operands that are cast already, with tensor-wise scales (where the
weight is frozen, with a scale for each row of the other operand) and fast accumulation, and all else is as before.
Casts take no pass of their own, nor one for a maximum: whatever computes an operand, attention included, writes it once
in place of bf16, one byte for each product that it takes part in. With weight gradients these are two, as in bf16; a
frozen weight leaves one, forward and backward. What comes in addition: the gradient of the residual is needed in bf16
and, as that of an output projection, in float8; and of a trained weight, which the optimizer keeps in bf16, it writes
two bytes more. A frozen one has been cast before.

Of LoRA, which trains neither head nor embedding, there are the gradients of inputs alone. Its own products, of low
rank, are left out, as is the optimizer; the inputs of the first block need no gradient. Nothing is recomputed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn

import ligermodels as lm
from benchmarks import attention, measure
from benchmarks.projections import BOTH, IN_BF16, Call, Products, Shape, gemms
from ligermodels.layers import AttentionConfig, Block

ADAMW_BYTES = 14
"""A parameter: it and two states read and written, its gradient read, all in bf16."""

ATTEMPTS = 4
"""Calls of a backend of attention in a row, to find the fastest."""
PASS = 2**31
"""Bytes that a copy moves at most."""
FROZEN = ("input",)
"""The gradients of a projection whose weight is frozen."""


class Projection(NamedTuple):
    """Rows, size and width, and the gradients that are needed."""

    shape: Shape
    gradients: tuple[str, ...]


class Work(NamedTuple):
    """Of a block: its attention, and each projection."""

    attention: attention.Case
    projections: tuple[Projection, ...]


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


def block(work: Work, products: Products = IN_BF16) -> list[Call]:
    """A block's attention and GEMMs."""
    calls = [call for shape, gradients in work.projections for call in products.calls(shape, gradients)]
    return [*calls, fastest_attention(work.attention, any(each.gradients for each in work.projections))]


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


def least_bytes(
    model: lm.CausalLM, tokens: int, late: int, products: Products = IN_BF16, gradients: Sequence[str] = BOTH
) -> int:
    """Of the blocks' norms, each with an addition where there is one, rotations and gated activations, forward and,
    where projections have gradients, backward. Past attention in the last block there are `late` tokens."""
    hidden, total, blocks = model.config.hidden_size, 0, model.config.blocks
    operand = products.operand(1 + ("weight" in gradients))
    gradient, beside = products.operand(len(gradients)), products.beside(len(gradients))
    for index, block in enumerate(blocks):
        after = late if index == len(blocks) - 1 else tokens
        a, size = cast(AttentionConfig, block.mixer), after * getattr(block.mlp, "size", 0)
        heads = tokens * (a.num_heads + a.num_kv_heads) * a.head_dim
        normed, added = block.pre_norm * (tokens + after) * hidden, 2 * after * hidden
        total += (6 + operand) * normed + 4 * block.post_norm * added + 4 * heads + (4 + operand) * size
        if not gradients:
            continue
        if index or "weight" in gradients:
            total += 8 * normed
        total += (4 + gradient if block.post_norm else beside) * added
        total += ((2 if a.qk_norm is None else 4) + gradient) * heads + (6 + 2 * gradient) * size
    return total


def floor(
    config: dict[str, Any],
    batch: int,
    length: int,
    ignored: float,
    products: Products = IN_BF16,
    gradients: Sequence[str] = BOTH,
) -> float:
    """Milliseconds of the least step of a dense model, the blocks' projections by `products`; ValueError where a layer
    is neither attention nor an MLP. `gradients`: FROZEN for LoRA."""
    model = lm.from_config(config, dtype=torch.bfloat16, device="meta")
    (vocab, hidden), tokens = model.head.weight.shape, batch * length
    targets = int(tokens * (1 - ignored))
    works = _blocks(model, batch, length, targets, gradients)
    moved = least_bytes(model, tokens, targets, products, gradients) + targets * (16 * hidden + 4 * vocab)
    of_a_block = copies(moved // len(model.decoder.blocks))
    calls = gemms((targets, vocab, hidden), gradients)
    for work, count in works.items():
        calls += count * [*block(work, products), *of_a_block]
    if "weight" in gradients:
        written = products.beside(2) * sum(m.weight.numel() for m in _linears(model.decoder.blocks))
        calls += copies(ADAMW_BYTES * sum(p.numel() for p in model.parameters()) + written)
    return step_ms(calls)


def medusa_floor(
    config: dict[str, Any], num_heads: int, batch: int, length: int, ignored: float, products: Products = IN_BF16
) -> float:
    """The same of Medusa stage 1: the backbone's forward pass, and heads of one ResBlock and an lm_head of their own,
    in bf16, with the gradients that these need."""
    model = lm.from_config(config, dtype=torch.bfloat16, device="meta")
    (vocab, hidden), tokens = model.head.weight.shape, batch * length
    targets = int(tokens * (1 - ignored))
    moved = 4 * num_heads * targets * vocab + least_bytes(model, tokens, tokens, products, ())
    of_a_block = copies(moved // len(model.decoder.blocks))
    calls = num_heads * [*gemms((targets, vocab, hidden)), *gemms((targets, hidden, hidden), ("weight",))]
    for work, count in _blocks(model, batch, length, tokens, ()).items():
        calls += count * [*block(work, products), *of_a_block]
    return step_ms([*calls, *copies(ADAMW_BYTES * num_heads * (vocab + hidden + 1) * hidden)])


def _linears(module: nn.Module) -> Iterable[nn.Linear]:
    return (m for m in module.modules() if isinstance(m, nn.Linear))


def _blocks(
    model: lm.CausalLM, batch: int, length: int, targets: int, gradients: Sequence[str] = BOTH
) -> Counter[Work]:
    """How often there is which work. `targets` are the rows past attention in the last block."""
    found: Counter[Work] = Counter()
    if other := {type(b.mixer).__name__ for b in model.config.blocks if not isinstance(b.mixer, AttentionConfig)}:
        raise ValueError(f"no lower bound is known of {', '.join(sorted(other))}")
    blocks = cast(Sequence[Block], model.decoder.blocks)
    for index, (block, config) in enumerate(zip(blocks, model.config.blocks, strict=True)):
        a, late = cast(AttentionConfig, config.mixer), {block.mixer.o, *block.mlp.modules()}
        last, to_inputs = index == len(blocks) - 1, index > 0 or "weight" in gradients
        projections = []
        for m in _linears(block):
            rows = targets if last and m in late else batch * length
            needed = tuple(gradients) if to_inputs or m in late else ()
            projections.append(Projection((rows, m.out_features, m.in_features), needed))
        case = attention.Case(batch, length, a.num_heads, a.num_kv_heads, a.head_dim, a.window, a.softcap)
        found[Work(case, tuple(projections))] += 1
    return found
