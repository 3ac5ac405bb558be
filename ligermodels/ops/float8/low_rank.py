"""Products with a matrix of low rank R, for rows that may be float8: LoRA needs them in addition to the products of the
weight.

Each product reads its large operand once; float8 rows have half the bytes of bfloat16 rows. In a bfloat16 model the
products are bfloat16, which represents all numbers of both float8 formats; in other models they are float32. Sums are
float32. Custom ops call these functions, so torch's autocast is off.
"""

from typing import Any

import torch
from torch import Tensor

from ligermodels.ops.float8.cast import update_amax
from ligermodels.ops.float8.scaling import bits_of_max
from ligermodels.ops.norm.norm_rows import sum_rows
from ligermodels.ops.runtime.devices import num_sms, power_of_2_above
from ligermodels.ops.runtime.dispatch import tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel

LEAST_RANKS, MOST_RANKS = 16, 64
"""Ranks per program: at least the smallest tile of tensor cores, at most the ranks that fit in registers. Sums over
rows always take the most ranks, padded with zeros: Hopper's tensor cores then read the rows from shared memory, in any
order."""
LEAST_ROWS = 512  # rows per program that sums over rows


def project(
    x: Tensor, scale: Tensor | None, w: Tensor, out: Tensor, alpha: float = 1.0, *, amax: Tensor | None = None,
    unit: Tensor | None = None,
) -> None:  # fmt: skip
    """out = alpha * (x * scale) w.

    Args:
        x: (N, K), float8 or floating, last dimension contiguous.
        scale: float32, of shape () or one per row, (N,); None for 1.
        w: (K, R), any strides.
        out: (N, R), contiguous, of w's dtype; written.
        alpha: factor.
        amax: int32 (), the bits of a maximum; updated with the maximum of |out / unit|. None for no maximum.
        unit: float32 (N,), given with amax.
    """
    (N, K), R = x.shape, w.shape[1]
    if not use_kernels(w):
        out.copy_((_numbers(x, scale) @ w.float()).mul_(alpha))
        if amax is not None and unit is not None:
            update_amax(out.float() / unit.unsqueeze(1), amax)
    elif out.numel():
        ranks = _ranks(R)
        _project_kernel[(-(-N // 64), -(-R // ranks))](
            x, x.stride(0), *_scale_and_stride(scale), w, *w.stride(), out,
            amax, unit, N, K, R, alpha,
            COMPUTE=_compute(w), ROWS=64, WIDTH=128 if _is_bf16(w) else 64, RANKS=ranks, num_warps=4,
            num_stages=4 if _is_bf16(w) else 1,
        )  # fmt: skip


def correlate(x: Tensor, scale: Tensor | None, d: Tensor, out: Tensor, *, transposed: bool, alpha: float = 1.0) -> None:
    """out = alpha * (x * scale)^T d, or its transpose. Programs sum over parts of the rows, and their sums are added in
    the same order in every run.

    Args:
        x: (N, K), float8 or floating, last dimension contiguous.
        scale: float32, of shape () or one per row, (N,); None for 1.
        d: (N, R), contiguous.
        out: (K, R), or with `transposed` (R, K), contiguous, of d's dtype; written.
        transposed: whether `out` is the transpose.
        alpha: factor.
    """
    (N, K), R = x.shape, d.shape[1]
    if not use_kernels(d):
        product = (_numbers(x, scale).t() @ d.float()).mul_(alpha)
        out.copy_(product.t() if transposed else product)
        return
    if not out.numel() or not N:
        out.zero_()
        return
    width, step = (256, 64) if _is_bf16(d) else (64, 32)
    columns, across = -(-K // width), -(-R // MOST_RANKS)
    parts = max(min(2 * num_sms(x.device) // (columns * across), -(-N // LEAST_ROWS)), 1)
    rows = -(-N // (parts * step)) * step
    parts = -(-N // rows)
    sums = d.new_empty((parts, *out.shape), dtype=torch.float32)
    strides = (1, K) if transposed else (R, 1)
    _correlate_kernel[(columns, across, parts)](
        x, x.stride(0), *_scale_and_stride(scale), d, sums, *strides, N, K, R, rows, alpha,
        COMPUTE=_compute(d), ROWS=step, WIDTH=width, RANKS=MOST_RANKS, num_warps=4, num_stages=3 if _is_bf16(d) else 1,
    )  # fmt: skip
    sum_rows(sums.view(parts, -1), out.view(-1))


def add_product(y: Tensor, d: Tensor, w: Tensor, alpha: float = 1.0, unless: Tensor | None = None) -> None:
    """y += alpha * d w, rounded once.

    Args:
        y: (N, M), contiguous, floating; updated in place.
        d: (N, R), contiguous.
        w: (R, M), of d's dtype, any strides.
        alpha: factor.
        unless: int32 () on the device; if it is not 0, y stays as it is. None for 0.
    """
    (N, M), R = y.shape, d.shape[1]
    if not use_kernels(d):
        if unless is None or not unless:
            y.copy_(torch.addmm(y.float(), d.float(), w.float(), alpha=alpha))
    elif y.numel():
        across = -(-M // 128)
        tiles = -(-N // 64) * across
        programs = tiles if unless is None else min(tiles, 4 * num_sms(y.device))  # usually they end at once
        _add_product_kernel[(programs,)](
            y, d, w, *w.stride(), unless, N, M, R, alpha, across, tiles, COMPUTE=_compute(d), ROWS=64, COLUMNS=128,
            RANKS=_ranks(R), num_warps=4,
        )  # fmt: skip


def _numbers(x: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return x.float()
    return x.float() * (scale.unsqueeze(1) if scale.dim() else scale)


def _scale_and_stride(scale: Tensor | None) -> tuple[Tensor | None, int]:
    return scale, 0 if scale is None else scale.dim()


def _ranks(R: int) -> int:
    return min(max(power_of_2_above(R), LEAST_RANKS), MOST_RANKS)


def _is_bf16(w: Tensor) -> bool:
    """Whether products are bfloat16. Other products are float32, in smaller tiles that fit Ada's shared memory."""
    return w.dtype == torch.bfloat16


def _compute(w: Tensor) -> Any:
    return tl.bfloat16 if _is_bf16(w) else tl.float32


@kernel
def _project_kernel(
    x, stride, scale, scale_stride, w, k_stride, r_stride, out, amax, unit, N, K, R, alpha,
    COMPUTE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    total = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    for first in range(0, K, WIDTH):
        k = first + tl.arange(0, WIDTH)
        v = tl.load(x + row[:, None] * stride + k[None, :], mask=(row < N)[:, None] & (k < K)[None, :], other=0.0)
        inside = (k < K)[:, None] & (rank < R)[None, :]
        u = tl.load(w + k[:, None] * k_stride + rank[None, :] * r_stride, mask=inside, other=0.0)
        total = tl.dot(v.to(tl.float32).to(COMPUTE), u.to(COMPUTE), total, input_precision="ieee")
    if scale is not None:
        total *= tl.load(scale + row * scale_stride, mask=row < N, other=0.0)[:, None]
    found = (alpha * total).to(out.dtype.element_ty)
    if amax is not None:
        each = tl.load(unit + row, mask=row < N, other=1.0)[:, None]
        tl.atomic_max(amax, bits_of_max(found.to(tl.float32) / each), sem="relaxed")
    inside = (row < N)[:, None] & (rank < R)[None, :]
    tl.store(out + row[:, None] * R + rank[None, :], found, mask=inside)


@kernel
def _correlate_kernel(
    x, stride, scale, scale_stride, d, sums, k_stride, r_stride, N, K, R, rows, alpha,
    COMPUTE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Columns of x times ranks of d, summed over the `rows` rows of the third program index."""
    k = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    start = tl.program_id(2).to(tl.int64) * rows
    end = tl.minimum(start + rows, N)
    total = tl.zeros((RANKS, WIDTH), dtype=tl.float32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < end)[:, None] & (k < K)[None, :]
        v = tl.load(x + row[:, None] * stride + k[None, :], mask=inside, other=0.0)
        inside = (row < end)[:, None] & (rank < R)[None, :]
        u = tl.load(d + row[:, None] * R + rank[None, :], mask=inside, other=0.0)
        if scale is not None:  # a power of two: bfloat16 loses nothing
            u = u.to(tl.float32) * tl.load(scale + row * scale_stride, mask=row < end, other=0.0)[:, None]
        total = tl.dot(tl.trans(u.to(COMPUTE)), v.to(tl.float32).to(COMPUTE), total, input_precision="ieee")
    place = tl.program_id(2).to(tl.int64) * K * R + k[None, :] * k_stride + rank[:, None] * r_stride
    tl.store(sums + place, alpha * total, mask=(rank < R)[:, None] & (k < K)[None, :])


@kernel
def _add_product_kernel(
    y, d, w, r_stride, m_stride, unless, N, M, R, alpha, across, tiles,
    COMPUTE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    if unless is not None:
        tiles = tl.where(tl.load(unless) != 0, 0, tiles)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        col = tile % across * COLUMNS + tl.arange(0, COLUMNS)
        place = y + row[:, None] * M + col[None, :]
        whole = (row < N)[:, None] & (col < M)[None, :]
        before = tl.load(place, mask=whole, other=0.0)  # loads during the products
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for first in range(0, R, RANKS):
            rank = first + tl.arange(0, RANKS)
            inside = (row < N)[:, None] & (rank < R)[None, :]
            v = tl.load(d + row[:, None] * R + rank[None, :], mask=inside, other=0.0)
            inside = (rank < R)[:, None] & (col < M)[None, :]
            u = tl.load(w + rank[:, None] * r_stride + col[None, :] * m_stride, mask=inside, other=0.0)
            total = tl.dot(v.to(COMPUTE), u.to(COMPUTE), total, input_precision="ieee")
        tl.store(place, (before.to(tl.float32) + alpha * total).to(y.dtype.element_ty), mask=whole)
