"""The least time of a training step on this very GPU, of limits that are measured here, one after another.

What it counts: the GEMMs of all projections, forward and for both gradients, through cuBLAS; attention by the fastest
backend; the fewest bytes of norms, rotations, gated activations and the loss, and 14 bytes a parameter for AdamW in
bf16, at the rate of a large device copy. Past attention in the last block only tokens with a target count. The
embedding, biases and launches are left out.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import torch
from torch import nn

import ligermodels as lm
from benchmarks import attention, measure
from benchmarks.case import random
from ligermodels.layers import Block

ADAMW_BYTES = 14
"""A parameter: it and two states read and written, its gradient read, all in bf16."""


def gemm_ms(rows: int, size: int, width: int, gradients: str = "input weight") -> float:
    """Time of x (rows, width) times a weight (size, width), and of the gradients named."""
    x, weight, gradient = random(rows, width), random(size, width) * width**-0.5, random(rows, size)
    time = measure.milliseconds(lambda: x @ weight.t())
    time += measure.milliseconds(lambda: gradient @ weight) if "input" in gradients else 0.0
    return time + (measure.milliseconds(lambda: gradient.t() @ x) if "weight" in gradients else 0.0)


def attention_ms(case: attention.Case, which: str = "both_ms") -> float:
    """Forward and backward by the fastest backend, or only "forward_ms"."""
    inputs, found = case.inputs(), []
    for call in attention.providers(case).values():
        try:
            found.append(attention.timed(case, {"alone": call}, inputs)["alone"][which])
        except Exception:  # It cannot serve this case.
            continue
    return min(found)


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
    gemms = sum(count * gemm_ms(*shape) for shape, count in _projections(model, tokens, targets).items())
    gemms += gemm_ms(targets, *model.head.weight.shape)
    cases = _attentions(model, batch, length)
    rate = measure.copy_rate() / 1e3
    parts = {
        "gemms": gemms,
        "attention": sum(count * attention_ms(case) for case, count in cases.items()),
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
    gemms = sum(count * gemm_ms(*shape, "") for shape, count in _projections(model, tokens, tokens).items())
    gemms += num_heads * (gemm_ms(targets, vocab, hidden) + gemm_ms(targets, hidden, hidden, "weight"))
    attentions = _attentions(model, batch, length).items()
    moved = 4 * num_heads * targets * vocab
    for block in model.config.blocks:
        heads = block.attention.num_heads + block.attention.num_kv_heads
        moved += tokens * (16 * hidden + 4 * heads * block.attention.head_dim + 6 * getattr(block.mlp, "size", 0))
    rate = measure.copy_rate() / 1e3
    parts = {
        "gemms": gemms,
        "attention": sum(count * attention_ms(case, "forward_ms") for case, count in attentions),
        "memory_bound": moved / rate,
        "optimizer": ADAMW_BYTES * num_heads * (vocab + hidden + 1) * hidden / rate,
    }
    measure.free()
    return {"floor_ms": sum(parts.values())} | {f"floor_{name}_ms": part for name, part in parts.items()}


def _projections(model: lm.CausalLM, tokens: int, targets: int) -> Counter[tuple[int, int, int]]:
    """Rows, size and width of the layers' projections. `targets` are the rows past attention in the last block."""
    last = cast(Block, model.blocks[-1])
    late = {last.attention.o, *last.mlp.modules()}
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return Counter((targets if m in late else tokens, m.out_features, m.in_features) for m in linears)


def _attentions(model: lm.CausalLM, batch: int, length: int) -> Counter[attention.Case]:
    return Counter(
        attention.Case(batch, length, a.num_heads, a.num_kv_heads, a.head_dim, a.window, a.softcap)
        for a in (block.attention for block in model.config.blocks)
    )
