"""Attention of blocks: each block attends to the context before its anchor, and to itself in both directions."""

from __future__ import annotations

import torch
from torch import Tensor

from ligermodels.layers.packing import document_of


def block_context_attention(
    q: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    anchors: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """Softmax attention over the context before a block's anchor, in its document, and over the block itself.

    Args:
        q: (1, N, B, Hq, D), the queries of N blocks of B slots.
        k_block: (1, N, B, Hkv, D), the keys of the blocks.
        v_block: (1, N, B, Hkv, D), the values of the blocks.
        k_context: (1, T, Hkv, D), the keys of a packed row of T tokens.
        v_context: (1, T, Hkv, D), the values of the row.
        anchors: long (1, N), index in the row of each block's first slot. The block sees context keys before it.
        cu_seqlens: int32 (n + 1,), bounds of documents in the row; None for one document.
        softmax_scale: factor of q·k; D ** -0.5 when None.

    Returns:
        (1, N, B, Hq, D), of the dtype of `q`.
    """
    length, heads = k_context.shape[1], k_context.shape[2]
    index = torch.arange(length, device=q.device)
    visible = index < anchors[0, :, None]
    if cu_seqlens is not None:
        document = document_of(cu_seqlens, length)
        visible = visible & (document == document[anchors[0], None])
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q[0].to(wide).unflatten(2, (heads, -1)) * (
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    )
    context = torch.einsum("nbhgd,thd->nbhgt", grouped, k_context[0].to(wide))
    context = context.masked_fill(~visible[:, None, None, None], float("-inf"))
    own = torch.einsum("nbhgd,nshd->nbhgs", grouped, k_block[0].to(wide))
    weights = torch.cat([context, own], dim=-1).softmax(-1)
    out = torch.einsum("nbhgt,thd->nbhgd", weights[..., :length], v_context[0].to(wide))
    out = out + torch.einsum("nbhgs,nshd->nbhgd", weights[..., length:], v_block[0].to(wide))
    return out.flatten(2, 3).to(q.dtype)[None]
