"""The Triton kernel of rotary embedding, and the description of the memory layout of heads.

All RoPE ops use this kernel, forward and backward: it reads heads from strided sources and writes them to strided
destinations. A packed projection is three such sources in one tensor, so one launch writes its whole gradient.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ligermodels.ops.runtime.devices import power_of_2_above, shared_memory
from ligermodels.ops.runtime.dispatch import tl, triton
from ligermodels.ops.runtime.launcher import kernel, wait_for_previous
from ligermodels.ops.runtime.tensors import contiguous

CHANNEL_PAIRS = 256  # per warp; twice as many with a norm
PROGRAMS = 2  # per multiprocessor, if each program sums its part of a weight's gradient
TOKENS = 2  # per program that normalises and rotates
STAGES = 3  # pipeline stages: tokens in flight through shared memory


@triton.jit
def _places(
    group, head, HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Offsets of the channels of a token's heads, and whether they exist, for the two tiles of `load_heads`."""
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
def load_heads(
    source, group, head, HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loads all heads of a token as two tiles (BLOCK_HEADS, BLOCK), with 0 for channels and heads beyond the last.

    The tiles are the two halves of the first 2 HALF channels, which are rotated into one another, each followed by half
    of the other channels. There are HEADS heads of DIM channels: head h begins (h // GROUP) * group + (h % GROUP) *
    head elements after `source`."""
    first, second, in_first, in_second = _places(group, head, HEADS, GROUP, HALF, DIM, BLOCK_HEADS, BLOCK)
    return tl.load(source + first, mask=in_first, other=0.0), tl.load(source + second, mask=in_second, other=0.0)


@triton.jit
def store_heads(
    destination, group, head, x1, x2, HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first, second, in_first, in_second = _places(group, head, HEADS, GROUP, HALF, DIM, BLOCK_HEADS, BLOCK)
    tl.store(destination + first, x1.to(destination.dtype.element_ty), mask=in_first)
    tl.store(destination + second, x2.to(destination.dtype.element_ty), mask=in_second)


@triton.jit
def load_angles(table, batch, token, row, T, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Loads the HALF angles of one token as (1, BLOCK), float32: `table` is cos or sin of T tokens per sequence, with
    the strides `batch` and `token`; token number `row` counts over all sequences."""
    col = tl.arange(0, BLOCK)[None, :]
    angles = tl.zeros((1, BLOCK), dtype=tl.float32)
    if HALF > 0:
        angles = tl.load(table + (row // T) * batch + (row % T) * token + col, mask=col < HALF, other=0.0)
    return angles.to(tl.float32)


@triton.jit
def load_weight(weight, offset, HALF: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """offset + weight (DIM,) of a norm in float32, as two tiles (1, BLOCK) that match `load_heads` with this HALF."""
    w1, w2 = load_heads(weight, 0, 0, 1, 1, HALF, DIM, 1, BLOCK)
    return w1.to(tl.float32) + offset, w2.to(tl.float32) + offset


@triton.jit
def turn_heads(
    x1, x2, n1, n2, destination, row, d_row, d_group, d_head, cos, sin, w1, w2, dw1, dw2, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr,
    CAST_BEFORE: tl.constexpr, INVERSE: tl.constexpr, NEED_HEADS: tl.constexpr, NEED_WEIGHT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalises (with NORM) and rotates all heads of a token, or with INVERSE computes their gradients.

    x1, x2: the heads, or their gradients, as tiles of `load_heads`. n1, n2: with INVERSE and NORM, the norm's inputs.
    destination: written (with NEED_HEADS) at row * d_row, with the strides d_group and d_head. cos, sin: the angles.
    w1, w2: the norm's weight, plus offset. dw1, dw2: sums of its gradient by head; with INVERSE and NEED_WEIGHT this
    token's part is added. eps, CAST_BEFORE: options of the norm. HEADS, GROUP, HALF, DIM, BLOCK_HEADS, BLOCK: see
    `load_heads`."""
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
        store_heads(destination, d_group, d_head, x1, x2, HEADS, GROUP, HALF, DIM, BLOCK_HEADS, BLOCK)
    return dw1, dw2


@kernel
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
    HALF: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Each program takes rows_per_program consecutive tokens. For each token it loads the angles once, normalises and
    rotates the heads of q and of k, and copies the heads of v; a part with no heads is left out. It sums its own part
    of the gradients of the norms' weights: no atomics, so equal bits in every run. All loads come before the first
    store, because loads do not pass a store."""
    wait_for_previous(PDL)
    program = tl.program_id(0).to(tl.int64)
    q_w1, q_w2, k_w1, k_w2 = 1.0, 1.0, 1.0, 1.0
    if Q_NORM:
        q_w1, q_w2 = load_weight(q_norm, offset, HALF, DIM, BLOCK)
    if K_NORM:
        k_w1, k_w2 = load_weight(k_norm, offset, HALF, DIM, BLOCK)
    q_dw1 = tl.zeros((BLOCK_Q, BLOCK), dtype=tl.float32)
    q_dw2 = tl.zeros((BLOCK_Q, BLOCK), dtype=tl.float32)
    k_dw1 = tl.zeros((BLOCK_K, BLOCK), dtype=tl.float32)
    k_dw2 = tl.zeros((BLOCK_K, BLOCK), dtype=tl.float32)
    end = tl.minimum((program + 1) * rows_per_program, rows)
    for row in tl.range(program * rows_per_program, end, num_stages=STAGES):
        c = load_angles(cos, cos_batch, cos_token, row, T, HALF, BLOCK)
        s = load_angles(sin, sin_batch, sin_token, row, T, HALF, BLOCK)
        if INVERSE:
            s = -s
        if V_HEADS > 0 and NEED_HEADS:
            v1, v2 = load_heads(v + row * v_row, v_group, v_head, V_HEADS, V_GROUP, 0, DIM, BLOCK_V, BLOCK)
        if K_HEADS > 0:
            k1, k2 = load_heads(k + row * k_row, k_group, k_head, K_HEADS, K_GROUP, HALF, DIM, BLOCK_K, BLOCK)
            kn1, kn2 = k1, k2
            if K_NORM and INVERSE:
                kn1, kn2 = load_heads(
                    k_given + row * given_row, given_group, given_head, K_HEADS, K_GROUP, HALF, DIM, BLOCK_K, BLOCK
                )
        if Q_HEADS > 0:
            q1, q2 = load_heads(q + row * q_row, q_group, q_head, Q_HEADS, Q_GROUP, HALF, DIM, BLOCK_Q, BLOCK)
            qn1, qn2 = q1, q2
            if Q_NORM and INVERSE:
                qn1, qn2 = load_heads(
                    q_given + row * given_row, given_group, given_head, Q_HEADS, Q_GROUP, HALF, DIM, BLOCK_Q, BLOCK
                )
            q_dw1, q_dw2 = turn_heads(
                q1, q2, qn1, qn2, q_out, row, q_out_row, q_out_group, q_out_head,
                c, s, q_w1, q_w2, q_dw1, q_dw2, eps,
                Q_HEADS, Q_GROUP, HALF, DIM, Q_NORM, CAST_BEFORE, INVERSE, NEED_HEADS, NEED_Q_NORM, BLOCK_Q, BLOCK,
            )  # fmt: skip
        if K_HEADS > 0:
            k_dw1, k_dw2 = turn_heads(
                k1, k2, kn1, kn2, k_out, row, k_out_row, k_out_group, k_out_head,
                c, s, k_w1, k_w2, k_dw1, k_dw2, eps,
                K_HEADS, K_GROUP, HALF, DIM, K_NORM, CAST_BEFORE, INVERSE, NEED_HEADS, NEED_K_NORM, BLOCK_K, BLOCK,
            )  # fmt: skip
        if V_HEADS > 0 and NEED_HEADS:
            v_place = v_out + row * v_out_row
            store_heads(v_place, v_out_group, v_out_head, v1, v2, V_HEADS, V_GROUP, 0, DIM, BLOCK_V, BLOCK)
    if NEED_Q_NORM:
        sum1, sum2 = tl.sum(q_dw1, axis=0)[None, :], tl.sum(q_dw2, axis=0)[None, :]
        store_heads(partial + program * DIM, 0, 0, sum1, sum2, 1, 1, HALF, DIM, 1, BLOCK)
    if NEED_K_NORM:
        sum1, sum2 = tl.sum(k_dw1, axis=0)[None, :], tl.sum(k_dw2, axis=0)[None, :]
        store_heads(partial + (tl.num_programs(0) + program) * DIM, 0, 0, sum1, sum2, 1, 1, HALF, DIM, 1, BLOCK)


class Heads(NamedTuple):
    """Memory layout of heads: head h of token n begins n * row + h // group_size * group + h % group_size * head
    elements after the start of the tensor."""

    start: Tensor | None
    row: int
    group: int
    head: int


NOWHERE = Heads(None, 0, 0, 0)


Part = tuple[int, int, Heads, Heads | None]
"""Heads per token, heads per group, the source of the heads, and their destination (None: not needed)."""


class HeadNorms(NamedTuple):
    """The norms of query and key heads: their weights (dim,), None for no norm, and their options."""

    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0
    cast_before: bool = True


class NormBackward(NamedTuple):
    """The backward pass of `HeadNorms`.

    packed: packed input of the norms, None without norms.
    need_q_norm, need_k_norm: whether the gradients of the norms' weights are needed.
    partial: float32 (2, programs, dim), gets each program's part of the gradients of q_norm and k_norm.
    """

    packed: Tensor | None = None
    need_q_norm: bool = False
    need_k_norm: bool = False
    partial: Tensor | None = None


NO_NORMS, NO_BACKWARD = HeadNorms(), NormBackward()


def launch(
    rows: int, dim: int, parts: Sequence[Part | None], cos: Tensor | None, sin: Tensor | None, inverse: bool,
    norms: HeadNorms = NO_NORMS, backward: NormBackward = NO_BACKWARD,
) -> None:  # fmt: skip
    """Normalises and rotates q and k, copies v, each from its source to its destination.

    Args:
        rows: number of tokens.
        dim: channels per head.
        parts: q, k and v; at least one is not None, and either all have a destination or none has.
        cos, sin: (B or 1, T, R/2), or None for no rotation.
        inverse: whether to compute gradients.
        norms: the norms of q and k before their rotation. Default: none.
        backward: for gradients, the backward pass of the norms.
    """
    q_norm, k_norm, eps, offset, cast_before = norms
    arguments: list[Any] = []
    heads: dict[str, int] = {}
    most = 1
    has_destination = True
    for name, part in zip("QKV", parts, strict=True):
        count, group_size, source, destination = part or (0, 1, NOWHERE, NOWHERE)
        has_destination = has_destination and destination is not None
        arguments += (*source, *(destination or NOWHERE))
        block = power_of_2_above(count)
        heads[f"{name}_HEADS"], heads[f"{name}_GROUP"], heads[f"BLOCK_{name}"] = count, group_size, block
        most = max(most, block)
    half, T = (0, 1) if cos is None else (cos.shape[2], cos.shape[1])
    given_heads: list[Any] = [None, *NOWHERE]
    if backward.packed is not None:
        (q_given, *strides), (k_given, *_), _ = packed_heads(backward.packed, heads["Q_GROUP"], dim)
        given_heads = [q_given, k_given, *strides]
    block = power_of_2_above((dim + 1) // 2)
    weight = k_norm if q_norm is None else q_norm
    programs, stages, pairs, partial = rows, 1, CHANNEL_PAIRS, backward.partial
    if weight is not None and (partial is not None or not inverse):
        # A norm delays the stores; with pipeline stages the next tokens' loads begin earlier, if shared memory has
        # room.
        programs, pairs = -(-rows // TOKENS) if partial is None else partial.shape[1], 2 * CHANNEL_PAIRS
        of_a_token = sum(heads[f"BLOCK_{name}"] for name in "QKV") * 2 * block * 4 * (2 if inverse else 1)
        stages = min(max(shared_memory(weight.device) // of_a_token, 1), STAGES)
    _rope_kernel[(programs,)](
        *arguments, *strided_tables(cos, sin), T, contiguous(q_norm), contiguous(k_norm), eps, offset, *given_heads,
        partial, rows, -(-rows // max(programs, 1)), **heads, Q_NORM=q_norm is not None, K_NORM=k_norm is not None,
        CAST_BEFORE=cast_before, INVERSE=inverse, NEED_HEADS=has_destination,
        NEED_Q_NORM=backward.need_q_norm, NEED_K_NORM=backward.need_k_norm, HALF=half, DIM=dim, BLOCK=block,
        STAGES=stages, num_warps=min(max(most * block // pairs, 2 if partial is None else 4), 16),
    )  # fmt: skip


def strided_tables(cos: Tensor | None, sin: Tensor | None) -> list[Any]:
    """cos and sin as kernels take them: each table with its strides from sequence to sequence and from token to
    token."""
    arguments: list[Any] = []
    for table in (cos, sin):
        if table is None:
            arguments += [None, 0, 0]
            continue
        table = table if table.stride(2) == 1 else table.contiguous()
        arguments += [table, table.stride(0) if table.shape[0] > 1 else 0, table.stride(1)]
    return arguments


def _tokens(x: Tensor) -> tuple[Tensor, int]:
    """x (B, T, ...), and the stride between its B * T tokens; a contiguous copy of x if there is no such stride, or if
    channels are strided."""
    B, T = x.shape[:2]
    if x.stride(-1) != 1 or (B > 1 and T > 1 and x.stride(0) != T * x.stride(1)):
        x = x.contiguous()
    return x, x.stride(0 if T == 1 else 1)


def heads_of(x: Tensor, group_size: int = 1) -> Heads:
    """The layout of x (B, T, heads, D), with `group_size` heads per group."""
    x, row = _tokens(x)
    return Heads(x, row, group_size * x.stride(2), x.stride(2))


def packed_heads(qkv: Tensor, group_size: int, head_dim: int) -> list[Heads]:
    """The layouts of q, k and v in a packed qkv (B, T, ...): group_size query heads of head_dim channels, a key and a
    value for each key/value head."""
    (qkv, row), width = _tokens(qkv), (group_size + 2) * head_dim
    starts = (qkv.narrow(2, index * head_dim, head_dim) for index in (0, group_size, group_size + 1))
    return [Heads(start, row, width, head_dim) for start in starts]
