"""Casts to float8 with the exact maximum of the tensor or of each row, and the transposition of bytes.

With one scale per tensor a cast takes two passes: the first computes the maximum, the second reads the tensor again and
writes one layout or both. With one scale per row it takes one pass, see `cast_by_row`.
"""

import torch
from torch import Tensor

from ligermodels.arguments import check_flags
from ligermodels.errors import InputError
from ligermodels.ops.float8.cast_by_row import check_tail, float8_rows, with_tail
from ligermodels.ops.float8.scaling import (
    ALIGNMENT,
    COLUMNS,
    E4M3,
    MAX_EXPONENT,
    TILE,
    TILE_ROWS,
    aligned,
    bits_of_max,
    check_float8_device,
    check_float8_dtype,
    scale_and_inverse,
    scale_reference,
    store_float8,
    use_float8_kernels,
)
from ligermodels.ops.float8.tensor import Float8Tensor
from ligermodels.ops.runtime.checks import check_tensors
from ligermodels.ops.runtime.dispatch import tl
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import always, custom_op, is_fake, reject_dtensors
from ligermodels.ops.runtime.tensors import as_rows, count_rows, rows_and_stride


def float8_cast(
    x: Tensor, dtype: torch.dtype, *, rows: bool = True, columns: bool = False, by_row: bool = False, tail: int = 0
) -> Float8Tensor:
    """x as float8, scaled by its exact maximum and rounded to nearest even. No gradient.

    Args:
        x: (..., N), any floating dtype and strides, N a multiple of 16. A Float8Tensor keeps its values and scales; a
            missing layout is added.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rows: whether the result has the row-major layout.
        columns: whether the result has the transposed layout.
        by_row: one scale per row, from the row's maximum, instead of one per tensor; without the transposed layout.
        tail: columns of memory after each row, a multiple of 16, for factors that a layer multiplies together with x:
            see `ops.float8.tail`.

    Returns:
        A Float8Tensor of x's shape and dtype.

    Raises:
        InputError: wrong dtype, shape or tail, `columns` together with `by_row`, or a DTensor.
        BackendError: a GPU without float8.
    """
    check_tail("float8_cast", tail)
    check_flags("float8_cast", rows=rows, columns=columns, by_row=by_row)
    if by_row and columns:
        raise InputError("float8_cast: by_row: columns have one scale; a scale for each row goes with rows alone")
    if isinstance(x, Float8Tensor):
        if not (columns and x.scale.dim()):
            return with_layouts(x, rows, columns)
        x = x.dequantize()
    check_float8_dtype("float8_cast", "dtype", dtype)
    check_last("float8_cast", "x", x)
    reject_dtensors("float8_cast", x)
    x = x.detach()
    if by_row:
        return float8_rows(x, dtype, tail)
    row_major, transposed, scale = _float8_cast(x, _float8_amax(x), dtype, rows, columns, tail)
    return Float8Tensor(row_major if rows else None, transposed if columns else None, scale, x.shape, x.dtype)


def with_layouts(x: Float8Tensor, rows: bool, columns: bool) -> Float8Tensor:
    """x with at least the needed layouts, `rows` or `columns`; a missing layout is the other layout, transposed."""
    M, N = count_rows(x), x.shape[-1]
    row_major, transposed = x.wide, x.columns
    if rows and row_major is None and transposed is not None:
        row_major = float8_transpose(transposed)[:M, :N].contiguous()  # N has no padding: it is a multiple of 16
    if columns and transposed is None and row_major is not None:
        transposed = float8_transpose(row_major[:, :N])
    if row_major is x.wide and transposed is x.columns:
        return x
    return Float8Tensor(row_major, transposed, x.scale, x.shape, x.dtype)


def check_last(op: str, name: str, x: Tensor, multiple: int = ALIGNMENT) -> None:
    """Raises InputError, naming `op` and the argument `name`, unless x is floating with a last dimension that is a
    multiple of `multiple`; and BackendError on a GPU without float8."""
    check_tensors(op, **{name: x})
    check_float8_device(op, x.device)
    if x.dim() == 0 or not x.is_floating_point() or x.shape[-1] % multiple:
        raise InputError(
            f"{op}: {name} must be floating, its last dimension a multiple of {multiple}; got {x.dtype} "
            f"{tuple(x.shape)}"
        )


def float8_transpose(x: Tensor, tail: int = 0) -> Tensor:
    """Transposes a float8 matrix.

    Args:
        x: (M, N), float8, contiguous rows, N a multiple of 16.
        tail: columns of memory after each row of the result, a multiple of 16.

    Returns:
        (N, M' + tail), of x's dtype, where M' is M rounded up to a multiple of 16; zeros from M to M', undefined values
        in the tail.

    Raises:
        InputError: x is not such a matrix, or N or the tail is not a multiple of 16.
    """
    check_tail("float8_transpose", tail)
    check_tensors("float8_transpose", x=x)
    if x.dim() != 2 or x.dtype not in MAX_EXPONENT or x.shape[1] % ALIGNMENT:
        raise InputError(f"float8_transpose: takes float8 (M, N), N a multiple of 16; got {x.dtype} {tuple(x.shape)}")
    return _float8_transpose(x.view(torch.uint8), tail).view(x.dtype)


def _amax_reference(x: Tensor) -> Tensor:
    """The bits of max |x|, int32 ()."""
    most = x.detach().abs().max() if x.numel() else x.new_zeros(())
    return most.float().view(torch.int32) & 0x7FFFFFFF  # without the sign of NaN


def scale_of_bits(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """`scale_reference` from the bits of a maximum."""
    return scale_reference(amax.view(torch.float32), dtype)


def _transposed(q: Tensor, tail: int = 0) -> Tensor:
    transposed = q.new_zeros(q.shape[1], aligned(q.shape[0]) + tail, dtype=torch.uint8)
    transposed[:, : q.shape[0]] = q.view(torch.uint8).t()
    return transposed.view(q.dtype)


def _tiles(M: int, N: int) -> tuple[int, int]:
    """Number of programs for a tensor (M, N), and programs per block of rows; rows include the padding of columns."""
    across = -(-N // COLUMNS)
    return -(-aligned(M) // TILE_ROWS) * across, across


@kernel
def _cast_kernel(
    x, x_stride, amax, rows, pitch, words, scale, M, N, W, across,
    AMAX: tl.constexpr, MAX_EXPONENT: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    QUADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of 4 QUADS rows and COLUMNS columns per program. AMAX: only takes the maximum, into `amax`; atomic maxima
    give the same result in any order."""
    program = tl.program_id(0)
    first_row = (program // across).to(tl.int64) * (4 * QUADS)
    quad = first_row + 4 * tl.arange(0, QUADS)
    first_col = program % across * COLUMNS
    col = first_col + tl.arange(0, COLUMNS)
    inside = (col < N)[None, :]
    start = x + quad[:, None] * x_stride + col[None, :]
    v0 = tl.load(start, mask=inside & (quad < M)[:, None], other=0.0)
    v1 = tl.load(start + x_stride, mask=inside & (quad + 1 < M)[:, None], other=0.0)
    v2 = tl.load(start + 2 * x_stride, mask=inside & (quad + 2 < M)[:, None], other=0.0)
    v3 = tl.load(start + 3 * x_stride, mask=inside & (quad + 3 < M)[:, None], other=0.0)
    if AMAX:
        most = tl.maximum(tl.maximum(tl.abs(v0), tl.abs(v1)), tl.maximum(tl.abs(v2), tl.abs(v3)))
        tl.atomic_max(amax, bits_of_max(most), sem="relaxed")
    else:
        s, inverse = scale_and_inverse(tl.load(amax), MAX_EXPONENT)
        if program == 0:
            tl.store(scale, s)
        store_float8(
            v0.to(tl.float32), v1.to(tl.float32), v2.to(tl.float32), v3.to(tl.float32), inverse,
            rows, pitch, words, first_row, first_col, M, N, W, MAX_EXPONENT, ROWS, WORDS, QUADS, COLUMNS,
        )  # fmt: skip


@kernel
def _transpose_kernel(x, stride, words, pitch, M, R, W, across, QUADS: tl.constexpr, COLUMNS: tl.constexpr):
    """x int32 (M, R), 4 R bytes per row -> words int32 (4 R, W); word i of a row holds the rows 4 i to 4 i + 3 of x.
    stride, pitch: words from row to row, in x and in `words`."""
    program = tl.program_id(0)
    first_row = (program // across).to(tl.int64) * (4 * QUADS)
    quad = first_row + 4 * tl.arange(0, QUADS)
    first_col = program % across * COLUMNS
    col = first_col // 4 + tl.arange(0, COLUMNS // 4)
    start = x + quad[:, None] * stride + col[None, :]
    inside = (col < R)[None, :]
    w0 = tl.load(start, mask=inside & (quad < M)[:, None], other=0)
    w1 = tl.load(start + stride, mask=inside & (quad + 1 < M)[:, None], other=0)
    w2 = tl.load(start + 2 * stride, mask=inside & (quad + 2 < M)[:, None], other=0)
    w3 = tl.load(start + 3 * stride, mask=inside & (quad + 3 < M)[:, None], other=0)
    place = first_row // 4 + tl.arange(0, QUADS)
    for j in tl.static_range(4):
        low = ((w0 >> (8 * j)) & 255) | (((w1 >> (8 * j)) & 255) << 8)
        word = low | (((w2 >> (8 * j)) & 255) << 16) | (((w3 >> (8 * j)) & 255) << 24)
        at = (4 * col + j).to(tl.int64)[:, None] * pitch + place[None, :]
        tl.store(words + at, tl.trans(word), mask=(col < R)[:, None] & (place < W)[None, :])


@custom_op(keep=always)
def _float8_amax(x: Tensor) -> Tensor:
    """The bits of max |x|, int32 (). A separate op, so that activation checkpointing can keep its result while x is
    recomputed."""
    amax = x.new_zeros((), dtype=torch.int32)
    if not is_fake(amax):
        update_amax(x, amax)
    return amax


def update_amax(x: Tensor, amax: Tensor) -> None:
    """Updates amax, int32 (), the bits of a maximum, with the maximum of |x|."""
    if use_float8_kernels(x):
        _launch(x, amax, amax, amax, amax, 0, E4M3, AMAX=True, ROWS=False, WORDS=False)
    else:
        amax.copy_(torch.maximum(amax, _amax_reference(x)))  # bits order like numbers


@custom_op()
def _float8_cast(
    x: Tensor, amax: Tensor, dtype: torch.dtype, need_rows: bool, need_columns: bool, tail: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows with a tail, columns and scale; a layout that is not needed has no elements."""
    if not use_float8_kernels(x):
        scale, most = scale_of_bits(amax, dtype), torch.finfo(dtype).max
        q = (as_rows(x).float() / scale.nan_to_num(1.0)).clamp(-most, most).to(dtype)
        nothing = q.new_empty(0)
        return with_tail(q, tail) if need_rows else nothing, _transposed(q) if need_columns else nothing, scale
    M, N = count_rows(x), x.shape[-1]
    rows = x.new_empty((M, N + tail) if need_rows else 0, dtype=dtype)
    columns = x.new_empty((N, aligned(M)) if need_columns else 0, dtype=dtype)
    scale = x.new_empty((), dtype=torch.float32)
    if not is_fake(scale):
        words = rows.view(torch.int32), columns.view(torch.int32)
        _launch(x, amax, *words, scale, tail, dtype, AMAX=False, ROWS=need_rows, WORDS=need_columns)
    return rows, columns, scale


def _launch(
    x: Tensor, amax: Tensor, rows: Tensor, words: Tensor, scale: Tensor, tail: int, dtype: torch.dtype, **options: bool
) -> None:
    M, N = count_rows(x), x.shape[-1]
    programs, across = _tiles(M, N)
    _cast_kernel[(max(programs, 1),)](
        *rows_and_stride(x), amax, rows, (N + tail) // 4, words, scale, M, N, aligned(M) // 4, max(across, 1),
        AMAX=options["AMAX"], MAX_EXPONENT=MAX_EXPONENT[dtype], ROWS=options["ROWS"], WORDS=options["WORDS"], **TILE,
    )  # fmt: skip


@custom_op()
def _float8_transpose(x: Tensor, tail: int) -> Tensor:
    """`float8_transpose` of x (M, N) uint8."""
    if not use_float8_kernels(x):
        return _transposed(x, tail)
    M, N = x.shape
    out = x.new_empty(N, aligned(M) + tail)
    if is_fake(out) or not out.numel():
        return out
    programs, across = _tiles(M, N)
    _transpose_kernel[(programs,)](
        *rows_and_stride(as_rows(x).view(torch.int32)), out.view(torch.int32), out.shape[1] // 4, M, N // 4,
        aligned(M) // 4, across, **TILE,
    )  # fmt: skip
    return out
