"""The attention backend "reference", the specification of the others, in plain torch.

It supports every option on every device. Its memory grows with T * S.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligermodels.ops.attention.backend import AttentionRequest, Backend, visible


def _run(
    q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest, mask: Tensor | None, cu_seqlens: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Scores and softmax in fp32 (fp64 for fp64)."""
    batch, length, heads, _ = q.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(compute).unflatten(2, (k.shape[2], heads // k.shape[2]))
    scores = torch.einsum("bthgd,bshd->bhgts", grouped, k.to(compute)) * request.softmax_scale
    if request.softcap is not None:
        scores = request.softcap * torch.tanh(scores / request.softcap)
    allowed = visible(request, q.device, cu_seqlens) if mask is None else mask[:, None, None]
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        sink = sinks.to(compute).view(*scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    out = torch.einsum("bhgts,bshd->bthgd", weights, v.to(compute))
    return out.reshape(batch, length, heads, v.shape[3]).to(q.dtype)


REFERENCE = Backend("reference", _run)
