"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), half-split as Hugging Face stores it,
and with it the split of a packed projection and the norms of queries and keys.

One kernel serves both ops, forward and backward: it takes the heads of strided sources to strided destinations. All
sources and destinations are views (rows, groups, heads, head_dim) with rows = B*T; the packed projection is three views
of one tensor, so that its gradient is written in place by the same launch.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ligermodels.errors import InputError
from ligermodels.ops.dispatch import power_of_2_above, processors, tl, triton, use_kernels
from ligermodels.ops.library import opaque_op
from ligermodels.ops.rms_norm import check_norm, rms_norm_reference

PROGRAMS = 8  # a multiprocessor, where each sums its part of a weight's gradient


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
    qkv: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: Literal["before", "after"] = "before",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits the packed projection of grouped-query attention, normalises and rotates q and k, all in one pass.

    qkv: (B, T, num_kv_heads * (group_size + 2) * head_dim), any floating dtype: for each kv head its group_size query
        heads, then its key, then its value.
    cos, sin: as in `rope`, or both None: no rotation.
    q_norm, k_norm: (head_dim,), any floating dtype: the weights of an `rms_norm`, with these eps, offset and cast, of
        each head of q and of k before its rotation; None for no norm. Values are rounded as `rms_norm` and `rope` do.
    Returns contiguous q (B, T, num_kv_heads * group_size, head_dim) and k, v (B, T, num_kv_heads, head_dim). The
    backward pass writes one gradient of qkv; with norms it recomputes them from qkv, which is saved.
    Raises InputError if shapes, dtypes or devices do not fit.
    """
    width = num_kv_heads * (group_size + 2) * head_dim
    if qkv.dim() != 3 or qkv.shape[-1] != width or not qkv.is_floating_point():
        raise InputError(
            f"rope_qkv: qkv must be floating, of shape (B, T, num_kv_heads * (group_size + 2) * head_dim = {width}); "
            f"got {qkv.dtype} {tuple(qkv.shape)}"
        )
    if cos is not None and sin is not None:
        _check_tables("rope_qkv", qkv, head_dim, cos, sin)
    elif cos is not sin:
        raise InputError("rope_qkv: cos and sin must be given together, or both be None for no rotation")
    check_norm("rope_qkv", qkv, head_dim, "q_norm", q_norm, cast)
    check_norm("rope_qkv", qkv, head_dim, "k_norm", k_norm, cast)
    shape = num_kv_heads, group_size, head_dim
    if not use_kernels(qkv, cos, sin, q_norm, k_norm):
        return rope_qkv_reference(qkv, cos, sin, *shape, q_norm, k_norm, eps=eps, offset=offset, cast=cast)
    return _RopeQKV.apply(qkv, cos, sin, q_norm, k_norm, *shape, eps, offset, cast == "before")


def rope_reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of `rope`, in plain torch."""
    return _rotate_reference(q, cos, sin), _rotate_reference(k, cos, sin)


def rope_qkv_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    **norm: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The specification of `rope_qkv`, in plain torch; the same arguments."""
    groups = qkv.unflatten(-1, (num_kv_heads, group_size + 2, head_dim)).split([group_size, 1, 1], dim=-2)
    q, k, v = (x.flatten(2, 3) for x in groups)
    norm = {"eps": 1e-6} | norm
    q = q if q_norm is None else rms_norm_reference(q, q_norm, **norm)
    k = k if k_norm is None else rms_norm_reference(k, k_norm, **norm)
    if cos is not None and sin is not None:
        q, k = rope_reference(q, k, cos, sin)
    return q.contiguous(), k.contiguous(), v.contiguous()


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
def _places(
    group, head, HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Offsets of the channels of a token's heads, and which of them exist, for the two tiles of `_load_heads`."""
    PAIRS: tl.constexpr = (DIM + 1) // 2
    h = tl.arange(0, BLOCK_HEADS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    first = col
    second = col + PAIRS
    if HALF > 0 and HALF < PAIRS:
        first = tl.where(col < HALF, col, col + HALF)
        second = tl.where(col < HALF, col + HALF, col + PAIRS)
    start = (h // GROUP) * group + (h % GROUP) * head
    return start + first, start + second, (h < HEADS) & (col < PAIRS), (h < HEADS) & (second < DIM)


@triton.jit
def _load_heads(
    source, group, head, HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All heads of a token in float32, as two tiles (BLOCK_HEADS, BLOCK): the two halves of the channels that are
    rotated into one another, each followed by half of the other channels. What does not exist is 0."""
    first, second, in_first, in_second = _places(group, head, HEADS, GROUP, HALF, DIM, BLOCK_HEADS, BLOCK)
    x1 = tl.load(source + first, mask=in_first, other=0.0).to(tl.float32)
    x2 = tl.load(source + second, mask=in_second, other=0.0).to(tl.float32)
    return x1, x2


@triton.jit
def _store_heads(
    destination, group, head, x1, x2, HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first, second, in_first, in_second = _places(group, head, HEADS, GROUP, HALF, DIM, BLOCK_HEADS, BLOCK)
    tl.store(destination + first, x1.to(destination.dtype.element_ty), mask=in_first)
    tl.store(destination + second, x2.to(destination.dtype.element_ty), mask=in_second)


@triton.jit
def _angles(table, batch, token, row, T, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """cos or sin of one token, (1, BLOCK)."""
    col = tl.arange(0, BLOCK)[None, :]
    angles = tl.zeros((1, BLOCK), dtype=tl.float32)
    if HALF > 0:
        angles = tl.load(table + (row // T) * batch + (row % T) * token + col, mask=col < HALF, other=0.0)
    return angles.to(tl.float32)


@triton.jit
def _turn_heads(
    source, s_row, s_group, s_head, destination, d_row, d_group, d_head, given, g_row, g_group, g_head,
    row, cos, sin, w1, w2, dw1, dw2, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr,
    CAST_BEFORE: tl.constexpr, INVERSE: tl.constexpr, NEED_HEADS: tl.constexpr, NEED_WEIGHT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalises and rotates all heads of a token. INVERSE takes their gradients back: given is then what the norm was
    given, and this token's part of the weight's gradient, still apart by heads, is added to dw1 and dw2."""
    x1, x2 = _load_heads(source + row * s_row, s_group, s_head, HEADS, GROUP, HALF, DIM, BLOCK_HEADS, BLOCK)
    if NORM:
        n1 = x1
        n2 = x2
        if INVERSE:
            n1, n2 = _load_heads(given + row * g_row, g_group, g_head, HEADS, GROUP, HALF, DIM, BLOCK_HEADS, BLOCK)
        r = 1.0 / tl.sqrt(tl.sum(n1 * n1 + n2 * n2, axis=1) / DIM + eps)
        r = tl.where(tl.arange(0, BLOCK_HEADS) < HEADS, r, 0.0)[:, None]
        n1 = n1 * r
        n2 = n2 * r
        if not INVERSE:
            if CAST_BEFORE:
                n1 = n1.to(source.dtype.element_ty).to(tl.float32)
                n2 = n2.to(source.dtype.element_ty).to(tl.float32)
            x1 = (n1 * w1).to(source.dtype.element_ty).to(tl.float32)
            x2 = (n2 * w2).to(source.dtype.element_ty).to(tl.float32)
    if HALF > 0:
        turns = (tl.arange(0, BLOCK) < HALF)[None, :]
        turned = x1 * cos - x2 * sin
        x2 = tl.where(turns, x2 * cos + x1 * sin, x2)
        x1 = tl.where(turns, turned, x1)
    if NORM and INVERSE:
        if NEED_WEIGHT:
            dw1 += x1 * n1
            dw2 += x2 * n2
        x1 = x1 * w1
        x2 = x2 * w2
        mean = tl.sum(x1 * n1 + x2 * n2, axis=1)[:, None] / DIM
        x1 = (x1 - n1 * mean) * r
        x2 = (x2 - n2 * mean) * r
    if NEED_HEADS:
        destination += row * d_row
        _store_heads(destination, d_group, d_head, x1, x2, HEADS, GROUP, HALF, DIM, BLOCK_HEADS, BLOCK)
    return dw1, dw2


@triton.jit
def _rope_kernel(
    q, q_row, q_group, q_head, q_out, q_out_row, q_out_group, q_out_head,
    k, k_row, k_group, k_head, k_out, k_out_row, k_out_group, k_out_head,
    v, v_row, v_group, v_head, v_out, v_out_row, v_out_group, v_out_head,
    cos, cos_batch, cos_token, sin, sin_batch, sin_token, T,
    q_norm, k_norm, eps, offset, q_given, k_given, given_row, given_group, given_head, partial, rows, rows_per_program,
    Q_HEADS: tl.constexpr, Q_GROUP: tl.constexpr, BLOCK_Q: tl.constexpr,
    K_HEADS: tl.constexpr, K_GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
    V_HEADS: tl.constexpr, V_GROUP: tl.constexpr, BLOCK_V: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, CAST_BEFORE: tl.constexpr, INVERSE: tl.constexpr,
    NEED_HEADS: tl.constexpr, NEED_Q_NORM: tl.constexpr, NEED_K_NORM: tl.constexpr,
    HALF: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes rows_per_program consecutive tokens. Of each it loads the angles once, normalises and rotates
    the heads of q and of k, and copies v's; a part with no heads is left out. It sums its own part of the gradients of
    the norms' weights: no atomics, so equal bits in every run."""
    program = tl.program_id(0).to(tl.int64)
    q_w1, q_w2, k_w1, k_w2 = 1.0, 1.0, 1.0, 1.0
    if Q_NORM:
        q_w1, q_w2 = _load_heads(q_norm, 0, 0, 1, 1, HALF, DIM, 1, BLOCK)
        q_w1 += offset
        q_w2 += offset
    if K_NORM:
        k_w1, k_w2 = _load_heads(k_norm, 0, 0, 1, 1, HALF, DIM, 1, BLOCK)
        k_w1 += offset
        k_w2 += offset
    q_dw1 = tl.zeros((BLOCK_Q, BLOCK), dtype=tl.float32)
    q_dw2 = tl.zeros((BLOCK_Q, BLOCK), dtype=tl.float32)
    k_dw1 = tl.zeros((BLOCK_K, BLOCK), dtype=tl.float32)
    k_dw2 = tl.zeros((BLOCK_K, BLOCK), dtype=tl.float32)
    for row in range(program * rows_per_program, tl.minimum((program + 1) * rows_per_program, rows)):
        c = _angles(cos, cos_batch, cos_token, row, T, HALF, BLOCK)
        s = _angles(sin, sin_batch, sin_token, row, T, HALF, BLOCK)
        if INVERSE:
            s = -s
        if Q_HEADS > 0:
            q_dw1, q_dw2 = _turn_heads(
                q, q_row, q_group, q_head, q_out, q_out_row, q_out_group, q_out_head,
                q_given, given_row, given_group, given_head, row, c, s, q_w1, q_w2, q_dw1, q_dw2, eps,
                Q_HEADS, Q_GROUP, HALF, DIM, Q_NORM, CAST_BEFORE, INVERSE, NEED_HEADS, NEED_Q_NORM, BLOCK_Q, BLOCK,
            )  # fmt: skip
        if K_HEADS > 0:
            k_dw1, k_dw2 = _turn_heads(
                k, k_row, k_group, k_head, k_out, k_out_row, k_out_group, k_out_head,
                k_given, given_row, given_group, given_head, row, c, s, k_w1, k_w2, k_dw1, k_dw2, eps,
                K_HEADS, K_GROUP, HALF, DIM, K_NORM, CAST_BEFORE, INVERSE, NEED_HEADS, NEED_K_NORM, BLOCK_K, BLOCK,
            )  # fmt: skip
        if V_HEADS > 0 and NEED_HEADS:
            x1, x2 = _load_heads(v + row * v_row, v_group, v_head, V_HEADS, V_GROUP, 0, DIM, BLOCK_V, BLOCK)
            _store_heads(
                v_out + row * v_out_row, v_out_group, v_out_head, x1, x2, V_HEADS, V_GROUP, 0, DIM, BLOCK_V, BLOCK
            )
    if NEED_Q_NORM:
        sum1, sum2 = tl.sum(q_dw1, axis=0)[None, :], tl.sum(q_dw2, axis=0)[None, :]
        _store_heads(partial + program * DIM, 0, 0, sum1, sum2, 1, 1, HALF, DIM, 1, BLOCK)
    if NEED_K_NORM:
        sum1, sum2 = tl.sum(k_dw1, axis=0)[None, :], tl.sum(k_dw2, axis=0)[None, :]
        _store_heads(partial + (tl.num_programs(0) + program) * DIM, 0, 0, sum1, sum2, 1, 1, HALF, DIM, 1, BLOCK)


Part = tuple[torch.Tensor, torch.Tensor | None] | None  # source and destination, (rows, groups, heads, head_dim)


class Norms(NamedTuple):
    """The weights of the norms of q and of k, either of which may be missing. For the way back: what was normalised,
    packed; whether each weight needs its gradient, and where the programs put their parts of both."""

    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0
    cast_before: bool = True
    given: torch.Tensor | None = None
    need_q: bool = False
    need_k: bool = False
    partial: torch.Tensor | None = None  # float32 (2, programs, head_dim)


NO_NORMS = Norms()


def _launch(
    q: Part,
    k: Part,
    v: Part,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    inverse: bool,
    norms: Norms = NO_NORMS,
) -> None:
    """Normalises and rotates q and k, copies v, each from its source to its destination. At least one part is there;
    either all of them have a destination or none has."""
    strides: list[Any] = []
    heads: dict[str, int] = {}
    rows = dim = most = 0
    has_destination = True
    for name, part in (("Q", q), ("K", k), ("V", v)):
        if part is None:
            strides += [None, 0, 0, 0, None, 0, 0, 0]
            heads |= {f"{name}_HEADS": 0, f"{name}_GROUP": 1, f"BLOCK_{name}": 1}
            continue
        rows, groups, group, dim = part[0].shape
        most = max(most, power_of_2_above(groups * group))
        has_destination = part[1] is not None
        for x in part:
            strides += [None, 0, 0, 0] if x is None else [x, *x.stride()[:3]]
        heads |= {f"{name}_HEADS": groups * group, f"{name}_GROUP": group}
        heads[f"BLOCK_{name}"] = power_of_2_above(groups * group)
    half, T = (0, 1) if cos is None else (cos.shape[2], cos.shape[1])
    tables: list[Any] = []
    for table in (cos, sin):
        if table is None:
            tables += [None, 0, 0]
            continue
        table = table if table.stride(2) == 1 else table.contiguous()
        tables += [table, table.stride(0) if table.shape[0] > 1 else 0, table.stride(1)]
    given: list[Any] = [None, None, 0, 0, 0]
    if norms.given is not None:
        q_given, k_given, _ = _packed(norms.given, heads["Q_GROUP"], dim)
        given = [q_given, k_given, *q_given.stride()[:3]]
    weights = [None if w is None else w.contiguous() for w in (norms.q, norms.k)]
    block = power_of_2_above((dim + 1) // 2)
    programs = rows if norms.partial is None else norms.partial.shape[1]
    pairs = 512 if norms.partial is None else 1024  # a warp; where sums are kept, many loads at once outdo many warps
    _rope_kernel[(programs,)](
        *strides, *tables, T, *weights, norms.eps, norms.offset, *given, norms.partial,
        rows, -(-rows // max(programs, 1)), **heads, Q_NORM=norms.q is not None, K_NORM=norms.k is not None,
        CAST_BEFORE=norms.cast_before, INVERSE=inverse, NEED_HEADS=has_destination,
        NEED_Q_NORM=norms.need_q, NEED_K_NORM=norms.need_k, HALF=half, DIM=dim, BLOCK=block,
        num_warps=min(max(most * block // pairs, 2), 16),
    )  # fmt: skip


def _heads(x: torch.Tensor) -> torch.Tensor:
    """(B, T, heads, D) as (B*T, heads, 1, D) whose last dimension is contiguous: a view where the strides allow it."""
    x = x.flatten(0, 1).unsqueeze(2)
    return x if x.stride(3) == 1 else x.contiguous()


def _packed(qkv: torch.Tensor, group_size: int, head_dim: int) -> Sequence[torch.Tensor]:
    """The parts q, k, v (B*T, num_kv_heads, group_size or 1, head_dim) of a packed (B, T, ...) tensor; their last
    dimension is contiguous: views where the strides allow it."""
    qkv = qkv if qkv.stride(2) == 1 else qkv.contiguous()
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
    qkv: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    eps: float,
    offset: float,
    cast_before: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    B, T, _ = qkv.shape
    q = qkv.new_empty(B, T, num_kv_heads * group_size, head_dim)
    return q, qkv.new_empty(B, T, num_kv_heads, head_dim), qkv.new_empty(B, T, num_kv_heads, head_dim)


@opaque_op(_split_fake)
def _rope_split(
    qkv: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    eps: float,
    offset: float,
    cast_before: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k normalised and rotated, v copied, out of the packed projection."""
    shape = num_kv_heads, group_size, head_dim
    out = _split_fake(qkv, cos, sin, q_norm, k_norm, *shape, eps, offset, cast_before)
    groups = [x.flatten(0, 1).unflatten(1, (num_kv_heads, -1)) for x in out]
    q, k, v = zip(_packed(qkv, group_size, head_dim), groups, strict=True)
    _launch(q, k, v, cos, sin, False, Norms(q_norm, k_norm, eps, offset, cast_before))
    return out


def _merge_fake(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    qkv: torch.Tensor | None,
    eps: float,
    offset: float,
    need_qkv: bool,
    need_q_norm: bool,
    need_k_norm: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    B, T, num_q_heads, head_dim = dq.shape
    dqkv = dq.new_empty((B, T, (num_q_heads + 2 * dk.shape[2]) * head_dim) if need_qkv else (0,))
    dq_norm = dq.new_empty(0) if q_norm is None or not need_q_norm else q_norm.new_empty(q_norm.shape)
    dk_norm = dq.new_empty(0) if k_norm is None or not need_k_norm else k_norm.new_empty(k_norm.shape)
    return dqkv, dq_norm, dk_norm


@opaque_op(_merge_fake)
def _rope_merge(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    qkv: torch.Tensor | None,
    eps: float,
    offset: float,
    need_qkv: bool,
    need_q_norm: bool,
    need_k_norm: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of the packed projection and of the norms' weights; those not needed are empty. The inverse of
    `_rope_split`, whose qkv is given if there are norms."""
    B, T, num_q_heads, head_dim = dq.shape
    num_kv_heads = dk.shape[2]
    dqkv = dq.new_empty((B, T, (num_q_heads + 2 * num_kv_heads) * head_dim) if need_qkv else (0,))
    sources = [_heads(x).squeeze(2).unflatten(1, (num_kv_heads, -1)) for x in (dq, dk, dv)]
    parts = _packed(dqkv, num_q_heads // num_kv_heads, head_dim) if need_qkv else (None, None, None)
    q, k, v = zip(sources, parts, strict=True)
    partial = None
    if need_q_norm or need_k_norm:
        programs = min(B * T, processors(dq.device) * PROGRAMS)
        partial = dq.new_empty((2, programs, head_dim), dtype=torch.float32)
    norms = Norms(q_norm, k_norm, eps, offset, True, qkv, need_q_norm, need_k_norm, partial)
    _launch(q, k, v, cos, sin, True, norms)

    def gradient(index: int, weight: torch.Tensor | None, needed: bool) -> torch.Tensor:
        if partial is None or weight is None or not needed:
            return dq.new_empty(0)
        return partial[index].sum(0).to(weight.dtype)

    return dqkv, gradient(0, q_norm, need_q_norm), gradient(1, k_norm, need_k_norm)


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
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        num_kv_heads: int,
        group_size: int,
        head_dim: int,
        eps: float,
        offset: float,
        cast_before: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        plain = q_norm is None and k_norm is None
        ctx.save_for_backward(cos, sin, q_norm, k_norm, None if plain else qkv)
        ctx.norm = eps, offset
        shape = num_kv_heads, group_size, head_dim
        return _rope_split(qkv, cos, sin, q_norm, k_norm, *shape, eps, offset, cast_before)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        need_qkv, _, _, need_q, need_k = ctx.needs_input_grad[:5]
        dqkv, dq_norm, dk_norm = _rope_merge(dq, dk, dv, *ctx.saved_tensors, *ctx.norm, need_qkv, need_q, need_k)
        gradients = dqkv if need_qkv else None, None, None, dq_norm if need_q else None, dk_norm if need_k else None
        return *gradients, None, None, None, None, None, None
