"""How large the tiles of the attention kernels are, by the width of heads, the dtype and the device's shared memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

MAX_STAGES = 3
MAX_REGISTERS = 200
"""Per thread, for accumulators and scores; of 255, the others are for addresses and operands."""


class Tiles(NamedTuple):
    """The launch of a kernel: queries and keys per tile, warps per program, stages of the pipeline that loads tiles."""

    queries: int
    keys: int
    warps: int
    stages: int


class _Needs(NamedTuple):
    """Needs of a program, as functions of queries and keys per tile, channels of keys, channels of values.

    registers: numbers of 4 bytes in registers.
    fixed: elements in shared memory all the time.
    per_stage: elements in shared memory for each stage of the pipeline.
    launches: queries, keys and warps, in order of preference.
    """

    registers: Callable[[int, int, int, int], int]
    fixed: Callable[[int, int, int, int], int]
    per_stage: Callable[[int, int, int, int], int]
    launches: tuple[tuple[int, int, int], ...]


_NEEDS = {
    "forward": _Needs(
        registers=lambda q, k, d, v: q * (v + k + k // 2),  # accumulator, scores, weights
        fixed=lambda q, k, d, v: q * d,
        per_stage=lambda q, k, d, v: k * (d + v),
        launches=((128, 128, 8), (128, 64, 8), (64, 64, 4), (64, 32, 8), (32, 32, 4)),
    ),
    "batch_invariant": _Needs(  # small, because decoding has them too
        registers=lambda q, k, d, v: q * (v + k + k // 2),
        fixed=lambda q, k, d, v: q * d,
        per_stage=lambda q, k, d, v: k * (d + v),
        launches=((64, 64, 4), (64, 32, 8), (32, 32, 4)),
    ),
    "query_gradient": _Needs(
        registers=lambda q, k, d, v: q * (d + 2 * k),
        fixed=lambda q, k, d, v: q * (d + v),
        per_stage=lambda q, k, d, v: k * (d + v),
        launches=((128, 64, 8), (64, 64, 4), (64, 32, 8), (32, 32, 4)),
    ),
    "key_gradient": _Needs(
        registers=lambda q, k, d, v: k * (d + v + 3 * q),  # accumulators, scores, weights, gradients of scores
        fixed=lambda q, k, d, v: k * (d + v),
        per_stage=lambda q, k, d, v: q * (d + v),
        launches=((64, 64, 4), (32, 64, 4), (64, 64, 8), (32, 32, 8), (32, 32, 4)),
    ),
}
_IN_FLOAT32 = ((32, 32, 8),)  # no tensor cores: operands need registers too
SMALLEST = Tiles(16, 16, 4, 1)


@cache
def tile_options(kernel: str, dim: int, value_dim: int, itemsize: int, memory: int) -> tuple[Tiles, ...]:
    """The launches of a kernel that are likely to fit in registers and shared memory, in order of preference.

    The need is an estimate: compilers for some GPUs copy tiles. So a launch that does not fit is followed by launches
    with fewer stages, and then by smaller tiles.

    Args:
        kernel: "forward", "query_gradient" or "key_gradient"; or "batch_invariant", whose tiles have one size, because
            calls with other arguments must sum alike.
        dim: channels of a tile of queries or keys, a power of 2.
        value_dim: channels of a tile of values, a power of 2.
        itemsize: bytes per element.
        memory: bytes of shared memory that a program may use.
    """
    needs, options = _NEEDS[kernel], []
    for queries, keys, warps in needs.launches if itemsize < 4 else _IN_FLOAT32:
        sizes = queries, keys, dim, value_dim
        stages = (memory // itemsize - needs.fixed(*sizes)) // needs.per_stage(*sizes)
        if needs.registers(*sizes) <= MAX_REGISTERS * 32 * warps:
            options += [Tiles(queries, keys, warps, n) for n in range(min(stages, MAX_STAGES), 0, -1)]
    if kernel == "batch_invariant" and options:
        return tuple(tiles for tiles in options if tiles[:3] == options[0][:3])
    return (*options, SMALLEST)
