"""The attention backend "sdpa": torch's scaled_dot_product_attention.

It supports every device and dtype, windows, masks, packed sequences, sinks and values of another width; no softcap.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ligermodels.ops.attention.backend import (
    FLASH_HEAD_DIM,
    AttentionRequest,
    Backend,
    needs_mask,
    refuses_scale,
    repeat_heads,
    visible,
)
from ligermodels.ops.runtime.library import is_fake

_LONG = 512
"""From this many queries on, cuDNN's kernels, nearly twice as fast on Hopper as torch's flash kernels, pay for their
set-up."""

_CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _run(
    q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest, mask: Tensor | None, cu_seqlens: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    if mask is None and sinks is None and not needs_mask(request):
        return _sdpa(q, k, v, request, None)
    on_cpu = request.device == "cpu" and not (request.compiling or is_fake(q))
    if cu_seqlens is not None and on_cpu:
        return _each_sequence(q, k, v, request, cu_seqlens.tolist(), sinks)
    if mask is not None:
        mask = mask[:, None]
    elif needs_mask(request):
        if on_cpu and sinks is None:
            return _last_query_first(q, k, v, request)
        mask = visible(request, q.device, cu_seqlens)
    return _sdpa(q, k, v, request, mask) if sinks is None else _with_sinks(q, k, v, request, mask, sinks)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest, mask: Tensor | None) -> Tensor:
    """Calls torch's function. Without a mask, attention is causal."""
    if q.is_cuda and q.shape[2] != k.shape[2] and _needs_equal_heads(q, mask):
        k, v = repeat_heads(q, k, v)
    # Branches, because torch's function takes no symbolic bool from torch.compile.
    options: dict[str, Any] = {"enable_gqa": True} if q.shape[2] != k.shape[2] else {}
    if mask is None and request.query_length > 1:
        options["is_causal"] = True
    options |= {"attn_mask": mask, "scale": request.softmax_scale}
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if q.is_cuda and request.query_length >= _LONG and not request.compiling:
        with sdpa_kernel(_CUDNN_FIRST, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def _needs_equal_heads(q: Tensor, mask: Tensor | None) -> bool:
    """Whether a GPU's memory-efficient kernel may serve the call. It needs as many key and value heads as query heads;
    unless heads are repeated for it, torch falls back to its composite kernel, which keeps all scores in fp32.

    It serves masks (flash kernels refuse them, cuDNN takes them on some GPUs), 32-bit dtypes and wide heads."""
    return mask is not None or q.dtype.itemsize > 2 or q.shape[3] > FLASH_HEAD_DIM


def _each_sequence(
    q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest, bounds: list[int], sinks: Tensor | None
) -> Tensor:
    """Attends within each packed sequence by itself, on the CPU: bounds are read without a sync there, and separate
    sequences cost less than a T x T mask."""
    outputs, first_query = [q.new_empty(1, 0, q.shape[2], v.shape[3])], request.key_length - request.query_length
    for start, end in itertools.pairwise(bounds):
        first = max(start, first_query)
        if first < end:
            window = request.window if request.window is not None and request.window < end - start else None
            part = request._replace(query_length=end - first, key_length=end - start, window=window, packed=False)
            queries = q[:, first - first_query : end - first_query]
            outputs.append(_run(queries, k[:, start:end], v[:, start:end], part, None, None, sinks))
    return torch.cat(outputs, dim=1)


def _last_query_first(q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest) -> Tensor:
    """Fewer queries than keys, or a window, on the CPU, with a mask of T + S numbers.

    With queries in reverse order, whether query i sees key j depends on i + j alone. So the mask of all pairs (T, S) is
    a strided view of one line. Kernels on the CPU read such a view; kernels on GPUs would copy it."""
    queries, keys = request.query_length, request.key_length
    position = torch.arange(queries + keys - 1, device=q.device)
    is_seen = position < keys
    if request.window is not None:
        is_seen = is_seen & (position >= keys - request.window)
    line = torch.zeros(len(position), dtype=q.dtype, device=q.device).masked_fill(~is_seen, float("-inf"))
    return _sdpa(q.flip(1), k, v, request, line.as_strided((queries, keys), (1, 1))).flip(1)


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest, mask: Tensor | None, sinks: Tensor
) -> Tensor:
    """Attention with one more key in front, whose score is each query head's sink and whose value is zero.

    Torch's kernels return no softmax denominator that autograd could use, but they take this key like any other. An
    added channel makes the key's score equal to the sink; it is zero in all other keys. One more query in front keeps
    the causal rule square; its result is dropped. Channels are padded to the next multiple of 8, for fused kernels.
    """
    head_dim, value_dim = q.shape[3], v.shape[3]
    q, k, v = (F.pad(x, (0, 8 - head_dim % 8, 0, 0, 1, 0)) for x in (q, k, v))
    q[..., head_dim] = sinks.to(q.dtype)
    k[:, 0, :, head_dim] = 1 / request.softmax_scale
    mask = None if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)
    return _sdpa(q, k, v, request, mask)[:, 1:, :, :value_dim]


_LACKS = {"softcap": "torch's scaled_dot_product_attention has no softcap"}
SDPA = Backend("sdpa", _run, lacks=_LACKS, limit=refuses_scale)
