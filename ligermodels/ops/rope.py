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
from ligermodels.ops.library import empty_like, opaque_op
from ligermodels.ops.rms_norm import check_norm, rms_norm_reference, sum_rows

PAIRS = 512  # of channels a warp takes
PROGRAMS = 2  # a multiprocessor, where each sums its part of a weight's gradient
STAGES = 3  # tokens that such a program has asked for at once, by way of shared memory


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
    shape = num_kv_heads, group_size, head_dim
    check_packed("rope_qkv", qkv, cos, sin, *shape, q_norm, k_norm, cast)
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


def check_packed(
    op: str,
    qkv: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cast: str,
) -> None:
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
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        check_norm(op, qkv, head_dim, name, weight, cast)


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
    """All heads of a token, as two tiles (BLOCK_HEADS, BLOCK): the two halves of the channels that are rotated into one
    another, each followed by half of the other channels. What does not exist is 0."""
    first, second, in_first, in_second = _places(group, head, HEADS, GROUP, HALF, DIM, BLOCK_HEADS, BLOCK)
    return tl.load(source + first, mask=in_first, other=0.0), tl.load(source + second, mask=in_second, other=0.0)


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
def _load_weight(weight, offset, HALF: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """offset + a norm's weight in float32, as two tiles (1, BLOCK)."""
    w1, w2 = _load_heads(weight, 0, 0, 1, 1, HALF, DIM, 1, BLOCK)
    return w1.to(tl.float32) + offset, w2.to(tl.float32) + offset


@triton.jit
def _turn_heads(
    x1, x2, n1, n2, destination, row, d_row, d_group, d_head, cos, sin, w1, w2, dw1, dw2, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr,
    CAST_BEFORE: tl.constexpr, INVERSE: tl.constexpr, NEED_HEADS: tl.constexpr, NEED_WEIGHT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalises and rotates all heads of a token, x1 and x2 as `_load_heads` gives them. INVERSE takes their gradients
    back: n1 and n2 are then what the norm was given, and this token's part of the weight's gradient, still apart by
    heads, is added to dw1 and dw2."""
    dtype: tl.constexpr = x1.dtype
    x1 = x1.to(tl.float32)
    x2 = x2.to(tl.float32)
    if NORM:
        n1 = n1.to(tl.float32)
        n2 = n2.to(tl.float32)
        r = 1.0 / tl.sqrt(tl.sum(n1 * n1 + n2 * n2, axis=1) / DIM + eps)
        r = tl.where(tl.arange(0, BLOCK_HEADS) < HEADS, r, 0.0)[:, None]
        n1 = n1 * r
        n2 = n2 * r
        if not INVERSE:
            if CAST_BEFORE:
                n1 = n1.to(dtype).to(tl.float32)
                n2 = n2.to(dtype).to(tl.float32)
            x1 = (n1 * w1).to(dtype).to(tl.float32)
            x2 = (n2 * w2).to(dtype).to(tl.float32)
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
    HALF: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes rows_per_program consecutive tokens. Of each it loads the angles once, normalises and rotates
    the heads of q and of k, and copies v's; a part with no heads is left out. It sums its own part of the gradients of
    the norms' weights: no atomics, so equal bits in every run. All loads come before the first store, which none of
    them could pass."""
    program = tl.program_id(0).to(tl.int64)
    q_w1, q_w2, k_w1, k_w2 = 1.0, 1.0, 1.0, 1.0
    if Q_NORM:
        q_w1, q_w2 = _load_weight(q_norm, offset, HALF, DIM, BLOCK)
    if K_NORM:
        k_w1, k_w2 = _load_weight(k_norm, offset, HALF, DIM, BLOCK)
    q_dw1 = tl.zeros((BLOCK_Q, BLOCK), dtype=tl.float32)
    q_dw2 = tl.zeros((BLOCK_Q, BLOCK), dtype=tl.float32)
    k_dw1 = tl.zeros((BLOCK_K, BLOCK), dtype=tl.float32)
    k_dw2 = tl.zeros((BLOCK_K, BLOCK), dtype=tl.float32)
    end = tl.minimum((program + 1) * rows_per_program, rows)
    for row in tl.range(program * rows_per_program, end, num_stages=STAGES):
        c = _angles(cos, cos_batch, cos_token, row, T, HALF, BLOCK)
        s = _angles(sin, sin_batch, sin_token, row, T, HALF, BLOCK)
        if INVERSE:
            s = -s
        if V_HEADS > 0 and NEED_HEADS:
            v1, v2 = _load_heads(v + row * v_row, v_group, v_head, V_HEADS, V_GROUP, 0, DIM, BLOCK_V, BLOCK)
        if K_HEADS > 0:
            k1, k2 = _load_heads(k + row * k_row, k_group, k_head, K_HEADS, K_GROUP, HALF, DIM, BLOCK_K, BLOCK)
            kn1, kn2 = k1, k2
            if K_NORM and INVERSE:
                kn1, kn2 = _load_heads(
                    k_given + row * given_row, given_group, given_head, K_HEADS, K_GROUP, HALF, DIM, BLOCK_K, BLOCK
                )
        if Q_HEADS > 0:
            q1, q2 = _load_heads(q + row * q_row, q_group, q_head, Q_HEADS, Q_GROUP, HALF, DIM, BLOCK_Q, BLOCK)
            qn1, qn2 = q1, q2
            if Q_NORM and INVERSE:
                qn1, qn2 = _load_heads(
                    q_given + row * given_row, given_group, given_head, Q_HEADS, Q_GROUP, HALF, DIM, BLOCK_Q, BLOCK
                )
            q_dw1, q_dw2 = _turn_heads(
                q1, q2, qn1, qn2, q_out, row, q_out_row, q_out_group, q_out_head,
                c, s, q_w1, q_w2, q_dw1, q_dw2, eps,
                Q_HEADS, Q_GROUP, HALF, DIM, Q_NORM, CAST_BEFORE, INVERSE, NEED_HEADS, NEED_Q_NORM, BLOCK_Q, BLOCK,
            )  # fmt: skip
        if K_HEADS > 0:
            k_dw1, k_dw2 = _turn_heads(
                k1, k2, kn1, kn2, k_out, row, k_out_row, k_out_group, k_out_head,
                c, s, k_w1, k_w2, k_dw1, k_dw2, eps,
                K_HEADS, K_GROUP, HALF, DIM, K_NORM, CAST_BEFORE, INVERSE, NEED_HEADS, NEED_K_NORM, BLOCK_K, BLOCK,
            )  # fmt: skip
        if V_HEADS > 0 and NEED_HEADS:
            v_place = v_out + row * v_out_row
            _store_heads(v_place, v_out_group, v_out_head, v1, v2, V_HEADS, V_GROUP, 0, DIM, BLOCK_V, BLOCK)
    if NEED_Q_NORM:
        sum1, sum2 = tl.sum(q_dw1, axis=0)[None, :], tl.sum(q_dw2, axis=0)[None, :]
        _store_heads(partial + program * DIM, 0, 0, sum1, sum2, 1, 1, HALF, DIM, 1, BLOCK)
    if NEED_K_NORM:
        sum1, sum2 = tl.sum(k_dw1, axis=0)[None, :], tl.sum(k_dw2, axis=0)[None, :]
        _store_heads(partial + (tl.num_programs(0) + program) * DIM, 0, 0, sum1, sum2, 1, 1, HALF, DIM, 1, BLOCK)


class Heads(NamedTuple):
    """Where the heads of each token lie: head h of token n begins n * row + h // group_size * group +
    h % group_size * head elements from the tensor's start."""

    start: torch.Tensor | None
    row: int
    group: int
    head: int


NOWHERE = Heads(None, 0, 0, 0)


class Part(NamedTuple):
    """`num_heads` heads of each token that are taken from a source to a destination, in groups of group_size."""

    num_heads: int
    group_size: int
    source: Heads
    destination: Heads | None


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
    rows: int,
    dim: int,
    parts: tuple[Part | None, Part | None, Part | None],
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    inverse: bool,
    norms: Norms = NO_NORMS,
) -> None:
    """Normalises and rotates q and k, copies v, each from its source to its destination. At least one part is there;
    either all of them have a destination or none has."""
    places: list[Any] = []
    heads: dict[str, int] = {}
    most = 1
    has_destination = True
    for name, part in zip("QKV", parts, strict=True):
        count, group_size, source, destination = part or (0, 1, NOWHERE, NOWHERE)
        has_destination = has_destination and destination is not None
        places += (*source, *(destination or NOWHERE))
        block = power_of_2_above(count)
        heads[f"{name}_HEADS"], heads[f"{name}_GROUP"], heads[f"BLOCK_{name}"] = count, group_size, block
        most = max(most, block)
    half, T = (0, 1) if cos is None else (cos.shape[2], cos.shape[1])
    tables: list[Any] = []
    for table in (cos, sin):
        if table is None:
            tables += NOWHERE[:3]
            continue
        table = table if table.stride(2) == 1 else table.contiguous()
        tables += [table, table.stride(0) if table.shape[0] > 1 else 0, table.stride(1)]
    given: list[Any] = [None, *NOWHERE]
    if norms.given is not None:
        (q_given, *strides), (k_given, *_), _ = _packed(norms.given, heads["Q_GROUP"], dim)
        given = [q_given, k_given, *strides]
    weights = [None if w is None else w.contiguous() for w in (norms.q, norms.k)]
    block = power_of_2_above((dim + 1) // 2)
    programs = rows if norms.partial is None else norms.partial.shape[1]
    _rope_kernel[(programs,)](
        *places, *tables, T, *weights, norms.eps, norms.offset, *given, norms.partial,
        rows, -(-rows // max(programs, 1)), **heads, Q_NORM=norms.q is not None, K_NORM=norms.k is not None,
        CAST_BEFORE=norms.cast_before, INVERSE=inverse, NEED_HEADS=has_destination,
        NEED_Q_NORM=norms.need_q, NEED_K_NORM=norms.need_k, HALF=half, DIM=dim, BLOCK=block, STAGES=STAGES,
        num_warps=min(max(most * block // PAIRS, 2 if norms.partial is None else 4), 16),
    )  # fmt: skip


def _tokens(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x (B, T, ...), and the stride at which its B * T tokens follow one another: a copy of x where there is none, or
    where channels do not lie side by side."""
    B, T = x.shape[:2]
    if x.stride(-1) != 1 or (B > 1 and T > 1 and x.stride(0) != T * x.stride(1)):
        x = x.contiguous()
    return x, x.stride(0 if T == 1 else 1)


def _heads(x: torch.Tensor, group_size: int = 1) -> Heads:
    """Of x (B, T, heads, D)."""
    x, row = _tokens(x)
    return Heads(x, row, group_size * x.stride(2), x.stride(2))


def _parts(
    num_kv_heads: int, group_size: int, packed: Sequence[Heads | None], apart: Sequence[torch.Tensor], inverse: bool
) -> tuple[Part, Part, Part]:
    """q, k and v out of the packed projection to tensors (B, T, heads, D) of their own or, inverse, back."""

    def part(size: int, inside: Heads | None, x: torch.Tensor) -> Part:
        outside = _heads(x, size)
        if inside is None or inverse:
            return Part(num_kv_heads * size, size, outside, inside)
        return Part(num_kv_heads * size, size, inside, outside)

    q, k, v = map(part, (group_size, 1, 1), packed, apart)
    return q, k, v


def _packed(qkv: torch.Tensor, group_size: int, head_dim: int) -> tuple[Heads, Heads, Heads]:
    """q, k and v of a packed qkv (B, T, ...)."""
    (qkv, row), width = _tokens(qkv), (group_size + 2) * head_dim
    starts = (qkv.narrow(2, place * head_dim, head_dim) for place in (0, group_size, group_size + 1))
    q, k, v = (Heads(start, row, width, head_dim) for start in starts)
    return q, k, v


def _rotate_fake(heads: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> list[torch.Tensor]:
    return [empty_like(x) for x in heads]


@opaque_op(_rotate_fake)
def _rope_rotate(heads: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> list[torch.Tensor]:
    """One or two tensors (B, T, heads, D) rotated, by the inverse rotation if so asked."""
    out = _rotate_fake(heads, cos, sin, inverse)
    parts = [Part(x.shape[2], 1, _heads(x), _heads(y)) for x, y in zip(heads, out, strict=True)]
    q, k = (*parts, None)[:2]
    _launch(heads[0].shape[:2].numel(), heads[0].shape[3], (q, k, None), cos, sin, inverse)
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
    parts = _parts(num_kv_heads, group_size, _packed(qkv, group_size, head_dim), out, False)
    norms = Norms(q_norm, k_norm, eps, offset, cast_before)
    _launch(qkv.shape[:2].numel(), head_dim, parts, cos, sin, False, norms)
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
    dqkv, dq_norm, dk_norm = _merge_fake(
        dq, dk, dv, cos, sin, q_norm, k_norm, qkv, eps, offset, need_qkv, need_q_norm, need_k_norm
    )
    group_size = num_q_heads // num_kv_heads
    packed = _packed(dqkv, group_size, head_dim) if need_qkv else (None, None, None)
    parts = _parts(num_kv_heads, group_size, packed, (dq, dk, dv), True)
    partial = None
    if need_q_norm or need_k_norm:
        programs = min(B * T, processors(dq.device) * PROGRAMS)
        partial = dq.new_empty((2, programs, head_dim), dtype=torch.float32)
    norms = Norms(q_norm, k_norm, eps, offset, True, qkv, need_q_norm, need_k_norm, partial)
    _launch(B * T, head_dim, parts, cos, sin, True, norms)

    for total, parts_of_it in zip((dq_norm, dk_norm), () if partial is None else partial, strict=False):
        if total.numel():
            sum_rows(parts_of_it, total)
    return dqkv, dq_norm, dk_norm


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
