"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), half-split as Hugging Face stores it.

One kernel serves both ops, forward and backward: it rotates the heads of strided sources into strided destinations. All
sources and destinations are views (rows, groups, heads, head_dim) with rows = B*T; the packed projection is three views
of one tensor, so that its gradient is written in place by the same launch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ligermodels.errors import InputError
from ligermodels.ops.dispatch import power_of_2_above, tl, triton, use_kernels
from ligermodels.ops.library import opaque_op


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates the first R dimensions of each head: halves (x1, x2) -> (x1*cos - x2*sin, x2*cos + x1*sin).

    q: (B, T, Hq, D) and k: (B, T, Hk, D), any floating dtype and strides. cos, sin: (B or 1, T, R/2) with R <= D, any
    floating dtype; they get no gradient. Returns new contiguous q and k in their own dtypes; dimensions from R on are
    copied. float32 inside (float64 for float64).
    Raises InputError if shapes, dtypes or devices do not fit.
    """
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 4 or not x.is_floating_point():
            raise InputError(
                f"rope: {name} must be floating, of shape (B, T, heads, D); got {x.dtype} {tuple(x.shape)}"
            )
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise InputError(f"rope: q {tuple(q.shape)} and k {tuple(k.shape)} differ in more than their heads")
    _check_tables("rope", q, q.shape[3], cos, sin)
    if not use_kernels(q, k, cos, sin):
        return rope_reference(q, k, cos, sin)
    return _Rope.apply(q, k, cos, sin)


def rope_qkv(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_kv_heads: int, group_size: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits the packed projection of grouped-query attention and rotates q and k, in one pass.

    qkv: (B, T, num_kv_heads * (group_size + 2) * head_dim), any floating dtype: for each kv head its group_size query
    heads, then its key, then its value. cos, sin: as in `rope`. Returns contiguous q (B, T, num_kv_heads * group_size,
    head_dim) and k, v (B, T, num_kv_heads, head_dim). The backward pass writes one gradient of qkv.
    Raises InputError if shapes, dtypes or devices do not fit.
    """
    width = num_kv_heads * (group_size + 2) * head_dim
    if qkv.dim() != 3 or qkv.shape[-1] != width or not qkv.is_floating_point():
        raise InputError(
            f"rope_qkv: qkv must be floating, of shape (B, T, num_kv_heads * (group_size + 2) * head_dim = {width}); "
            f"got {qkv.dtype} {tuple(qkv.shape)}"
        )
    _check_tables("rope_qkv", qkv, head_dim, cos, sin)
    if not use_kernels(qkv, cos, sin):
        return rope_qkv_reference(qkv, cos, sin, num_kv_heads, group_size, head_dim)
    return _RopeQKV.apply(qkv, cos, sin, num_kv_heads, group_size, head_dim)


def rope_reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of `rope`, in plain torch."""
    return _rotate_reference(q, cos, sin), _rotate_reference(k, cos, sin)


def rope_qkv_reference(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_kv_heads: int, group_size: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The specification of `rope_qkv`, in plain torch."""
    q, k, v = qkv.unflatten(-1, (num_kv_heads, group_size + 2, head_dim)).split([group_size, 1, 1], dim=-2)
    q, k = rope_reference(q.flatten(2, 3), k.flatten(2, 3), cos, sin)
    return q, k, v.flatten(2, 3).contiguous()


def _rotate_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.detach().to(dtype).unsqueeze(2), sin.detach().to(dtype).unsqueeze(2)
    x1, x2, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    x1, x2 = x1.to(dtype), x2.to(dtype)
    return torch.cat([(x1 * cos - x2 * sin).to(x.dtype), (x2 * cos + x1 * sin).to(x.dtype), rest], dim=-1)


def _check_tables(op: str, x: torch.Tensor, head_dim: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.dim() == 3 and table.shape[0] in (1, x.shape[0]) and table.shape[1] == x.shape[1]
        if not fits or table.shape != cos.shape or 2 * table.shape[2] > head_dim or not table.is_floating_point():
            raise InputError(
                f"{op}: {name} must be floating, of shape ({x.shape[0]} or 1, {x.shape[1]}, at most {head_dim // 2}); "
                f"got {table.dtype} {tuple(table.shape)}"
            )
        if table.device != x.device:
            raise InputError(f"{op}: {name} is on {table.device}, the heads on {x.device}")


@triton.jit
def _rotate_heads(
    source, destination, s_group, s_head, d_group, d_head, cos, sin,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Rotates all heads of one token; head h is the (h % GROUP)-th of group h // GROUP."""
    head = tl.arange(0, BLOCK_HEADS).to(tl.int64)
    src = source + ((head // GROUP) * s_group + (head % GROUP) * s_head)[:, None]
    dst = destination + ((head // GROUP) * d_group + (head % GROUP) * d_head)[:, None]
    if HALF > 0:
        col = tl.arange(0, BLOCK_HALF)[None, :]
        mask = (head < HEADS)[:, None] & (col < HALF)
        x1 = tl.load(src + col, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(src + HALF + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(dst + col, (x1 * cos - x2 * sin).to(destination.dtype.element_ty), mask=mask)
        tl.store(dst + HALF + col, (x2 * cos + x1 * sin).to(destination.dtype.element_ty), mask=mask)
    if DIM > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        mask = (head < HEADS)[:, None] & (rest < DIM)
        tl.store(dst + rest, tl.load(src + rest, mask=mask), mask=mask)


@triton.jit
def _rope_kernel(
    q, q_row, q_group, q_head, q_out, q_out_row, q_out_group, q_out_head,
    k, k_row, k_group, k_head, k_out, k_out_row, k_out_group, k_out_head,
    v, v_row, v_group, v_head, v_out, v_out_row, v_out_group, v_out_head,
    cos, cos_batch, cos_token, sin, sin_batch, sin_token, T,
    Q_HEADS: tl.constexpr, Q_GROUP: tl.constexpr, BLOCK_Q: tl.constexpr,
    K_HEADS: tl.constexpr, K_GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
    V_HEADS: tl.constexpr, V_GROUP: tl.constexpr, BLOCK_V: tl.constexpr,
    INVERSE: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Each program takes one token: it loads the angles once and rotates the heads of q and of k, and copies v's.
    A part with no heads is left out."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_HALF)
    c = tl.load(cos + (row // T) * cos_batch + (row % T) * cos_token + col, mask=col < HALF, other=0.0)
    s = tl.load(sin + (row // T) * sin_batch + (row % T) * sin_token + col, mask=col < HALF, other=0.0)
    c = c.to(tl.float32)[None, :]
    s = s.to(tl.float32)[None, :]
    if INVERSE:
        s = -s
    if Q_HEADS > 0:
        _rotate_heads(
            q + row * q_row, q_out + row * q_out_row, q_group, q_head, q_out_group, q_out_head, c, s,
            Q_HEADS, Q_GROUP, HALF, DIM, BLOCK_Q, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    if K_HEADS > 0:
        _rotate_heads(
            k + row * k_row, k_out + row * k_out_row, k_group, k_head, k_out_group, k_out_head, c, s,
            K_HEADS, K_GROUP, HALF, DIM, BLOCK_K, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    if V_HEADS > 0:
        _rotate_heads(
            v + row * v_row, v_out + row * v_out_row, v_group, v_head, v_out_group, v_out_head, c, s,
            V_HEADS, V_GROUP, 0, DIM, BLOCK_V, BLOCK_HALF, BLOCK_DIM,
        )  # fmt: skip


Part = tuple[torch.Tensor, torch.Tensor] | None  # source and destination, (rows, groups, heads, head_dim)


def _launch(q: Part, k: Part, v: Part, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> None:
    """Rotates q and k, copies v, each from its source to its destination. At least one part is there."""
    strides: list[Any] = []
    heads: dict[str, int] = {}
    rows = dim = most = 0
    for name, part in (("Q", q), ("K", k), ("V", v)):
        if part is None:
            strides += [None, 0, 0, 0, None, 0, 0, 0]
            heads |= {f"{name}_HEADS": 0, f"{name}_GROUP": 1, f"BLOCK_{name}": 1}
            continue
        rows, groups, group, dim = part[0].shape
        most = max(most, groups * group)
        for x in part:
            strides += [x, *x.stride()[:3]]
        heads |= {f"{name}_HEADS": groups * group, f"{name}_GROUP": group}
        heads[f"BLOCK_{name}"] = power_of_2_above(groups * group)
    half, T = cos.shape[2], cos.shape[1]
    cos, sin = (t if t.stride(2) == 1 else t.contiguous() for t in (cos, sin))
    tables: list[Any] = []
    for table in (cos, sin):
        tables += [table, table.stride(0) if table.shape[0] > 1 else 0, table.stride(1)]
    _rope_kernel[(rows,)](
        *strides, *tables, T, **heads, INVERSE=inverse, HALF=half, DIM=dim,
        BLOCK_HALF=power_of_2_above(half), BLOCK_REST=power_of_2_above(dim - 2 * half), BLOCK_DIM=power_of_2_above(dim),
        num_warps=4 if power_of_2_above(most) * dim <= 4096 else 8,
    )  # fmt: skip


def _heads(x: torch.Tensor) -> torch.Tensor:
    """(B, T, heads, D) as (B*T, heads, 1, D) whose last dimension is contiguous: a view where the strides allow it."""
    x = x.flatten(0, 1).unsqueeze(2)
    return x if x.stride(3) == 1 else x.contiguous()


def _packed(qkv: torch.Tensor, group_size: int, head_dim: int) -> Sequence[torch.Tensor]:
    """The views q, k, v (B*T, num_kv_heads, group_size or 1, head_dim) of a packed (B, T, ...) tensor."""
    return qkv.flatten(0, 1).unflatten(1, (-1, group_size + 2, head_dim)).split([group_size, 1, 1], dim=2)


def _rotate_fake(heads: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x in heads]


@opaque_op(_rotate_fake)
def _rope_rotate(heads: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> list[torch.Tensor]:
    """One or two tensors (B, T, heads, D) rotated, by the inverse rotation if so asked."""
    out = _rotate_fake(heads, cos, sin, inverse)
    parts: list[Part] = [(_heads(x), _heads(y)) for x, y in zip(heads, out, strict=True)]
    q, k = (*parts, None)[:2]
    _launch(q, k, None, cos, sin, inverse)
    return out


def _split_fake(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_kv_heads: int, group_size: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    B, T, _ = qkv.shape
    q = qkv.new_empty(B, T, num_kv_heads * group_size, head_dim)
    return q, qkv.new_empty(B, T, num_kv_heads, head_dim), qkv.new_empty(B, T, num_kv_heads, head_dim)


@opaque_op(_split_fake)
def _rope_split(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_kv_heads: int, group_size: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k rotated, v copied, out of the packed projection."""
    out = _split_fake(qkv, cos, sin, num_kv_heads, group_size, head_dim)
    sources = _packed(qkv if qkv.stride(2) == 1 else qkv.contiguous(), group_size, head_dim)
    groups = [x.flatten(0, 1).unflatten(1, (num_kv_heads, -1)) for x in out]
    q, k, v = zip(sources, groups, strict=True)
    _launch(q, k, v, cos, sin, False)
    return out


def _merge_fake(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    B, T, num_q_heads, head_dim = dq.shape
    return dq.new_empty(B, T, (num_q_heads + 2 * dk.shape[2]) * head_dim)


@opaque_op(_merge_fake)
def _rope_merge(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """The gradient of the packed projection: the inverse of `_rope_split`."""
    out = _merge_fake(dq, dk, dv, cos, sin)
    num_kv_heads = dk.shape[2]
    destinations = _packed(out, dq.shape[2] // num_kv_heads, dq.shape[3])
    sources = [_heads(x).squeeze(2).unflatten(1, (num_kv_heads, -1)) for x in (dq, dk, dv)]
    q, k, v = zip(sources, destinations, strict=True)
    _launch(q, k, v, cos, sin, True)
    return out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        q, k = _rope_rotate([q, k], cos, sin, False)
        return q, k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        need_q, need_k = ctx.needs_input_grad[:2]
        needed = [g for g, need in ((dq, need_q), (dk, need_k)) if need]
        gradients = _rope_rotate(needed, cos, sin, True)
        return gradients[0] if need_q else None, gradients[-1] if need_k else None, None, None


class _RopeQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        num_kv_heads: int,
        group_size: int,
        head_dim: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rope_split(qkv, cos, sin, num_kv_heads, group_size, head_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rope_merge(dq, dk, dv, cos, sin), None, None, None, None, None
