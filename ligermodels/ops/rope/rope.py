"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), half-split as Hugging Face stores it,
and with it the split of a packed projection and the norms of queries and keys."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.norm.rms_norm import CastingMode, check_casting_mode, rms_norm_reference, sum_rows
from ligermodels.ops.rope.rope_kernels import PROGRAMS, heads_of, launch, packed_heads
from ligermodels.ops.runtime.dispatch import num_sms, use_kernels
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable, replicated
from ligermodels.ops.runtime.tensors import as_dtype, check_tensor, empty_gradient, empty_like


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates the first R dimensions of each head: halves (x1, x2) -> (x1*cos - x2*sin, x2*cos + x1*sin).

    q: (B, T, Hq, D) and k: (B, T, Hk, D), any floating dtype and strides. cos, sin: (B or 1, T, R/2) with R <= D, any
    floating dtype; they get no gradient. Returns new contiguous q and k in their own dtypes; dimensions from R on are
    copied. float32 inside (float64 for float64).
    Raises InputError if shapes, dtypes or devices do not fit.
    """
    k, cos, sin = replicated("rope", q, k=k, cos=cos, sin=sin)
    check_tensor("rope", "q", q, ("B", "T", "Hq", "D"), q.device)
    check_tensor("rope", "k", k, (*q.shape[:2], "Hk", q.shape[3]), q.device)
    _check_tables("rope", q, q.shape[3], cos, sin)
    if not use_kernels(q, k, cos, sin):
        return rope_reference(q, k, cos, sin)
    return _Rope.apply(q, k, cos, sin)


def rope_qkv(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: CastingMode = "llama",
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the packed projection of grouped-query attention, normalises and rotates q and k, all in one pass.

    qkv: (B, T, num_kv_heads * (group_size + 2) * head_dim), any floating dtype: for each kv head its group_size query
        heads, then its key, then its value.
    cos, sin: as in `rope`, or both None: no rotation.
    q_norm, k_norm: (head_dim,), any floating dtype: the weights of an `rms_norm` of each head of q and of k before its
        rotation, with these eps, offset and casting_mode; None for no norm. Rounding is as by `rms_norm` and `rope`.
    Returns contiguous q (B, T, num_kv_heads * group_size, head_dim) and k, v (B, T, num_kv_heads, head_dim). The
    backward pass writes one gradient of qkv; with norms it recomputes them from qkv, which is saved.
    Raises InputError if shapes, dtypes or devices do not fit.
    """
    shape = num_kv_heads, group_size, head_dim
    cos, sin, q_norm, k_norm = replicated("rope_qkv", qkv, cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm)
    check_packed("rope_qkv", qkv, cos, sin, *shape, q_norm, k_norm, casting_mode)
    if not use_kernels(qkv, cos, sin, q_norm, k_norm):
        return rope_qkv_reference(
            qkv, cos, sin, *shape, q_norm, k_norm, eps=eps, offset=offset, casting_mode=casting_mode
        )
    return _RopeQKV.apply(qkv, cos, sin, q_norm, k_norm, *shape, eps, offset, casting_mode == "llama")


def rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The specification of `rope`, in plain torch."""
    return _rotate_reference(q, cos, sin), _rotate_reference(k, cos, sin)


def rope_qkv_reference(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, num_kv_heads: int, group_size: int, head_dim: int,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, **norm: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The specification of `rope_qkv`, in plain torch; the same arguments."""
    q, k, v = split_heads(qkv, cos, sin, num_kv_heads, group_size, head_dim, q_norm, k_norm, **norm)
    return q.contiguous(), k.contiguous(), v.contiguous()


def split_heads(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, num_kv_heads: int, group_size: int, head_dim: int,
    q_norm: Tensor | None, k_norm: Tensor | None, **norm: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`rope_qkv_reference`, of any strides."""
    heads = qkv.unflatten(-1, (num_kv_heads, group_size + 2, head_dim))
    turned, v = heads[..., :-1, :], heads[..., -1, :]
    if q_norm is not None or k_norm is not None:
        norm = {"eps": 1e-6} | norm
        q, k = turned.split([group_size, 1], dim=-2)
        q = q if q_norm is None else rms_norm_reference(q, q_norm, **norm)
        k = k if k_norm is None else rms_norm_reference(k, k_norm, **norm)
        turned = torch.cat([q, k], dim=-2)
    if cos is not None and sin is not None:
        turned = _rotate_reference(turned, cos, sin)
    return turned[..., :-1, :].flatten(2, 3), turned[..., -1, :], v


def _rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, ..., D), its first 2 * cos.shape[-1] channels rotated."""
    half, dtype = cos.shape[-1], torch.promote_types(x.dtype, torch.float32)
    of_heads = (*cos.shape[:2], *[1] * (x.dim() - 3), half)
    cos, sin = as_dtype(cos.detach(), dtype).view(of_heads), as_dtype(sin.detach(), dtype).view(of_heads)
    sizes = [half, half, x.shape[-1] - 2 * half]
    x1, x2, rest = torch.split_with_sizes(as_dtype(x, dtype), sizes, dim=-1)  # `split` asks more of the host
    turned = [torch.addcmul(x1 * cos, x2, sin, value=-1), torch.addcmul(x2 * cos, x1, sin)]
    return as_dtype(torch.cat([*turned, rest], dim=-1), x.dtype)


def check_packed(
    op: str, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, num_kv_heads: int, group_size: int, head_dim: int,
    q_norm: Tensor | None, k_norm: Tensor | None, casting_mode: str,
) -> None:  # fmt: skip
    """Raises InputError, naming `op`, unless these are what `rope_qkv` takes."""
    width = num_kv_heads * (group_size + 2) * head_dim
    if qkv.dim() != 3 or qkv.shape[-1] != width or not qkv.is_floating_point():
        raise InputError(
            f"{op}: qkv must be floating, of shape (B, T, num_kv_heads * (group_size + 2) * head_dim = {width}); "
            f"got {qkv.dtype} {tuple(qkv.shape)}"
        )
    if cos is not None and sin is not None:
        _check_tables(op, qkv, head_dim, cos, sin)
    elif cos is not sin:
        raise InputError(f"{op}: cos and sin must be given together, or both be None for no rotation")
    check_casting_mode(op, casting_mode)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_tensor(op, name, weight, (head_dim,), qkv.device)


def _check_tables(op: str, x: Tensor, head_dim: int, cos: Tensor, sin: Tensor) -> None:
    B, T = x.shape[:2]
    if cos.dim() != 3 or cos.shape[0] not in (1, B) or 2 * cos.shape[2] > head_dim:
        raise InputError(f"{op}: cos must be of shape ({B} or 1, {T}, at most {head_dim // 2}); got {tuple(cos.shape)}")
    check_tensor(op, "cos", cos, (cos.shape[0], T, cos.shape[2]), x.device)
    check_tensor(op, "sin", sin, cos.shape, x.device)


@custom_op()
def _rope_rotate(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """q and k (B, T, heads, D) rotated, or rotated back if `inverse`; the second result is empty without k."""
    out = empty_like(q), empty_gradient(k, k is not None, q)
    if is_fake(q):
        return out
    of_q = q.shape[2], 1, heads_of(q), heads_of(out[0])
    of_k = None if k is None else (k.shape[2], 1, heads_of(k), heads_of(out[1]))
    launch(q.shape[:2].numel(), q.shape[3], (of_q, of_k, None), cos, sin, inverse)
    return out


@custom_op()
def _rope_split(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None,
    num_kv_heads: int, group_size: int, head_dim: int, eps: float, offset: float, cast_before: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q and k normalised and rotated, v copied, out of the packed projection."""
    heads = num_kv_heads * group_size, num_kv_heads, num_kv_heads
    q, k, v = (qkv.new_empty(*qkv.shape[:2], count, head_dim) for count in heads)
    if is_fake(q):
        return q, k, v
    packed = packed_heads(qkv, group_size, head_dim)
    parts = [
        (num_kv_heads * size, size, source, heads_of(x, size))
        for size, source, x in zip((group_size, 1, 1), packed, (q, k, v), strict=True)
    ]
    launch(
        qkv.shape[:2].numel(), head_dim, parts, cos, sin, False,
        q_norm=q_norm, k_norm=k_norm, eps=eps, offset=offset, cast_before=cast_before,
    )  # fmt: skip
    return q, k, v


@custom_op()
def _rope_merge(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None,
    k_norm: Tensor | None, qkv: Tensor | None, need_qkv: int, need_q_norm: bool, need_k_norm: bool, eps: float,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of the packed projection and of the norms' weights; those not needed are empty. The inverse of
    `_rope_split`, whose qkv is given if there are norms."""
    B, T, num_q_heads, head_dim = dq.shape
    num_kv_heads = dk.shape[2]
    dqkv = dq.new_empty((B, T, (num_q_heads + 2 * num_kv_heads) * head_dim) if need_qkv else (0,))
    dq_norm, dk_norm = empty_gradient(q_norm, need_q_norm, dq), empty_gradient(k_norm, need_k_norm, dq)
    if is_fake(dqkv):
        return dqkv, dq_norm, dk_norm
    group_size = num_q_heads // num_kv_heads
    packed = packed_heads(dqkv, group_size, head_dim) if need_qkv else (None, None, None)
    parts = [
        (num_kv_heads * size, size, heads_of(x, size), destination)
        for size, x, destination in zip((group_size, 1, 1), (dq, dk, dv), packed, strict=True)
    ]
    partial = None
    if need_q_norm or need_k_norm:
        programs = min(B * T, num_sms(dq.device) * PROGRAMS)
        partial = dq.new_empty((2, programs, head_dim), dtype=torch.float32)
    launch(
        B * T, head_dim, parts, cos, sin, True, q_norm=q_norm, k_norm=k_norm, eps=eps, offset=offset, given=qkv,
        need_q_norm=need_q_norm, need_k_norm=need_k_norm, partial=partial,
    )  # fmt: skip
    if partial is not None:
        for total, of_programs in zip((dq_norm, dk_norm), partial, strict=True):
            if total.numel():
                sum_rows(of_programs, total)
    return dqkv, dq_norm, dk_norm


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rope_rotate(q, k, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk):
        need_q, need_k = ctx.needs_input_grad[:2]
        if not need_q:
            return None, _rope_rotate(dk, None, *ctx.saved_tensors, True)[0]
        return _rope_rotate(dq, dk if need_k else None, *ctx.saved_tensors, True)


class _RopeQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, q_norm, k_norm, num_kv_heads, group_size, head_dim, eps, offset, cast_before):
        plain = q_norm is None and k_norm is None
        ctx.save_for_backward(cos, sin, q_norm, k_norm, None if plain else qkv)
        ctx.norm = eps, offset
        shape = num_kv_heads, group_size, head_dim
        return _rope_split(qkv, cos, sin, q_norm, k_norm, *shape, eps, offset, cast_before)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        need_qkv, _, _, need_q_norm, need_k_norm = ctx.needs_input_grad[:5]
        needs = need_qkv, need_q_norm, need_k_norm
        dqkv, dq_norm, dk_norm = _rope_merge(dq, dk, dv, *ctx.saved_tensors, *needs, *ctx.norm)
        return dqkv, None, None, dq_norm, dk_norm
