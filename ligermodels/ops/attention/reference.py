"""The attention backend "reference", the specification of the others, in plain torch.

It supports every option on every device. Its memory grows with T * S.

With `set_batch_invariant` it computes tiles of ROWS positions of one document over whole tiles of keys, padded with
zeros: a position always is in the same place of products of the same shape. The backward pass is the usual one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.ops.attention.backend import AttentionRequest, Backend, visible
from ligermodels.ops.runtime.dispatch import set_batch_invariant
from ligermodels.ops.runtime.library import once_differentiable

ROWS = 16


def _run(
    q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest, mask: Tensor | None, cu_seqlens: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    if set_batch_invariant.value:
        out: Tensor = _BatchInvariant.apply(q, k, v, sinks, request, cu_seqlens)
        return out
    return _attend(q, k, v, request, mask, cu_seqlens, sinks)


def _attend(
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


class _BatchInvariant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, request, cu_seqlens):
        ctx.save_for_backward(q, k, v, sinks, cu_seqlens)
        ctx.request, out, before = request, q.new_empty(*q.shape[:3], v.shape[3]), k.shape[1] - q.shape[1]
        bounds = [0, k.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        for row in range(len(q)):
            for start, end in pairwise(bounds):
                queries = slice(max(start - before, 0), max(end - before, 0))
                if queries.start < queries.stop:
                    keys = slice(start, end)
                    out[row, queries] = attend_document(q[row, queries], k[row, keys], v[row, keys], request, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        *tensors, cu_seqlens = ctx.saved_tensors
        inputs: list[Any] = [
            None if x is None else x.detach().requires_grad_(need)
            for x, need in zip(tensors, ctx.needs_input_grad, strict=False)
        ]
        with torch.enable_grad():
            q, k, v, sinks = inputs
            out = _attend(q, k, v, ctx.request, None, cu_seqlens, sinks)
        needed = [x for x in inputs if x is not None and x.requires_grad]
        gradients = iter(torch.autograd.grad(out, needed, dout))
        return *(None if x is None or not x.requires_grad else next(gradients) for x in inputs), None, None


def attend_document(q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest, sinks: Tensor | None) -> Tensor:
    """Attention within one document, with bits that depend on nothing else.

    Args:
        q: (T, Hq, D), the last T tokens of the document.
        k: (S, Hkv, D).
        v: (S, Hkv, Dv).
        request: scale, window and softcap of the scores.
        sinks: (Hq,) or None.

    Returns:
        (T, Hq, Dv).
    """
    before, padding = len(k) - len(q), -len(k) % ROWS
    start, stop = before % ROWS, before % ROWS + len(q)
    k, v = (F.pad(x, (0, 0, 0, 0, 0, padding))[None] for x in (k, v))
    tiles = []
    for number, queries in enumerate(F.pad(q, (0, 0, 0, 0, start, padding)).split(ROWS), before // ROWS + 1):
        end = number * ROWS
        of_tile = request._replace(query_length=ROWS, key_length=end)
        tiles.append(_attend(queries[None], k[:, :end], v[:, :end], of_tile, None, None, sinks)[0])
    return torch.cat(tiles)[start:stop]


def _limit(request: AttentionRequest) -> str | None:
    return "it takes no arbitrary mask" if set_batch_invariant.value and request.masked else None


REFERENCE = Backend("reference", _run, limit=_limit, batch_invariant=True)
