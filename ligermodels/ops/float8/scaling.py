"""The two float8 formats, their scales, and the store of a tile as float8 in either layout.

A tensor x is stored as float8 values q and a float32 scale on the device, one per tensor or one per row: x is about
q * scale. The scale is the smallest power of two for which max|x| does not overflow. Dividing by it is exact, so the
only error is the rounding to the format: E4M3 keeps 4 significant bits, E5M2 keeps 3. If x has an infinity, or the
maximum is NaN, the scale is NaN, and so are all values computed from x.
"""

import torch
from torch import Tensor

from ligermodels.errors import BackendError, InputError
from ligermodels.ops.runtime.devices import gpu_of
from ligermodels.ops.runtime.dispatch import IN_INTERPRETER, tl, triton, use_kernels
from ligermodels.ops.runtime.tensors import count_rows

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MAX_EXPONENT = {E4M3: 8, E5M2: 15}  # the largest number is 1.75 * 2 ** MAX_EXPONENT: 448, 57344
ALIGNMENT = 16  # elements: matrix products in hardware need a multiple of this in the dimension that is summed over

QUADS = 32  # groups of four rows in a tile; four rows share a word of 32 bits in the transposed layout
COLUMNS = 64  # columns of a tile
TILE_ROWS = 4 * QUADS
TILE = {"QUADS": QUADS, "COLUMNS": COLUMNS, "num_warps": 4}


def float8_unsupported(device: torch.device) -> str | None:
    """The reason why float8 linear layers cannot run on a device, or None.

    GPUs need compute capability 8.9 or higher; AMD's earlier GPUs have other float8 formats. On the CPU the layers run
    slowly, by the specification."""
    gpu = gpu_of(device)
    if gpu is None:
        return None if device.type in ("cpu", "meta") else f"float8 needs a CUDA device, not {device}"
    if gpu.has_float8:
        return None
    if gpu.hip:
        return f"{gpu.name} is an AMD GPU; float8 needs an NVIDIA GPU of compute capability 8.9 or higher"
    return f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}; float8 needs 8.9 or higher"


def check_float8_device(op: str, device: torch.device) -> None:
    """Raise BackendError, naming `op` and the GPU, if float8 cannot run on the device."""
    if (reason := float8_unsupported(device)) is not None:
        raise BackendError(f"{op}: {reason}")


def check_float8_dtype(op: str, name: str, dtype: torch.dtype) -> None:
    """Raise InputError, naming `op` and the argument `name`, unless the dtype is one of the two float8 formats."""
    if dtype not in MAX_EXPONENT:
        raise InputError(f"{op}: {name} must be torch.float8_e4m3fn or torch.float8_e5m2, got {dtype}")


def use_float8_kernels(x: Tensor, *others: Tensor | None) -> bool:
    """Whether kernels serve x (..., N) and the others. A single row goes to the reference: for it, code that Triton 3.6
    generated for sm_90 filled the padding of the transposed layout with bytes other than zero."""
    return use_kernels(x, *others) and count_rows(x) > 1


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def scale_reference(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The float32 scale of a tensor with the maximum `amax` of absolute values, float32 (); or the scales of rows."""
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
    """The bits of max|values| as an int32; the bits order like the numbers."""
    return tl.max(tl.abs(values.to(tl.float32))).to(tl.int32, bitcast=True)


@triton.jit
def _word(v0, v1, v2, v3, inverse, MAX_EXPONENT: tl.constexpr):
    """Four float32 values / scale as float8, the first in the lowest byte of an int32.

    No single byte gets a register of its own: with code for them ptxas 12.8 crashed, or lost bytes when they were
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
    """Stores v (QUADS, COLUMNS), float32, times `inverse`, as float8 in the rows `row` of `rows`, from column
    first_col.

    inverse: inverse of the scale, a number or (QUADS, 1). rows: int32 (M, R), `pitch` words from row to row.
    MAX_EXPONENT: of the float8 format."""
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
    """Stores a tile of 4 QUADS rows and COLUMNS columns as float8, from first_row and first_col, in either layout.

    v0, v1, v2, v3: (QUADS, COLUMNS), float32, zeros beyond M and N; vj has the rows first_row + 4 i + j. inverse:
    inverse of the scale. rows: int32 (M, N / 4), `pitch` words from row to row, stored with ROWS; word i of a row holds
    its columns 4 i to 4 i + 3. words: int32 (N, W), stored with WORDS; word i of a column holds its rows 4 i to 4 i +
    3. N: a multiple of 16. MAX_EXPONENT: of the float8 format."""
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
