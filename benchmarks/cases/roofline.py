"""Roofline of a training step: a lower bound of its time, measured on this GPU as a step of only the unavoidable work.

- Attention by the fastest backend, and the GEMMs of all projections through cuBLAS, forward and for both gradients.
- A copy of the fewest bytes that norms, rotary embedding, gated activations and the loss have to move.
- A copy of 14 bytes per parameter for AdamW in bf16.

After attention in the last block only tokens with a target count. The embedding, biases and launches are left out: the
step is one CUDA graph. It is timed back to back with equal steps after a warm-up of one second, because its parts draw
less power alone, and take less time.

In float8 the projections of the blocks multiply operands that are already cast, with tensor-wise scales and fast
accumulation. Where the weight is frozen, the other operand has a scale for each row. A cast takes no pass of its own,
nor a pass for the maximum: the kernel that computes an operand, attention included, writes one byte per element for
each product that reads it, in place of bf16. With weight gradients an operand is read by two products, as in bf16; with
a frozen weight by one, forward and backward. Two costs are added: the gradient of the residual is needed in bf16, and
in float8 as the gradient of an output projection; and the optimizer, which keeps trained weights in bf16, writes two
more bytes per weight. Frozen weights are cast beforehand.

LoRA trains neither head nor embedding, so only the gradients of inputs are computed, and none for the first block. Its
low-rank products and its optimizer are left out. Nothing is recomputed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn

import ligermodels as lm
from benchmarks.cases import attention
from benchmarks.cases.projections import BOTH, IN_BF16, Call, Products, Shape, gemms
from benchmarks.timing import measure
from ligermodels.layers import Attention, AttentionConfig, Block, Layer

ADAMW_BYTES = 14
"""Bytes per parameter: the parameter and two states read and written, the gradient read, all in bf16."""

ATTEMPTS = 4
"""Calls of an attention backend in one CUDA graph, to find the fastest backend."""
PASS = 2**31
"""Largest number of bytes that one copy moves."""
FROZEN = ("input",)
"""Gradients of a projection with a frozen weight."""


class Projection(NamedTuple):
    """A projection: (rows, out features, in features), and the gradients that are needed."""

    shape: Shape
    gradients: tuple[str, ...]


class Work(NamedTuple):
    """The work of a block: its attention and its projections."""

    attention: attention.Case
    projections: tuple[Projection, ...]


def fastest_attention(case: attention.Case, backward: bool = True) -> Call:
    """One call of attention by the fastest backend, forward and, with `backward`, backward."""
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
        except Exception as failure:  # The backend does not support the case, or cannot be captured.
            failures.append(failure)
    if not times:
        raise RuntimeError(f"no backend of attention can be timed for {case.name}: {failures}")
    return min(times, key=lambda call: times[call])


def block(work: Work, products: Products = IN_BF16) -> list[Call]:
    """Calls for the attention and the GEMMs of a block."""
    calls = [call for shape, gradients in work.projections for call in products.calls(shape, gradients)]
    return [*calls, fastest_attention(work.attention, any(projection.gradients for projection in work.projections))]


def copies(count: int) -> list[Call]:
    """Calls that move `count` bytes, half of them read and half written."""
    whole, rest = divmod(count, PASS)
    return [*(whole * [measure.moving(PASS)] if whole else ()), measure.moving(rest)]


def step_ms(calls: Sequence[Call]) -> float:
    """Milliseconds of a step of these calls, back to back with equal steps. Results are dropped."""

    def step() -> None:
        for call in calls:
            call()

    return measure.sustained(measure.graphed(step))


def least_bytes(
    model: lm.CausalLM, tokens: int, late: int, products: Products = IN_BF16, gradients: Sequence[str] = BOTH
) -> int:
    """Fewest bytes that norms, residual additions, rotary embedding and gated activations of all blocks move.

    Args:
        model: Model, on the meta device.
        tokens: Number of tokens.
        late: Number of tokens after attention in the last block.
        products: Precision of the projections.
        gradients: Gradients of the projections; without any, only the forward pass counts.
    """
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


def training_roofline(
    config: dict[str, Any],
    batch: int,
    length: int,
    ignored: float,
    products: Products = IN_BF16,
    gradients: Sequence[str] = BOTH,
) -> float:
    """Lower bound of a training step of a dense model, in milliseconds.

    Args:
        config: Config of the model, as config.json has it.
        batch: Sequences per step.
        length: Tokens per sequence.
        ignored: Fraction of tokens without a target.
        products: Precision of the blocks' projections.
        gradients: Gradients of the projections: BOTH, or FROZEN for LoRA.

    Raises:
        ValueError: A layer is neither attention nor an MLP.
    """
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


def medusa_roofline(
    config: dict[str, Any], num_heads: int, batch: int, length: int, ignored: float, products: Products = IN_BF16
) -> float:
    """Lower bound of a step of Medusa stage 1, in milliseconds: the backbone's forward pass, and heads in bf16 with
    one ResBlock and one lm_head each, forward and backward.

    Args:
        config: Config of the model, as config.json has it.
        num_heads: Number of Medusa heads.
        batch: Sequences per step.
        length: Tokens per sequence.
        ignored: Fraction of tokens without a target.
        products: Precision of the backbone's projections.
    """
    model = lm.from_config(config, dtype=torch.bfloat16, device="meta")
    (vocab, hidden), tokens = model.head.weight.shape, batch * length
    targets = int(tokens * (1 - ignored))
    calls = num_heads * [*gemms((targets, vocab, hidden)), *gemms((targets, hidden, hidden), ("weight",))]
    calls += forward_calls(model, batch, length, products, 4 * num_heads * targets * vocab)
    return step_ms([*calls, *copies(ADAMW_BYTES * num_heads * (vocab + hidden + 1) * hidden)])


def forward_calls(
    model: lm.CausalLM, batch: int, length: int, products: Products = IN_BF16, moved: int = 0
) -> list[Call]:
    """Calls for the forward pass of the blocks.

    Args:
        model: Model, on the meta device.
        batch: Sequences per step.
        length: Tokens per sequence.
        products: Precision of the projections.
        moved: Further bytes that the step moves.
    """
    tokens, calls = batch * length, list[Call]()
    moved += least_bytes(model, tokens, tokens, products, ())
    of_a_block = copies(moved // len(model.decoder.blocks))
    for work, count in _blocks(model, batch, length, tokens, ()).items():
        calls += count * [*block(work, products), *of_a_block]
    return calls


def _linears(module: nn.Module) -> Iterable[nn.Linear]:
    return (m for m in module.modules() if isinstance(m, nn.Linear))


def _blocks(
    model: lm.CausalLM, batch: int, length: int, targets: int, gradients: Sequence[str] = BOTH
) -> Counter[Work]:
    """Counts equal blocks by their work. `targets`: rows after attention in the last block."""
    works: Counter[Work] = Counter()
    if other := {type(b.mixer).__name__ for b in model.config.blocks if not isinstance(b.mixer, AttentionConfig)}:
        raise ValueError(f"no lower bound is known for {', '.join(sorted(other))}")
    blocks = cast(Sequence[Block], model.decoder.blocks)
    for index, (block, config) in enumerate(zip(blocks, model.config.blocks, strict=True)):
        a, mlp = cast(AttentionConfig, config.mixer), cast(Layer, block.mlp)
        late = {cast(Attention, block.mixer).o, *mlp.modules()}
        last, to_inputs = index == len(blocks) - 1, index > 0 or "weight" in gradients
        projections = []
        for m in _linears(block):
            rows = targets if last and m in late else batch * length
            needed = tuple(gradients) if to_inputs or m in late else ()
            projections.append(Projection((rows, m.out_features, m.in_features), needed))
        case = attention.Case(batch, length, a.num_heads, a.num_kv_heads, a.head_dim, a.window, a.softcap)
        works[Work(case, tuple(projections))] += 1
    return works
