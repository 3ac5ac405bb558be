"""Tensors in 8 bits per element, with a scale for each block: states of optimizers (Dettmers et al., 2022,
https://arxiv.org/abs/2110.02861).

A block is 256 neighbours of the last dimension, so that a shard of the other dimensions holds whole blocks. Its scale
is its largest absolute value. A code is a small float, as in torchao's AdamWFp8 and in COAT (Xi et al., 2024,
https://arxiv.org/abs/2410.19313), which store both moments in E4M3 with scales for groups:

- FIRST (AdamW's first moments): a sign, 4 exponent bits and, as E4M3, 3 mantissa bits, so that neighbours differ by at
  most 1/8. Code c is 2^(c // 8) (1 + (c % 8) / 8) - 1 in units of 1 / 61439 of the scale. Zero is exact, and the
  smallest number is 1/491512 of the largest.
- SECOND (AdamW's second moments): 5 exponent bits, 3 mantissa bits, and no zero: AdamW divides by their roots. Code c
  is 2^(c // 8) (1 + (c % 8) / 8), and the smallest number is 2^-31 / 1.875 of the largest. A block of zeros is exact by
  its scale.
- MOMENTUM (Muon): a sign, 2 exponent bits and 5 mantissa bits. Code c is 2^(c // 32) (1 + (c % 32) / 32) - 1 in units
  of 1 / 14.75 of the scale. Newton-Schulz gives small singular values the size of large ones, so the error of the whole
  matrix counts, not that of each number: for normal numbers, rounded to nearest, it is 0.8 % of the norm, with 3
  mantissa bits 2.6 %; rounded stochastically 1.1 % and 3.7 %.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.optimizer.rounding import Shard, random_integers, rounded_reference, shard_rows
from ligermodels.ops.runtime.dispatch import tl, triton

BLOCK_SIZE = 256
ONE = 127 << 23
"""The bits of 1.0 in float32."""
SMALLEST = 1.2e-38
"""A normal number of float32, in place of a scale of zero."""


class Code(NamedTuple):
    """A code of 8 bits; see the module.

    is_signed: whether one bit is a sign.
    mantissa: number of mantissa bits.
    top: the largest number.
    """

    is_signed: bool
    mantissa: int
    top: float

    @property
    def lowest_bit(self) -> int:
        """Position of the lowest mantissa bit in a float32; the bits below it are rounded away."""
        return 23 - self.mantissa


FIRST, SECOND = Code(True, 3, 2**15 * 1.875 - 1), Code(False, 3, 2**31 * 1.875)
MOMENTUM = Code(True, 5, 2**3 * 1.96875 - 1)


class Blockwise(NamedTuple):
    """A tensor in 8 bits per element.

    codes: uint8, of the shape of the tensor.
    scales: float32 (..., blocks), the largest absolute value of each block of BLOCK_SIZE neighbours.
    """

    codes: Tensor
    scales: Tensor


Average = Tensor | Blockwise
"""A running average of an optimizer, also in 8 bits."""


def num_blocks(columns: int) -> int:
    """Blocks along a last dimension of this size."""
    return -(-columns // BLOCK_SIZE)


def encode(x: Tensor, code: Code, draws: Tensor | None = None) -> Blockwise:
    """x in 8 bits per element.

    Args:
        x: (..., columns), any floating dtype; not negative for SECOND.
        code: FIRST, SECOND or MOMENTUM.
        draws: integers from 0 to 255, of the shape of x, for stochastic rounding; None rounds to nearest.

    Returns:
        Codes and scales.
    """
    blocks = _blocks(x.float())
    scales = blocks.abs().amax(-1)
    y = blocks.abs() / scales.clamp(min=SMALLEST)[..., None] * code.top
    bits = (1 + y if code.is_signed else y.clamp(min=1)).view(torch.int32) - ONE
    unit = 1 << code.lowest_bit
    noise = unit // 2 if draws is None else _blocks(draws.int()) * (unit // 256) + unit // 512
    codes = (bits + noise >> code.lowest_bit).clamp(0, 127 if code.is_signed else 255)
    if code.is_signed:
        codes = torch.where(blocks < 0, codes + 128, codes)
    return Blockwise(codes.flatten(-2)[..., : x.shape[-1]].to(torch.uint8), scales)


def decode(state: Blockwise, code: Code) -> Tensor:
    """The numbers of `state`, float32. `code`: FIRST, SECOND or MOMENTUM."""
    codes = _blocks(state.codes.int())
    magnitude = ((codes & 127 if code.is_signed else codes) * 2**code.lowest_bit + ONE).view(torch.float32)
    y = (magnitude - 1 if code.is_signed else magnitude) / code.top
    if code.is_signed:
        y = torch.where(codes > 127, -y, y)
    return (y * state.scales[..., None]).flatten(-2)[..., : state.codes.shape[-1]].contiguous()


def _blocks(x: Tensor) -> Tensor:
    """(..., columns) -> (..., blocks, BLOCK_SIZE), with zeros after the last column."""
    return F.pad(x, (0, -x.shape[-1] % BLOCK_SIZE)).unflatten(-1, (num_blocks(x.shape[-1]), BLOCK_SIZE))


def check_blockwise(op: str, name: str, state: Blockwise, parameter: Tensor) -> None:
    """Raise InputError unless `state` holds a tensor of the shape of `parameter`; messages name `op` and `name`."""
    shapes = parameter.shape, (*parameter.shape[:-1], num_blocks(parameter.shape[-1]) if parameter.ndim else 1)
    for part, x, shape, dtype in zip(("codes", "scales"), state, shapes, (torch.uint8, torch.float32), strict=True):
        if x.shape != shape or x.dtype != dtype or x.device != parameter.device:
            raise InputError(
                f"{op}: {name}.{part} must be {dtype} of shape {tuple(shape)} on {parameter.device}, is {x.dtype} of "
                f"shape {tuple(x.shape)} on {x.device}"
            )


def launch_blocks(
    launched: Any, op: str, tensors: Sequence[Any], numbers: Sequence[Tensor | float], key: Any, shard: Shard | None
) -> None:
    """Launch a kernel on tensors and 8-bit states of one shape, with eight blocks of each per program.

    Args:
        launched: the kernel; its arguments are the tensors, `columns, blocks, count, size, first, apart` (see
            `_adamw8_step_kernel`), the numbers and the key.
        op: name of the op, for error messages.
        tensors: tensors and `Blockwise` states; the first is a tensor.
        numbers: numbers, or a tensor of some of them in place of the first.
        key: key of stochastic rounding, an int or a tensor of it; None rounds to nearest.
        shard: which part of the whole tensor the first tensor is; None if it is the whole.
    """
    like = tensors[0]
    columns, blocks = like.shape[-1], num_blocks(like.shape[-1])
    sizes = (*like.shape[:-1], blocks)
    if shard is not None:  # in units of blocks
        shape, starts = shard
        if starts[-1] % BLOCK_SIZE:
            raise InputError(f"{op}: shard: must begin at a multiple of {BLOCK_SIZE} columns, begins at {starts[-1]}")
        shard = Shard((*shape[:-1], num_blocks(shape[-1])), (*starts[:-1], starts[-1] // BLOCK_SIZE))
    first, size, distance = shard_rows(op, None if key is None else shard, sizes)
    count = like.numel() // columns * blocks
    in_memory = isinstance(numbers[0], Tensor) or isinstance(key, Tensor)
    flat = [x for tensor in tensors for x in (tensor if isinstance(tensor, Blockwise) else (tensor,))]
    with torch.cuda.device_of(like):
        launched[(-(-count // 8),)](
            *flat, columns, blocks, count, size, first, distance, *numbers, 0 if key is None else key,
            STOCHASTIC=key is not None, IN_MEMORY=in_memory, num_warps=8,
        )  # fmt: skip


def store(
    target: Average, x: Tensor, generator: torch.Generator | None, shard: Shard | None, code: Code = FIRST
) -> None:
    """Write x to a tensor or to 8 bits.

    Args:
        target: the tensor or the state.
        x: the numbers, of its shape.
        generator: random bits for stochastic rounding to bfloat16 or to codes; None rounds to nearest.
        shard: which part of the whole tensor x is; None if it is the whole.
        code: the code of a state.
    """
    if isinstance(target, Blockwise):
        draws = None if generator is None else random_integers(generator, x, shard, 256)
        for part, value in zip(target, encode(x, code, draws), strict=True):
            part.copy_(value)
    elif generator is not None and target.dtype == torch.bfloat16:
        target.copy_(rounded_reference(x, generator, shard))
    else:
        target.copy_(x)


@triton.jit
def encode_blocks(
    x, draws, SIGNED: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr, STOCHASTIC: tl.constexpr
) -> Any:
    """`encode` in a kernel.

    Args:
        x: blocks (n, BLOCK_SIZE), float32.
        draws: integers from 0 to 255, of the shape of x; read with STOCHASTIC.
        SIGNED, MANTISSA, TOP: the code, see `Code`.
        STOCHASTIC: whether codes are rounded by `draws`; otherwise to nearest.

    Returns:
        Codes, int32, and scales (n,).
    """
    scales = tl.max(tl.abs(x), axis=1)
    y = tl.div_rn(tl.abs(x), tl.maximum(scales, 1.2e-38)[:, None])
    z = 1.0 + y * TOP if SIGNED else tl.maximum(y * TOP, 1.0)
    bits = z.to(tl.int32, bitcast=True) - 1065353216
    noise = draws.to(tl.int32) * (1 << 15 - MANTISSA) + (1 << 14 - MANTISSA) if STOCHASTIC else 1 << 22 - MANTISSA
    codes = tl.maximum((bits + noise) >> 23 - MANTISSA, 0)
    if SIGNED:
        codes = tl.minimum(codes, 127)
        codes = tl.where(x < 0, codes + 128, codes)
    else:
        codes = tl.minimum(codes, 255)
    return codes, scales


@triton.jit
def decode_blocks(codes, scales, SIGNED: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr) -> Any:
    """`decode` in a kernel.

    Args:
        codes: uint8 (n, BLOCK_SIZE).
        scales: float32 (n,).
        SIGNED, MANTISSA, TOP: the code, see `Code`.

    Returns:
        The numbers, float32 (n, BLOCK_SIZE).
    """
    codes = codes.to(tl.int32)
    if SIGNED:
        y = tl.div_rn(((codes & 127) * (1 << 23 - MANTISSA) + 1065353216).to(tl.float32, bitcast=True) - 1.0, TOP)
        y = tl.where(codes > 127, -y, y)
    else:
        y = tl.div_rn((codes * (1 << 23 - MANTISSA) + 1065353216).to(tl.float32, bitcast=True), TOP)
    return y * scales[:, None]


@triton.jit
def tile(columns, blocks, count) -> Any:
    """The eight blocks of this program.

    Args:
        columns: columns of the tensor.
        blocks: blocks per row.
        count: blocks of the tensor.

    Returns:
        Numbers of the blocks (8,), indices of their elements (8, 256), and whether an index is in the tensor (8, 256).
    """
    b = tl.program_id(0).to(tl.int64) * 8 + tl.arange(0, 8)
    column = (b % blocks)[:, None] * 256 + tl.arange(0, 256)[None, :]
    return b, (b // blocks)[:, None] * columns + column, (column < columns) & (b < count)[:, None]


@triton.jit
def tile_words(key, b, size, first, apart, STOCHASTIC: tl.constexpr) -> Any:
    """Random words of 32 bits for the elements of blocks, the same in a shard as in the whole tensor.

    Args:
        key: key of the random words.
        b: numbers of the blocks (8,).
        size: blocks per row, where a row is contiguous in the whole tensor.
        first: number of the first block in the whole tensor.
        apart: distance between starts of rows in the whole tensor, in blocks.
        STOCHASTIC: whether words are needed.

    Returns:
        Words (8, 256), uint32; zeros without STOCHASTIC. Philox gives four words for each counter.
    """
    if STOCHASTIC:
        whole = first + b // size * apart + b % size
        w, x, y, z = tl.randint4x(key, whole[:, None] * 64 + tl.arange(0, 64)[None, :])
        return tl.reshape(tl.join(tl.join(w, x), tl.join(y, z)), (8, 256))
    else:
        return tl.zeros((8, 256), tl.uint32)
