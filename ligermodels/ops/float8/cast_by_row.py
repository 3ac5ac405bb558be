"""Casts to float8 with one scale per row, from the row's exact maximum, in one pass.

A program reads a row for its maximum, then again from the caches to write it. Such a tensor has no transposed layout,
because products with that layout sum over rows. It serves layers with a frozen weight.
"""

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.float8.scaling import ALIGNMENT, MAX_EXPONENT, scale_and_inverse, scale_reference, store_row
from ligermodels.ops.float8.tensor import Float8Tensor
from ligermodels.ops.runtime.devices import power_of_2_above
from ligermodels.ops.runtime.dispatch import tl, triton, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_fake
from ligermodels.ops.runtime.tensors import as_rows, count_rows, rows_and_stride

BLOCK = 2048  # elements of a row at a time


def check_tail(op: str, tail: int) -> None:
    """Raises InputError, naming `op`, unless `tail` is a multiple of 16 columns."""
    if tail % ALIGNMENT or tail < 0:
        raise InputError(f"{op}: tail must be a multiple of {ALIGNMENT}, got {tail}")


def of_rows(parts: tuple[Tensor, Tensor], shape: torch.Size, dtype: torch.dtype) -> Float8Tensor:
    """A Float8Tensor of this shape and dtype, from the results of an op: `parts` are float8 (M, N), with or without a
    tail, and the scale of each row."""
    rows, scale = parts
    return Float8Tensor(rows, None, scale, shape, dtype)


def rows_reference(x: Tensor, dtype: torch.dtype, tail: int) -> tuple[Tensor, Tensor]:
    """x (M, N) float32 as float8 of `dtype`, (M, N + tail), and the scale of each row, float32 (M,)."""
    most = torch.finfo(dtype).max
    scale = scale_reference(x.abs().amax(1) if x.numel() else x.new_zeros(len(x)), dtype)
    return with_tail((x / scale.nan_to_num(1.0).unsqueeze(1)).clamp(-most, most).to(dtype), tail), scale


def with_tail(q: Tensor, tail: int) -> Tensor:
    """q (M, N) float8 -> (M, N + tail), with undefined values in the tail."""
    if not tail:
        return q
    wide = q.new_empty(q.shape[0], q.shape[1] + tail)
    wide[:, : q.shape[1]] = q
    return wide


def empty_rows(like: Tensor, M: int, N: int, dtype: torch.dtype, tail: int) -> tuple[Tensor, Tensor]:
    """Memory for float8 of `dtype`, (M, N + tail), and the scale of each row, float32 (M,), on the device of `like`."""
    return like.new_empty(M, N + tail, dtype=dtype), like.new_empty(M, dtype=torch.float32)


@triton.jit
def scale_of_rows(most, scales, row, M, MAX_EXPONENT: tl.constexpr):
    """Stores the scales of the rows `row`, below M, in `scales`, and returns their inverses, (ROWS, 1).

    most: (ROWS, BLOCK), for each row the maxima over every BLOCK-th element. MAX_EXPONENT: of the float8 format."""
    bits = tl.max(most, axis=1).to(tl.int32, bitcast=True)  # bits order like numbers
    s, inverse = scale_and_inverse(bits, MAX_EXPONENT)
    tl.store(scales + row, s, mask=row < M)
    return inverse[:, None]


@triton.jit
def _load(x, stride, row, first, M, N, BLOCK: tl.constexpr):
    col = first + tl.arange(0, BLOCK)
    inside = (row < M)[:, None] & (col < N)[None, :]
    return tl.load(x + row[:, None] * stride + col[None, :], mask=inside, other=0.0).to(tl.float32)


@kernel
def _cast_rows_kernel(
    x, stride, rows, pitch, scales, M, N, MAX_EXPONENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    v = _load(x, stride, row, 0, M, N, BLOCK)
    most = tl.abs(v)
    for first in range(BLOCK, N, BLOCK):
        most = tl.maximum(most, tl.abs(_load(x, stride, row, first, M, N, BLOCK)))
    inverse = scale_of_rows(most, scales, row, M, MAX_EXPONENT)
    store_row(rows, v, inverse, row, 0, M, N // 4, pitch, MAX_EXPONENT, ROWS, BLOCK)
    for first in range(BLOCK, N, BLOCK):
        v = _load(x, stride, row, first, M, N, BLOCK)
        store_row(rows, v, inverse, row, first, M, N // 4, pitch, MAX_EXPONENT, ROWS, BLOCK)


@custom_op()
def _float8_rows(x: Tensor, dtype: torch.dtype, tail: int) -> tuple[Tensor, Tensor]:
    M, N = count_rows(x), x.shape[-1]
    if not use_kernels(x):
        return rows_reference(as_rows(x).float(), dtype, tail)
    rows, scale = empty_rows(x, M, N, dtype, tail)
    if is_fake(rows) or not rows.numel():
        return rows, scale
    block = min(power_of_2_above(N), BLOCK)
    at_once = BLOCK // block
    _cast_rows_kernel[(-(-M // at_once),)](
        *rows_and_stride(x), rows.view(torch.int32), (N + tail) // 4, scale, M, N, MAX_EXPONENT=MAX_EXPONENT[dtype],
        ROWS=at_once, BLOCK=block, num_warps=4 if N <= 8192 else 8,
    )  # fmt: skip
    return rows, scale


def float8_rows(x: Tensor, dtype: torch.dtype, tail: int) -> Float8Tensor:
    """x (..., N) as float8 of `dtype` with one scale per row and a tail."""
    return of_rows(_float8_rows(x, dtype, tail), x.shape, x.dtype)
