"""How large the tiles of the experts' kernels are, by the dtype, the mean rows of an expert and the shared memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from ligermodels.ops.runtime.dispatch import OutOfResources, num_sms, power_of_2_above, shared_memory

FEWEST_ROWS = 16
"""Rows of the smallest tile of a product by tensor cores."""
FEWEST_STAGES = 3
"""Stages that the preferred launches have at least."""
LARGEST = 256
"""Most rows of a tile."""
ALIGNED = 16
"""Triton loads 16 bytes at once where rows have multiples of so many elements."""


class Tiles(NamedTuple):
    """A launch: rows and columns of a tile, length of a step along the summed dimension, warps, stages of the pipeline,
    tiles of rows that take turns for each tile of columns, and programs per multiprocessor (0: one per tile)."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    group: int = 8
    persistent: int = 1


TILES: dict[str, tuple[Tiles, ...]] = {
    "gate_up": (
        Tiles(128, 256, 64, 8, 3),
        Tiles(128, 128, 64, 8, 4),
        Tiles(128, 128, 32, 8, 4),
        Tiles(64, 128, 32, 4, 3),
    ),
    "product": (
        Tiles(128, 256, 64, 8, 4),
        Tiles(128, 128, 64, 8, 4),
        Tiles(128, 128, 32, 8, 4),
        Tiles(64, 128, 32, 4, 3),
    ),
    "transposed_product": (
        Tiles(128, 256, 64, 8, 4, group=16, persistent=0),
        Tiles(128, 128, 64, 8, 4),
        Tiles(128, 128, 32, 8, 4),
        Tiles(64, 128, 32, 4, 3),
    ),
    "down_gradient": (
        Tiles(64, 128, 64, 4, 4, persistent=2),
        Tiles(128, 128, 64, 8, 4),
        Tiles(128, 128, 32, 8, 4),
        Tiles(64, 128, 32, 8, 3),
    ),
    "outer": (
        Tiles(128, 256, 64, 8, 5),
        Tiles(128, 128, 64, 8, 6),
        Tiles(128, 128, 32, 8, 6),
        Tiles(64, 128, 32, 4, 5),
    ),
    "float8_gate_up": (Tiles(128, 256, 128, 8, 4), Tiles(64, 256, 64, 8, 4), Tiles(16, 256, 64, 8, 2)),
    "float8_product": (Tiles(128, 128, 128, 8, 4), Tiles(64, 64, 128, 4, 3), Tiles(16, 64, 128, 4, 2)),
    "float8_down_gradient": (Tiles(128, 128, 128, 8, 4), Tiles(64, 128, 64, 8, 4), Tiles(16, 128, 64, 8, 2)),
    "unaligned": (Tiles(64, 64, 64, 4, 2),),
}
"""Kernel -> its launches in 16 bits, in order of preference; the first one that fits is used. "transposed_product" is
"product" with weights that are contiguous along their output channels, as for the gradient of x. "unaligned" has those
of all kernels for sizes that are no multiples of 16, whose operands are loaded element by element. In float8,
blocks of 128 elements have scales: as many as half of the columns of "gate_up", a step of "product", and the columns of
"down_gradient".

Where there is WGMMA, and shared memory enough for the first launch, steps are 64: rows of all operands in shared memory
have 128 bytes or more, so that all are swizzled alike. (ptxas of CUDA 12.8 computes wrong descriptors where operands of
different swizzling take turns in one memory.)"""
IN_FLOAT32 = (Tiles(64, 64, 32, 8, 2), Tiles(32, 32, 32, 4, 1))
"""Launches in float32: no tensor cores, so operands need registers too."""
SMALLEST = (Tiles(32, 64, 64, 4, 2), Tiles(16, 32, 32, 4, 1))
"""The last launches that are tried."""

_too_large: dict[tuple[Any, ...], int] = {}
"""Number of the first options that a device has not the resources for; by kernel, device and the options."""


def _launches(name: str, itemsize: int) -> tuple[Tiles, ...]:
    if itemsize == 1:
        return TILES[name]
    return IN_FLOAT32 if itemsize == 4 else (*TILES[name], *SMALLEST)


@cache
def tile_options(name: str, itemsize: int, memory: int, most_rows: int) -> tuple[Tiles, ...]:
    """The launches of a kernel that are likely to fit in shared memory, in order of preference.

    The need is an estimate: a launch that does not fit is followed by launches with fewer stages and smaller tiles.

    Args:
        name: a key of TILES.
        itemsize: bytes per element.
        memory: bytes of shared memory that a program may use.
        most_rows: most rows of a tile.
    """
    ahead = 2 if name == "outer" else 0  # stages that load indices, before rows
    options = []
    for fewest in (FEWEST_STAGES + ahead, 1):
        for tiles in _launches(name, itemsize):
            tiles = tiles._replace(rows=min(tiles.rows, most_rows))
            stage = (tiles.rows + tiles.columns) * tiles.step * itemsize
            stages = min(tiles.stages, memory // stage + ahead)
            options += [tiles._replace(stages=n) for n in range(stages, fewest - 1, -1)]
    return tuple(dict.fromkeys(options))


def launch_tiles(
    name: str, launch: Callable[[Tiles], None], like: Tensor, sizes: tuple[int, ...], mean_rows: int | None = None
) -> None:
    """Launch a kernel with the first tiles for which the device has the resources.

    Args:
        name: of the kernel, a key of TILES.
        launch: launches the kernel with tiles.
        like: an operand; its dtype and device count.
        sizes: lengths of the rows of the operands.
        mean_rows: mean rows of an expert: tiles have no more rows, rounded up to a power of two. None for any.
    """
    name = "unaligned" if any(size % ALIGNED for size in sizes) else name
    most_rows = LARGEST if mean_rows is None else max(power_of_2_above(mean_rows), FEWEST_ROWS)
    options = tile_options(name, like.element_size(), shared_memory(like.device), most_rows)
    key = name, like.dtype, like.device, options
    while True:
        tiles = options[_too_large.get(key, 0)]
        try:
            launch(tiles)
            return
        except OutOfResources:
            if tiles is options[-1]:
                raise
            _too_large[key] = _too_large.get(key, 0) + 1


def programs(tiles: Tiles, count: int, like: Tensor) -> tuple[int]:
    """The grid for `count` tiles on the device of `like`."""
    return (min(count, tiles.persistent * num_sms(like.device)) if tiles.persistent else count,)
