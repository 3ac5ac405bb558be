"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), half-split as Hugging Face stores it;
also fused with the split of a packed q/k/v projection and with the norms of queries and keys."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.arguments import check_count
from ligermodels.errors import InputError
from ligermodels.ops.norm.rms_norm import CastingMode, check_casting_mode, rms_norm_reference, sum_rows
from ligermodels.ops.rope.rope_kernels import PROGRAMS, HeadNorms, NormBackward, heads_of, launch, packed_heads
from ligermodels.ops.runtime.checks import Signature, check_eps, check_tensors
from ligermodels.ops.runtime.devices import num_sms
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import Rows, custom_op, is_fake, mark_constants, once_differentiable
from ligermodels.ops.runtime.tensors import as_dtype, empty_gradient, empty_like

_HEADS = Signature(dtensors="replicated", q="B T Hq D", k="B T Hk D", cos="rows T R", sin="rows T R")
_PACKED = Signature(dtensors="replicated", qkv="B T C", cos="rows T R ?", sin="rows T R ?", q_norm="D ?", k_norm="D ?")


class PackedShape(NamedTuple):
    """The heads of a packed projection: for each key/value head its `group_size` query heads, then its key, then its
    value, each of `head_dim` channels."""

    num_kv_heads: int
    group_size: int
    head_dim: int

    @property
    def width(self) -> int:
        """Channels of the projection."""
        return self.num_kv_heads * (self.group_size + 2) * self.head_dim


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates the first R channels of each head: halves (x1, x2) -> (x1*cos - x2*sin, x2*cos + x1*sin).

    It computes in float32 (float64 for float64). Channels from R on are copied.

    Args:
        q: (B, T, Hq, D), any floating dtype and strides.
        k: (B, T, Hk, D), any floating dtype and strides.
        cos: (B or 1, T, R/2) with R <= D, any floating dtype; gets no gradient.
        sin: like cos.

    Returns:
        New contiguous q and k, in their own dtypes.

    Raises:
        InputError: shapes, dtypes or devices do not fit.
    """
    q, k, cos, sin = _HEADS.check("rope", q, k, cos, sin)
    _check_tables("rope", q.shape[0], q.shape[3], cos)
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

    The results are rounded like the results of `rms_norm` and `rope`. The backward pass writes one gradient of qkv;
    with norms it recomputes them from qkv, which is saved.

    Args:
        qkv: (B, T, num_kv_heads * (group_size + 2) * head_dim), any floating dtype: for each key/value head its
            group_size query heads, then its key, then its value.
        cos: (B or 1, T, R/2) with R <= head_dim, any floating dtype; None, like sin, for no rotation.
        sin: like cos.
        num_kv_heads: number of key/value heads.
        group_size: query heads per key/value head.
        head_dim: channels per head.
        q_norm: (head_dim,), any floating dtype: weight of an `rms_norm` of each query head before its rotation; None
            for no norm.
        k_norm: the same for each key head.
        eps: added to the mean square, in both norms.
        offset: added to the weights of both norms.
        casting_mode: where both norms round, "llama" or "gemma": see `rms_norm`.

    Returns:
        Contiguous q (B, T, num_kv_heads * group_size, head_dim), k and v (B, T, num_kv_heads, head_dim), in qkv's
        dtype.

    Raises:
        InputError: shapes, dtypes or devices do not fit, `casting_mode` is unknown, or `eps` is negative.

    Examples:
        >>> qkv, angles = torch.randn(2, 5, 2 * (4 + 2) * 64), torch.randn(1, 5, 32)
        >>> q, k, v = rope_qkv(qkv, angles.cos(), angles.sin(), num_kv_heads=2, group_size=4, head_dim=64)
        >>> q.shape, k.shape
        (torch.Size([2, 5, 8, 64]), torch.Size([2, 5, 2, 64]))
    """
    shape = PackedShape(num_kv_heads, group_size, head_dim)
    qkv, cos, sin, q_norm, k_norm = check_packed("rope_qkv", qkv, cos, sin, shape, q_norm, k_norm, casting_mode, eps)
    if use_kernels(qkv, cos, sin, q_norm, k_norm):
        return _RopeQKV.apply(qkv, cos, sin, q_norm, k_norm, *shape, eps, offset, casting_mode == "llama")
    return rope_qkv_reference(qkv, cos, sin, *shape, q_norm, k_norm, eps=eps, offset=offset, casting_mode=casting_mode)


def rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The specification of `rope`, in plain torch, with the same arguments q, k, cos and sin."""
    return _rotate_reference(q, cos, sin), _rotate_reference(k, cos, sin)


def rope_qkv_reference(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, num_kv_heads: int, group_size: int, head_dim: int,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, **norm: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The specification of `rope_qkv`, in plain torch, with the same arguments: qkv, cos, sin, num_kv_heads,
    group_size, head_dim, q_norm, k_norm, and the options of the norms."""
    q, k, v = split_heads(qkv, cos, sin, PackedShape(num_kv_heads, group_size, head_dim), q_norm, k_norm, **norm)
    return q.contiguous(), k.contiguous(), v.contiguous()


def split_heads(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, shape: PackedShape, q_norm: Tensor | None,
    k_norm: Tensor | None, **norm: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`rope_qkv_reference` (qkv, cos, sin, shape, q_norm, k_norm and the options of the norms), but its results may
    have any strides."""
    heads = qkv.unflatten(-1, (shape.num_kv_heads, shape.group_size + 2, shape.head_dim))
    q_and_k, v = heads[..., :-1, :], heads[..., -1, :]
    if q_norm is not None or k_norm is not None:
        norm = {"eps": 1e-6} | norm
        q, k = q_and_k.split([shape.group_size, 1], dim=-2)
        q = q if q_norm is None else rms_norm_reference(q, q_norm, **norm)
        k = k if k_norm is None else rms_norm_reference(k, k_norm, **norm)
        q_and_k = torch.cat([q, k], dim=-2)
    if cos is not None and sin is not None:
        q_and_k = _rotate_reference(q_and_k, cos, sin)
    return q_and_k[..., :-1, :].flatten(2, 3), q_and_k[..., -1, :], v


def _rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, ..., D), its first 2 * cos.shape[-1] channels rotated."""
    half, dtype = cos.shape[-1], torch.promote_types(x.dtype, torch.float32)
    shape = (*cos.shape[:2], *[1] * (x.dim() - 3), half)
    cos, sin = (as_dtype(table.detach(), dtype).view(shape) for table in (cos, sin))
    # `split` takes the CPU longer.
    x1, x2, unrotated = torch.split_with_sizes(as_dtype(x, dtype), [half, half, x.shape[-1] - 2 * half], dim=-1)
    rotated = [torch.addcmul(x1 * cos, x2, sin, value=-1), torch.addcmul(x2 * cos, x1, sin), unrotated]
    return as_dtype(torch.cat(rotated, dim=-1), x.dtype)


def check_packed(
    op: str, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, shape: PackedShape, q_norm: Tensor | None,
    k_norm: Tensor | None, casting_mode: str, eps: float,
) -> Any:  # fmt: skip
    """The tensors among the arguments of `rope_qkv` (qkv, cos, sin, shape, q_norm, k_norm, casting_mode and eps),
    checked. Raises InputError, naming `op`."""
    if (cos is None) != (sin is None):
        raise InputError(f"{op}: cos and sin must be given together, or both be None for no rotation")
    check_tensors(op, qkv=qkv)
    if not torch.compiler.is_compiling() and not all(type(size) is int and size > 0 for size in shape):
        for name, size in shape._asdict().items():
            check_count(f"{op}: {name}", size)
    if qkv.shape[-1:] != (shape.width,):
        raise InputError(
            f"{op}: qkv must be of shape (B, T, num_kv_heads * (group_size + 2) * head_dim = {shape.width}); "
            f"got {tuple(qkv.shape)}"
        )
    tensors = _PACKED.check(op, qkv, cos, sin, q_norm, k_norm, D=shape.head_dim)
    _check_tables(op, qkv.shape[0], shape.head_dim, cos)
    check_casting_mode(op, casting_mode)
    check_eps(op, eps)
    return tensors


def _check_tables(op: str, batch: int, head_dim: int, cos: Tensor | None) -> None:
    if cos is not None and (cos.shape[0] not in (1, batch) or 2 * cos.shape[2] > head_dim):
        wanted = f"({batch} or 1, {cos.shape[1]}, at most {head_dim // 2})"
        raise InputError(f"{op}: cos must be of shape {wanted}; got {tuple(cos.shape)}")


@custom_op(rows=Rows(results=lambda k, **_: (True, k is not None)))
def _rope_rotate(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """q and k (B, T, heads, D) rotated, or rotated back if `inverse`; the second result is empty without k."""
    out = empty_like(q), empty_gradient(k, k is not None, q)
    if is_fake(q):
        return out
    q_part = q.shape[2], 1, heads_of(q), heads_of(out[0])
    k_part = None if k is None else (k.shape[2], 1, heads_of(k), heads_of(out[1]))
    launch(q.shape[0] * q.shape[1], q.shape[3], (q_part, k_part, None), cos, sin, inverse)
    return out


@custom_op(rows=Rows())  # arguments count the heads, so heads cannot be sharded
def _rope_split(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None,
    num_kv_heads: int, group_size: int, head_dim: int, eps: float, offset: float, cast_before: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q and k of the packed projection, normalised and rotated; v copied."""
    heads = num_kv_heads * group_size, num_kv_heads, num_kv_heads
    q, k, v = (qkv.new_empty(*qkv.shape[:2], count, head_dim) for count in heads)
    if is_fake(q):
        return q, k, v
    packed = packed_heads(qkv, group_size, head_dim)
    parts = [
        (num_kv_heads * size, size, source, heads_of(x, size))
        for size, source, x in zip((group_size, 1, 1), packed, (q, k, v), strict=True)
    ]
    norms = HeadNorms(q_norm, k_norm, eps, offset, cast_before)
    launch(qkv.shape[0] * qkv.shape[1], head_dim, parts, cos, sin, False, norms)
    return q, k, v


@custom_op(rows=Rows(whole=2))
def _rope_merge(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None,
    k_norm: Tensor | None, qkv: Tensor | None, need_qkv: int, need_q_norm: bool, need_k_norm: bool, eps: float,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The inverse of `_rope_split`: gradients of the packed projection and of the norms' weights, empty if not needed.
    qkv is the input of `_rope_split`, needed only with norms."""
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
    backward = NormBackward(qkv, need_q_norm, need_k_norm, partial)
    launch(B * T, head_dim, parts, cos, sin, True, HeadNorms(q_norm, k_norm, eps, offset), backward)
    if partial is not None:
        for gradient, parts_of_programs in zip((dq_norm, dk_norm), partial, strict=True):
            if gradient.numel():
                sum_rows(parts_of_programs, gradient)
    return dqkv, dq_norm, dk_norm


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        rotated_q, rotated_k = _rope_rotate(q, k, cos, sin, False)
        mark_constants(ctx, (rotated_q, (0,)), (rotated_k, (1,)))
        return rotated_q, rotated_k

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
        q, k, v = _rope_split(qkv, cos, sin, q_norm, k_norm, *shape, eps, offset, cast_before)
        mark_constants(ctx, (q, (0, 3)), (k, (0, 4)), (v, (0,)))
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        need_qkv, _, _, need_q_norm, need_k_norm = ctx.needs_input_grad[:5]
        needs = need_qkv, need_q_norm, need_k_norm
        dqkv, dq_norm, dk_norm = _rope_merge(dq, dk, dv, *ctx.saved_tensors, *needs, *ctx.norm)
        return dqkv, None, None, dq_norm, dk_norm
