"""The two float8 formats, their tensor-wise scales, and the store of a tile as float8 in either layout.

A tensor x is kept as q, float8, and a scale, one float32 on the device: x is about q * scale. The scale is the least
power of two with which max|x| does not overflow. So dividing by it is exact, and what is lost is what rounding to the
format loses: of E4M3 the last of 4 significant bits, of E5M2 the last of 3. Where x has an infinity, or NaN in the
maximum, the scale is NaN, and with it all that is computed from x.
"""

import torch
from torch import Tensor

from ligermodels.ops.runtime.dispatch import tl, triton

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MAX_EXPONENT = {E4M3: 8, E5M2: 15}  # the greatest number is 1.75 * 2 ** of this: 448, 57344
ALIGNMENT = 16  # elements: what the matrix products of hardware want of the dimension that is summed over

QUADS = 32  # of rows in a tile; four rows share a word of 32 bits in the transposed layout
COLUMNS = 64  # of a tile
TILE_ROWS = 4 * QUADS
NUM_WARPS = 4
TILE = {"QUADS": QUADS, "COLUMNS": COLUMNS, "num_warps": NUM_WARPS}


def aligned(size: int) -> int:
    """The smallest multiple of ALIGNMENT that is not below the size."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def scale_reference(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale, float32 of shape (), of a tensor whose greatest absolute value is `amax`, float32 of shape ()."""
    mantissa, exponent = torch.frexp(amax.float())  # amax = mantissa * 2 ** exponent, mantissa in [1/2, 1)
    exponent = exponent - 1 - MAX_EXPONENT[dtype] + (mantissa > 0.875)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent.clamp(-126, 126))
    return torch.where(amax.isfinite(), scale, torch.nan)


@triton.jit
def scale_and_inverse(amax_bits, MAX_EXPONENT: tl.constexpr):
    """The scale and its inverse, float32, from the bits of a float32 amax, an int32."""
    exponent = (amax_bits >> 23) - MAX_EXPONENT + ((amax_bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(amax_bits < 0x7F800000, scale, float("nan")), inverse


@triton.jit
def bits_of_max(values):
    """The bits of max|values|, an int32, which order as the numbers do."""
    return tl.max(tl.abs(values.to(tl.float32))).to(tl.int32, bitcast=True)


@triton.jit
def _byte(values, inverse, MAX_EXPONENT: tl.constexpr):
    """float32 values / scale as the bytes of float8."""
    scaled = values * inverse
    q = scaled.to(tl.float8e4nv) if MAX_EXPONENT == 8 else scaled.to(tl.float8e5)
    return q.to(tl.uint8, bitcast=True)


@triton.jit
def _store_row(rows, byte, row, col, M, N):
    tl.store(rows + row[:, None] * N + col[None, :], byte, mask=(row < M)[:, None] & (col < N)[None, :])


@triton.jit
def store_float8(
    v0, v1, v2, v3, inverse, rows, words, first_row, col, M, N, W,
    MAX_EXPONENT: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """Stores a tile of values, float32, of which vj has the rows first_row + 4 i + j, zeros beyond M and N.

    rows: uint8 (M, N), stored if ROWS. words: int32 (N, W), stored if WORDS: word i of a column holds its rows 4 i to
    4 i + 3, so that as bytes it is the transposed (N, 4 W). The four rows are put together in registers: transposing
    single bytes went wrong on Triton 3.6, and is slower."""
    quad = first_row + 4 * tl.arange(0, QUADS)
    b0 = _byte(v0, inverse, MAX_EXPONENT)
    b1 = _byte(v1, inverse, MAX_EXPONENT)
    b2 = _byte(v2, inverse, MAX_EXPONENT)
    b3 = _byte(v3, inverse, MAX_EXPONENT)
    if ROWS:
        _store_row(rows, b0, quad, col, M, N)
        _store_row(rows, b1, quad + 1, col, M, N)
        _store_row(rows, b2, quad + 2, col, M, N)
        _store_row(rows, b3, quad + 3, col, M, N)
    if WORDS:
        word = b0.to(tl.int32) | (b1.to(tl.int32) << 8) | (b2.to(tl.int32) << 16) | (b3.to(tl.int32) << 24)
        place = first_row // 4 + tl.arange(0, QUADS)
        inside = (col < N)[:, None] & (place < W)[None, :]
        tl.store(words + col.to(tl.int64)[:, None] * W + place[None, :], tl.trans(word), mask=inside)
