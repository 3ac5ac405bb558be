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
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.attention.backend import AttentionRequest, visible
from ligermodels.ops.attention.private_keys_kernels import (
    private_keys_forward_kernel,
    private_keys_gradient_kernel,
    tiles,
)
from ligermodels.ops.attention.triton_attention import (
    LOG2_E,
    MAX_BYTES,
    triton_attention_backward,
    triton_attention_forward,
)
from ligermodels.ops.runtime.checks import Signature, check_rising, check_scores, check_tensor
from ligermodels.ops.runtime.dispatch import refuse_batch_invariant, use_kernels
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable
from ligermodels.ops.runtime.tensors import heads_and_strides, without_autocast

OP = "private_key_attention"
_TENSORS = Signature(dtensors="kept", q="B T Hq D+", k="B T Hkv D =q", v="B T Hkv D =q", cu_seqlens="bounds int32 ?")


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
        InputError: shapes, dtypes or devices do not fit together, an option of the scores is no number within its
            bounds, or, on the CPU, `cu_seqlens` do not rise from 0 to T.

    Examples:
        >>> q, k, v = torch.randn(2, 5, 8, 64), torch.randn(2, 5, 2, 64), torch.randn(2, 5, 2, 64)
        >>> private_key_attention(q, k, v, [k], [v]).shape
        torch.Size([2, 5, 8, 64])
    """
    refuse_batch_invariant("private_key_attention")
    _check(q, k, v, private_keys, private_values, cu_seqlens)
    check_scores(OP, softmax_scale, window)
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
    hidden = ~visible(request, q.device, cu_seqlens)[:, None, None]
    with without_autocast(q):
        causal = torch.einsum("bthgd,bshd->bthgs", grouped, k.to(compute))
        private = [torch.einsum("bthgd,bthd->bthg", grouped, each.to(compute))[..., None] for each in private_keys]
        scores = torch.cat([causal, *private], dim=-1) * softmax_scale
        weights = scores.masked_fill(F.pad(hidden, (0, len(private))), float("-inf")).softmax(-1)
        out = torch.einsum("bthgs,bshd->bthgd", weights[..., :length], v.to(compute))
    for j, value in enumerate(private_values):
        out = out + weights[..., length + j, None] * value.to(compute)[:, :, :, None]
    return out.reshape(batch, length, heads, v.shape[3]).to(q.dtype)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float, window: int | None,
                count: int, *private: Tensor) -> Tensor:  # fmt: skip
        out, lse = triton_attention_forward(q, k, v, None, cu_seqlens, scale, window, None)
        if count:
            out, lse = _merge_private_keys(q, *_stacked(private, count), out, lse, scale)
        ctx.save_for_backward(q, k, v, cu_seqlens, out, lse, *private)
        ctx.options = scale, window, count
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, cu_seqlens, out, lse, *private = ctx.saved_tensors
        scale, window, count = ctx.options
        dq, dk, dv, delta = triton_attention_backward(
            dout, q, k, v, None, out, lse, cu_seqlens, scale, window, None
        )  # fmt: skip
        if not count:
            return dq, dk, dv
        dq, dkeys, dvalues = _private_key_gradients(q, *_stacked(private, count), dout, lse, delta, dq, scale)
        return dq, dk, dv, None, None, None, None, *dkeys.unbind(), *dvalues.unbind()


def _stacked(private: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Keys and values, each (J, B, T, Hkv, D), because a launch takes no lists of tensors. Nothing keeps these copies,
    which are less than half of the bytes that the kernels move."""
    return torch.stack(private[:count]), torch.stack(private[count:])  # type: ignore[arg-type]


@custom_op()
def _merge_private_keys(
    q: Tensor, keys: Tensor, values: Tensor, causal: Tensor, causal_lse: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """`causal`, the result over the other keys, and its `causal_lse` (B, Hq, T), for all keys together."""
    out, lse = torch.empty_like(causal), torch.empty_like(causal_lse)
    if is_fake(q) or not out.numel():
        return out, lse
    (B, T, heads, dim), count = q.shape, len(keys)
    programs, constants = tiles(B, T, heads, keys.shape[3], dim)
    private_keys_forward_kernel[(programs,)](
        *heads_and_strides(q), keys, values, causal, causal_lse, out, lse, B, T, count, heads, softmax_scale * LOG2_E,
        **constants,
    )  # fmt: skip
    return out, lse


@custom_op()
def _private_key_gradients(
    q: Tensor, keys: Tensor, values: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, causal_dq: Tensor,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, keys and values; `causal_dq` is the part of q's gradient from the other keys."""
    dq, dkeys, dvalues = torch.empty_like(causal_dq), torch.empty_like(keys), torch.empty_like(values)
    if is_fake(q) or not dq.numel():
        return dq, dkeys, dvalues
    (B, T, heads, dim), count = q.shape, len(keys)
    programs, constants = tiles(B, T, heads, keys.shape[3], dim)
    private_keys_gradient_kernel[(programs,)](
        *heads_and_strides(q), *heads_and_strides(dout), keys, values, lse, delta, causal_dq, dq, dkeys,
        dvalues, B, T, count, heads, softmax_scale * LOG2_E, softmax_scale, **constants,
    )  # fmt: skip
    return dq, dkeys, dvalues


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """(B, T, Hq, ...) -> (B, T, Hkv, group, ...)."""
    return x.unflatten(2, (kv_heads, -1))


def _check(
    q: Tensor, k: Tensor, v: Tensor, private_keys: Sequence[Tensor], private_values: Sequence[Tensor],
    cu_seqlens: Tensor | None,
) -> None:  # fmt: skip
    _TENSORS.check(OP, q, k, v, cu_seqlens)
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
    check_rising(OP, cu_seqlens, q.shape[1])
