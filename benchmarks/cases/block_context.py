"""The case of `block_context_attention`: the attention of DFlash and DSpark in training."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention

from benchmarks.timing import measure
from benchmarks.timing.case import Case, of_tokens, providers, random
from ligermodels import ops


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention.flex_attention, dynamic=False)


@of_tokens
def block_context_attention(tokens: int, blocks: int, length: int, heads: int, kv_heads: int, dim: int) -> Case:
    """Attention of blocks to the tokens before their anchors, and to themselves.

    `torch` is SDPA under a mask of all slots and keys. `flex` is torch's flex_attention, compiled, under a block mask.
    Both masks are made once, before the calls that are timed. The lower bound is one GEMM with the operations of the
    attention's matrix products for visible keys: 2 products forward, 7 in both passes.

    Args:
        tokens: Number of tokens of the context.
        blocks: Number of blocks, at different tokens in ascending order.
        length: Slots per block.
        heads: Number of query heads.
        kv_heads: Number of heads of keys and values.
        dim: Channels per head.
    """
    anchors = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))[:blocks].sort()[0]
    slots = blocks * length
    width = int(anchors.sum()) // blocks + length  # keys that a slot sees, in the mean
    width = -(-width // 128) * 128  # GEMMs of other widths are slower
    anchors = anchors.to(measure.DEVICE)

    def sees(batch: Tensor, head: Tensor, slot: Tensor, key: Tensor) -> Tensor:
        """Whether a slot sees a key. Keys of the context come first, then keys of the blocks."""
        return (key < anchors[slot // length]) | ((key >= tokens) & ((key - tokens) // length == slot // length))

    @cache
    def mask() -> Tensor:
        index = partial(torch.arange, device=measure.DEVICE)
        return sees(index(1), index(1), index(slots)[:, None], index(tokens + slots))

    @cache
    def block_mask() -> Any:
        return flex_attention.create_block_mask(sees, None, None, slots, tokens + slots, device=measure.DEVICE)

    def joined(q: Tensor, k_block: Tensor, v_block: Tensor, k_context: Tensor, v_context: Tensor) -> list[Tensor]:
        """Queries, keys and values of a row, (B, heads, length, D)."""
        keys, values = (
            torch.cat([x, y.flatten(1, 2)], 1) for x, y in ((k_context, k_block), (v_context, v_block))
        )  # fmt: skip
        return [x.transpose(1, 2) for x in (q.flatten(1, 2), keys, values)]

    def sdpa(*inputs: Tensor) -> Tensor:
        q, k, v = joined(*inputs[:5])
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))  # with a mask, only heads of equal number
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask())  # have a kernel that keeps no scores
        return out.transpose(1, 2).reshape(inputs[0].shape)

    def flex(*inputs: Tensor) -> Tensor:
        out = _compiled_flex()(*joined(*inputs[:5]), block_mask=block_mask(), enable_gqa=True)
        return out.transpose(1, 2).reshape(inputs[0].shape)

    def inputs() -> tuple[Tensor, ...]:
        own, context = (1, blocks, length, kv_heads, dim), (1, tokens, kv_heads, dim)
        return (*(random(*shape) for shape in ((*own[:3], heads, dim), own, own, context, context)), anchors[None])

    @cache
    def weight(count: int) -> Tensor:
        return random(heads * dim, count * width)

    def products(count: int, q: Tensor, *_: Tensor) -> Tensor:
        return q.reshape(slots, -1) @ weight(count)

    return Case(
        f"block_context_attention {blocks}x{length} on {tokens}, {heads}+{kv_heads} heads of {dim}",
        inputs,
        None,
        providers(ops.block_context_attention, sdpa, compiled=False, flex=flex),
        (partial(products, 2), partial(products, 7)),
    )
