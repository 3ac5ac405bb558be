"""The short causal convolution before the gated delta rule: each channel by itself, then SiLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.runtime.library import reject_dtensors
from ligermodels.ops.runtime.tensors import check_tensor


def causal_conv(
    x: Tensor,
    weight: Tensor,
    *,
    earlier: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sources: Tensor | None = None,
) -> Tensor:
    """silu(sum over s < W of weight[:, W - 1 - s] * the input s tokens before), of each channel.

    Args:
        x: (B, T, C), any floating dtype.
        weight: (C, W), a floating dtype.
        earlier: (B, W - 1, C) of x's dtype, the inputs before the first token; zeros by default.
        cu_seqlens: int32 (n + 1,), bounds of documents packed into one row (B = 1), the last of which is T: each has
            zeros before its first token. Goes with neither of the others.
        sources: long (T, W), for tokens that do not follow one another: see `conv_sources`.

    Returns (B, T, C) of x's dtype, computed in fp32 (fp64 for x of fp64). Differentiable in x, weight and earlier.
    Raises InputError if shapes, dtypes or devices do not fit.
    """
    name = "causal_conv"
    reject_dtensors(name, x, weight, earlier)
    check_tensor(name, "x", x, ("B", "T", "C"), x.device)
    batch, tokens, channels = x.shape
    check_tensor(name, "weight", weight, (channels, "W"), x.device)
    width = weight.shape[1]
    inputs = F.pad(x, (0, 0, width - 1, 0))
    if earlier is not None:
        check_tensor(name, "earlier", earlier, (batch, width - 1, channels), x.device, x.dtype)
        inputs = torch.cat([earlier, x], dim=1)
    if cu_seqlens is not None and (earlier is not None or sources is not None):
        raise InputError(f"{name}: cu_seqlens: packed documents begin in the row, without earlier inputs or sources")
    if sources is not None:
        check_tensor(name, "sources", sources, (tokens, width), x.device, torch.long)
    first = None
    place = torch.arange(tokens, device=x.device)
    if cu_seqlens is not None:
        check_tensor(name, "cu_seqlens", cu_seqlens, ("n",), x.device, torch.int32)
        if batch != 1:
            raise InputError(f"{name}: documents are packed into one row, but x has {batch}")
        first = cu_seqlens[torch.bucketize(place, cu_seqlens[1:], right=True)]
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=x.device)
    for back in range(width):
        start = width - 1 - back
        seen = inputs[:, start : start + tokens] if sources is None else inputs[:, sources[:, back]]
        if first is not None:
            seen = seen.masked_fill((place - back < first)[:, None], 0)
        total = total + seen.to(wide) * weight[:, start].to(wide)
    return F.silu(total).to(x.dtype)


def conv_sources(parent: Tensor, depth: Tensor, width: int) -> Tensor:
    """Which inputs each node of a tree sees: long (N, width), column s the place of that s tokens before.

    parent, depth: long (N,), each node's parent (the root's is itself) and its distance from the root. Places count
    from the first of the width - 1 inputs before the root, so that node i is at place width - 1 + i.
    """
    node = torch.arange(len(parent), device=parent.device)
    found = []
    for back in range(width):
        found.append(torch.where(depth >= back, node, depth - back) + width - 1)
        node = parent[node]
    return torch.stack(found, dim=1)
