"""The two float8 formats, their scales, and the store of a tile as float8 in either layout.

A tensor x is kept as q, float8, and a scale, float32 on the device, of the tensor or of each row: x is about q * scale.
The scale is the least power of two with which max|x| does not overflow. So dividing by it is exact, and what is lost is
what rounding to the format loses: of E4M3 the last of 4 significant bits, of E5M2 the last of 3. Where x has an
infinity, or NaN in the maximum, the scale is NaN, and with it all that is computed from x.
"""

import torch
from torch import Tensor

from ligermodels.ops.runtime.dispatch import IN_INTERPRETER, tl, triton, use_kernels

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MAX_EXPONENT = {E4M3: 8, E5M2: 15}  # the greatest number is 1.75 * 2 ** of this: 448, 57344
ALIGNMENT = 16  # elements: what the matrix products of hardware want of the dimension that is summed over

QUADS = 32  # of rows in a tile; four rows share a word of 32 bits in the transposed layout
COLUMNS = 64  # of a tile
TILE_ROWS = 4 * QUADS
TILE = {"QUADS": QUADS, "COLUMNS": COLUMNS, "num_warps": 4}


def use_float8_kernels(x: Tensor, *others: Tensor | None) -> bool:
    """Whether kernels serve x (..., N). A single row is left to the reference: beside it, code that Triton 3.6 made for
    sm_90 filled the transposed layout's padding with other bytes than zeros."""
    return use_kernels(x, *others) and x.shape[:-1].numel() > 1


def aligned(size: int) -> int:
    """The smallest multiple of ALIGNMENT that is not below the size."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def scale_reference(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale, float32, of a tensor whose greatest absolute value is `amax`, float32 of shape (), or of each row."""
    mantissa, exponent = torch.frexp(amax.float())  # amax = mantissa * 2 ** exponent, mantissa in [1/2, 1)
    exponent = exponent - 1 - MAX_EXPONENT[dtype] + (mantissa > 0.875)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent.clamp(-126, 126))
    return torch.where(amax.isfinite(), scale, torch.nan)


@triton.jit
def scale_exponent(amax_bits, MAX_EXPONENT: tl.constexpr):
    """The exponent of the scale, from the bits of a float32 amax, an int32: biased by 127, as in a float32."""
    exponent = (amax_bits >> 23) - MAX_EXPONENT + ((amax_bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.minimum(tl.maximum(exponent, 1), 253)


@triton.jit
def scale_and_inverse(amax_bits, MAX_EXPONENT: tl.constexpr):
    """The scale and its inverse, float32, from the bits of a float32 amax, an int32."""
    exponent = scale_exponent(amax_bits, MAX_EXPONENT)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(amax_bits < 0x7F800000, scale, float("nan")), inverse


@triton.jit
def bits_of_max(values):
    """The bits of max|values|, an int32, which order as the numbers do."""
    return tl.max(tl.abs(values.to(tl.float32))).to(tl.int32, bitcast=True)


@triton.jit
def _word(v0, v1, v2, v3, inverse, MAX_EXPONENT: tl.constexpr):
    """Four float32 values / scale as float8, the first in the lowest byte of an int32.

    Single bytes never are registers of their own: with code for them ptxas 12.8 crashed, or lost some when they were
    transposed. Triton's interpreter has no inline assembly."""
    v0, v1, v2, v3 = v0 * inverse, v1 * inverse, v2 * inverse, v3 * inverse
    if IN_INTERPRETER:
        dtype: tl.constexpr = tl.float8e4nv if MAX_EXPONENT == 8 else tl.float8e5
        b0 = v0.to(dtype).to(tl.uint8, bitcast=True).to(tl.int32)
        b1 = v1.to(dtype).to(tl.uint8, bitcast=True).to(tl.int32)
        b2 = v2.to(dtype).to(tl.uint8, bitcast=True).to(tl.int32)
        b3 = v3.to(dtype).to(tl.uint8, bitcast=True).to(tl.int32)
        word = b0 | (b1 << 8) | (b2 << 16) | (b3 << 24)
    elif MAX_EXPONENT == 8:
        word = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high;"
            "cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
            "mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f", [v0, v1, v2, v3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        word = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high;"
            "cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;"
            "mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f", [v0, v1, v2, v3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return word


@triton.jit
def store_row(
    rows, v, inverse, row, first_col, M, R, pitch,
    MAX_EXPONENT: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Stores v (QUADS, COLUMNS), float32, times the inverse of the scale, a number or (QUADS, 1), to these rows of
    `rows`, int32 (M, R), `pitch` words from one to the next."""
    even, odd = tl.split(tl.reshape(v, (QUADS, COLUMNS // 2, 2)))
    v0, v2 = tl.split(tl.reshape(even, (QUADS, COLUMNS // 4, 2)))
    v1, v3 = tl.split(tl.reshape(odd, (QUADS, COLUMNS // 4, 2)))
    word = _word(v0, v1, v2, v3, inverse, MAX_EXPONENT)
    col = first_col // 4 + tl.arange(0, COLUMNS // 4)
    tl.store(rows + row[:, None] * pitch + col[None, :], word, mask=(row < M)[:, None] & (col < R)[None, :])


@triton.jit
def store_float8(
    v0, v1, v2, v3, inverse, rows, pitch, words, first_row, first_col, M, N, W,
    MAX_EXPONENT: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Stores a tile of values, float32, of which vj has the rows first_row + 4 i + j, zeros beyond M and N.

    rows: int32 (M, N / 4), `pitch` words from one to the next, stored if ROWS: word i of a row holds its columns 4 i to
    4 i + 3. words: int32 (N, W), stored if WORDS: word i of a column holds its rows 4 i to 4 i + 3. N is a multiple of
    16."""
    quad = first_row + 4 * tl.arange(0, QUADS)
    if ROWS:
        store_row(rows, v0, inverse, quad, first_col, M, N // 4, pitch, MAX_EXPONENT, QUADS, COLUMNS)
        store_row(rows, v1, inverse, quad + 1, first_col, M, N // 4, pitch, MAX_EXPONENT, QUADS, COLUMNS)
        store_row(rows, v2, inverse, quad + 2, first_col, M, N // 4, pitch, MAX_EXPONENT, QUADS, COLUMNS)
        store_row(rows, v3, inverse, quad + 3, first_col, M, N // 4, pitch, MAX_EXPONENT, QUADS, COLUMNS)
    if WORDS:
        word = _word(v0, v1, v2, v3, inverse, MAX_EXPONENT)
        col = first_col + tl.arange(0, COLUMNS)
        place = first_row // 4 + tl.arange(0, QUADS)
        inside = (col < N)[:, None] & (place < W)[None, :]
        tl.store(words + col.to(tl.int64)[:, None] * W + place[None, :], tl.trans(word), mask=inside)
