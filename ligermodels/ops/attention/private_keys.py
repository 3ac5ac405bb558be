"""Causal attention in which each query also attends to further keys at its own position, which no other query sees.

EAGLE-3 trains its heads in steps over a whole sequence (training-time test, https://arxiv.org/abs/2503.01840): in step
k, the query at t attends to the keys of step 0 up to t, and to the keys at t of the steps 1 to k. The first part is
causal attention, with result o and logarithm of the softmax denominator l. Each private key adds one score s_j, and

    L = log(exp(l) + sum_j exp(s_j))        out = exp(l - L) o + sum_j exp(s_j - L) v_j

so that no mask of T x T is needed, and memory grows with T. The backward pass of the causal part is flash attention's,
called with `out` and L: its probabilities exp(s - L) and row sums out * dout are then those of the whole softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.attention.backend import AttentionRequest, visible
from ligermodels.ops.attention.triton_attention import (
    LOG2_E,
    MAX_BYTES,
    triton_attention_backward,
    triton_attention_forward,
)
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import once_differentiable
from ligermodels.ops.runtime.signature import Signature
from ligermodels.ops.runtime.tensors import check_tensor

OP = "private_key_attention"
_TENSORS = Signature(dtensors="kept", q="B T Hq D", k="B T Hkv D =q", v="B T Hkv D =q")


def private_key_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    private_keys: Sequence[Tensor],
    private_values: Sequence[Tensor],
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Causal attention with J private keys for each query; gradients for all operands.

    Args:
        q: (B, T, Hq, D), floating.
        k: (B, T, Hkv, D), of q's dtype, Hkv dividing Hq.
        v: (B, T, Hkv, D), of q's dtype.
        private_keys: J tensors of the shape and dtype of `k`. Query t also attends to each of them at t.
        private_values: J tensors of the shape and dtype of `v`.
        softmax_scale: factor on q·k; D ** -0.5 when None.
        window: number of keys of `k` that a query sees, its own included; None for all.
        cu_seqlens: int32 (n + 1,), bounds of n sequences that are packed into one row (B = 1).

    Returns:
        (B, T, Hq, D), in q's dtype.

    Raises:
        InputError: shapes, dtypes or devices do not fit together.

    Examples:
        >>> q, k, v = torch.randn(2, 5, 8, 64), torch.randn(2, 5, 2, 64), torch.randn(2, 5, 2, 64)
        >>> private_key_attention(q, k, v, [k], [v]).shape
        torch.Size([2, 5, 8, 64])
    """
    _check(q, k, v, private_keys, private_values, cu_seqlens)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    if use_kernels(q, k, v) and q.shape[3] * q.element_size() <= MAX_BYTES:
        out: Tensor = _Merged.apply(
            q, k, v, cu_seqlens, scale, window, len(private_keys), *private_keys, *private_values
        )
        return out
    return private_key_attention_reference(
        q, k, v, private_keys, private_values, softmax_scale=scale, window=window, cu_seqlens=cu_seqlens
    )


def private_key_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, private_keys: Sequence[Tensor], private_values: Sequence[Tensor], *,
    softmax_scale: float, window: int | None = None, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The specification of `private_key_attention`: one softmax over all scores, in fp32 (fp64 for fp64).

    Args:
        q: (B, T, Hq, D).
        k: (B, T, Hkv, D).
        v: (B, T, Hkv, D).
        private_keys: J tensors of the shape of k.
        private_values: J tensors of the shape of v.
        softmax_scale: factor on q·k.
        window: number of keys of k that a query sees; None for all.
        cu_seqlens: int32 (n + 1,) or None.
    """
    batch, length, heads, dim = q.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    grouped = _grouped(q.to(compute), k.shape[2])
    request = AttentionRequest(
        q.device.type, q.dtype, dim, length, length, softmax_scale, window, None, masked=False,
        packed=cu_seqlens is not None,
    )  # fmt: skip
    causal = torch.einsum("bthgd,bshd->bthgs", grouped, k.to(compute))
    causal = causal.masked_fill(~visible(request, q.device, cu_seqlens)[:, None, None], float("-inf"))
    private = [torch.einsum("bthgd,bthd->bthg", grouped, each.to(compute))[..., None] for each in private_keys]
    weights = (torch.cat([causal, *private], dim=-1) * softmax_scale).softmax(-1)
    out = torch.einsum("bthgs,bshd->bthgd", weights[..., :length], v.to(compute))
    for j, value in enumerate(private_values):
        out = out + weights[..., length + j, None] * value.to(compute)[:, :, :, None]
    return out.reshape(batch, length, heads, v.shape[3]).to(q.dtype)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float, window: int | None,
                count: int, *private: Tensor) -> Tensor:  # fmt: skip
        keys, values = private[:count], private[count:]
        causal, lse = triton_attention_forward(q, k, v, None, cu_seqlens, scale, window, None)
        lse = _by_token(lse / LOG2_E, k.shape[2])  # the kernels' logarithms are to base 2
        scores = [_score(q, key, scale) for key in keys]
        total = torch.logsumexp(torch.stack([lse, *scores]), dim=0)
        merged = _grouped(causal, k.shape[2]) * (lse - total).exp()[..., None]  # float32
        for score, value in zip(scores, values, strict=True):
            merged += (score - total).exp()[..., None] * value[:, :, :, None]
        out = merged.flatten(2, 3).to(q.dtype)
        ctx.save_for_backward(q, k, v, cu_seqlens, out, total, *private)
        ctx.options = scale, window, count
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, cu_seqlens, out, total, *private = ctx.saved_tensors
        scale, window, count = ctx.options
        kv_heads, keys, values = k.shape[2], private[:count], private[count:]
        lse = (total.flatten(2, 3).transpose(1, 2) * LOG2_E).contiguous()
        dq, dk, dv, delta = triton_attention_backward(
            dout, q, k, v, None, out, lse, cu_seqlens, scale, window, None
        )  # fmt: skip
        delta, grouped_dout, grouped_q = _by_token(delta, kv_heads), _grouped(dout, kv_heads), _grouped(q, kv_heads)
        wide_dq = _grouped(dq, kv_heads).float()
        key_gradients, value_gradients = [], []
        for key, value in zip(keys, values, strict=True):
            weight = (_score(q, key, scale) - total).exp()
            slope = weight * (_score(dout, value, 1.0) - delta) * scale
            wide_dq += slope[..., None] * key[:, :, :, None]
            key_gradients.append((slope[..., None] * grouped_q).sum(3).to(key.dtype))
            value_gradients.append((weight[..., None] * grouped_dout).sum(3).to(value.dtype))
        dq = wide_dq.flatten(2, 3).to(q.dtype)
        return dq, dk, dv, None, None, None, None, *key_gradients, *value_gradients


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """(B, T, Hq, ...) -> (B, T, Hkv, group, ...)."""
    return x.unflatten(2, (kv_heads, -1))


def _by_token(x: Tensor, kv_heads: int) -> Tensor:
    """(B, Hq, T) -> (B, T, Hkv, group)."""
    return _grouped(x.transpose(1, 2), kv_heads)


def _score(q: Tensor, key: Tensor, scale: float) -> Tensor:
    """float32 (B, T, Hkv, group), the score of each query with a private key (B, T, Hkv, D)."""
    return (_grouped(q, key.shape[2]).float() * key[:, :, :, None]).sum(-1) * scale


def _check(
    q: Tensor, k: Tensor, v: Tensor, private_keys: Sequence[Tensor], private_values: Sequence[Tensor],
    cu_seqlens: Tensor | None,
) -> None:  # fmt: skip
    _TENSORS.check(OP, q, k, v)
    batch, _, heads, _ = q.shape
    if not k.shape[2] or heads % k.shape[2]:
        raise InputError(f"{OP}: q has {heads} heads, k {k.shape[2]}; the heads of k must divide those of q")
    if len(private_keys) != len(private_values):
        raise InputError(f"{OP}: {len(private_keys)} private_keys, but {len(private_values)} private_values")
    for name, tensors in (("private_keys", private_keys), ("private_values", private_values)):
        for i, each in enumerate(tensors):
            check_tensor(OP, f"{name}[{i}]", each, k.shape, q.device, q.dtype)
    if cu_seqlens is not None and batch != 1:
        raise InputError(f"{OP}: cu_seqlens needs one row (B = 1), got B = {batch}")
