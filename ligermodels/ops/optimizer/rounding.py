"""Stochastic rounding to bfloat16, with the same random bits for an element in a shard as in the whole tensor."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.runtime.dispatch import tl, triton

BLOCK = 2048
"""Elements of a program."""


class Shard(NamedTuple):
    """Which part of a whole tensor a shard is: shape of the whole, and index in it of the shard's first element."""

    shape: Sequence[int]
    starts: Sequence[int]


def rounding_key(seeds: Sequence[int], step: int) -> int:
    """The key of the random bits of stochastic rounding: an odd number of 63 bits, so that Triton compiles one kernel
    for all keys."""
    digest = hashlib.blake2b(repr((*seeds, step)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 | 1 << 62 | 1


def shard_rows(name: str, shard: Shard | None, sizes: Sequence[int]) -> tuple[int, int, int]:
    """A shard as rows of elements that are contiguous in the whole tensor.

    Args:
        name: the op, for error messages.
        shard: which part of the whole it is; None for the whole.
        sizes: shape of the shard.

    Returns:
        The index of its first element in the whole, the length of a row, and the distance between starts of rows in the
        whole (0 for a single row).

    Raises:
        InputError: the shard is divided in other dimensions than the first and one more.
    """
    if shard is None:
        return 0, math.prod(sizes), 0
    shape, starts = shard
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    divided = [dim for dim in range(len(shape)) if sizes[dim] != shape[dim]]
    outer = next((dim for dim in range(len(shape)) if sizes[dim] != 1), 0)
    inner = max(divided, default=0)
    if [dim for dim in divided if outer < dim < inner]:
        raise InputError(
            f"{name}: shard: {tuple(sizes)} of {tuple(shape)} is divided in dimensions {divided}; shard only the "
            "first and one other dimension, or round to nearest"
        )
    size = math.prod(sizes[inner:])
    return first, size, 0 if size == math.prod(sizes) else math.prod(shape[inner:])


def elements(parameter: Tensor, shard: Shard | None, op: str) -> tuple[int, int, int, int, bool]:
    """How the programs of a kernel go through a parameter.

    Args:
        parameter: the parameter, or this rank's shard of it.
        shard: which part of the whole parameter it is; None if it is the whole.
        op: name of the op, for error messages.

    Returns:
        The three results of `shard_rows`, the number of programs per row, and whether rows begin at multiples of four
        elements of the whole tensor.
    """
    first, size, distance = shard_rows(op, shard, parameter.shape)
    aligned = first % 4 == 0 and distance % 4 == 0
    return first, size, distance, -(-(size if aligned else size + 3) // BLOCK), aligned


def random_integers(generator: torch.Generator, like: Tensor, shard: Shard | None, end: int) -> Tensor:
    """Random integers, the same for an element in a shard as in the whole tensor.

    Args:
        generator: the generator.
        like: a tensor of the shape and device of the result.
        shard: which part of the whole tensor it is; None if it is the whole.
        end: the integers are from 0 to end - 1.

    Returns:
        Integers, int32.
    """
    shape, starts = (like.shape, [0] * like.ndim) if shard is None else shard
    draws = torch.randint(end, tuple(shape), generator=generator, device=like.device, dtype=torch.int32)
    for dim, (start, size) in enumerate(zip(starts, like.shape, strict=True)):
        draws = draws.narrow(dim, start, size)
    return draws


def rounded_reference(x: Tensor, generator: torch.Generator, shard: Shard | None) -> Tensor:
    """x rounded stochastically to bfloat16: a random number of 16 bits is added, then the last 16 bits are cleared.

    Args:
        x: the numbers, any floating dtype.
        generator: random bits.
        shard: which part of the whole tensor x is; None if it is the whole.

    Returns:
        The rounded numbers, float32.
    """
    draws = random_integers(generator, x, shard, 2**16)
    rounded = (x.float().view(torch.int32) + draws >> 16 << 16).view(torch.float32)
    return torch.where(x.isnan(), x.float(), rounded)


@triton.jit
def rounded(x, draws) -> Any:
    """The same as `rounded_reference`. NaN is left alone: one with all bits set would overflow."""
    result = ((x.to(tl.uint32, bitcast=True) + draws) >> 16 << 16).to(tl.float32, bitcast=True)
    return tl.where(x == x, result, x)


@triton.jit
def random_words(key, first, COUNT: tl.constexpr) -> Any:
    """Random words of 32 bits.

    Args:
        key: key of Philox.
        first: first counter; each counter gives four words.
        COUNT: number of words.

    Returns:
        Words (COUNT,), uint32.
    """
    a, b, c, d = tl.randint4x(key, first + tl.arange(0, COUNT // 4))
    return tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (COUNT,))
