"""Tensors in FP8 with one scale per tensor, per row or per block."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.convert.encoded import E8M0, Encoded, as_float, check_dtype, look_up, matrix_of
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.weight_map import raise_faults

FP8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
SCALES = ("_scale_inv", "_scale")
"""Suffixes of the names of scales. Both kinds are factors of the weights, despite the name of the first."""
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, E8M0)


class ScaledFP8(NamedTuple):
    """A tensor in FP8 whose blocks each have a scale. Blocks at the end may be smaller.

    Args:
        shape: shape of the tensor.
        name: checkpoint tensor with the FP8 numbers.
        scale: checkpoint tensor with the scales: one for each block of each matrix, or one for all matrices.
        block: rows and columns of a block.
    """

    shape: tuple[int, ...]
    name: str
    scale: str
    block: tuple[int, int]

    @property
    def stored(self) -> Sequence[str]:
        return self.name, self.scale

    def decode(self, files: Checkpoint, matrix: int, first: int, last: int) -> Tensor:
        rows, columns = matrix_of(self.shape)
        start, count = (matrix * rows + first) * columns, (last - first) * columns
        stored = files.read_slice(self.name, start, count)
        values = look_up(_fp8(stored.dtype), stored.view(torch.uint8)).view(-1, columns)
        grid, high, wide = files.read(self.scale).reshape(-1, *_grid(self.shape, self.block)), *self.block
        top = first // high
        scales = as_float(grid[matrix % len(grid)][top : -(-last // high)])
        scales = scales[torch.arange(first, last, device="cpu") // high - top]
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(wide, dim=1)[:, :columns]
        return values.mul_(scales)


def fp8_tensors(files: Checkpoint, block: tuple[int, int] | None) -> dict[str, Encoded]:
    """Name -> FP8 tensor, for all FP8 tensors of a checkpoint.

    Args:
        files: the checkpoint.
        block: rows and columns of a block; None to take them from the scales' shapes.

    Raises:
        CheckpointError: tensors without scales, scales without a tensor, or scales of a wrong shape or dtype; the
            message lists all of them.
    """
    headers = files.headers
    tensors: dict[str, Encoded] = {}
    faults: defaultdict[str, list[str]] = defaultdict(list)
    used = set()
    for name, header in headers.items():
        if header.dtype not in FP8 or name.endswith(SCALES):
            continue
        scale = next((name + suffix for suffix in SCALES if name + suffix in headers), None)
        if scale is None:
            faults[f"in FP8 without scales, which are called ...{' or ...'.join(SCALES)}"].append(name)
            continue
        used.add(scale)
        check_dtype(scale, headers[scale], SCALE_DTYPES, faults)
        size = _block_of(header.shape, headers[scale].shape, block)
        if size is None:
            shapes = f"{scale} {list(headers[scale].shape)} of {name} {list(header.shape)}"
            faults["scales of the wrong shape"].append(shapes + (f" in blocks of {list(block)}" if block else ""))
        else:
            tensors[name] = ScaledFP8(header.shape, name, scale, size)
    scales = {name for name in headers if name.endswith(("_scale_inv", ".weight_scale"))}
    faults["scales without a tensor in FP8"] = sorted(scales - used)
    raise_faults("the checkpoint's FP8 tensors and scales do not match", faults)
    return tensors


def _block_of(shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows and columns of a block; None if `scales`, the shape of the scales, does not fit the tensor's `shape`.

    Without a `block` in the config, the matrix is divided evenly by the number of scales, as in transformers."""
    rows, columns = matrix_of(shape)
    if block is None and len(scales) > 1 and all(scales) and not (rows % scales[-2] or columns % scales[-1]):
        block = max(rows // scales[-2], 1), max(columns // scales[-1], 1)
    if block is not None and scales == (*shape[:-2], *_grid(shape, block)):
        return block
    return (max(rows, 1), max(columns, 1)) if math.prod(scales) == 1 or scales == shape[:-2] else None


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Number of blocks along the rows and along the columns."""
    rows, columns = matrix_of(shape)
    return -(-rows // block[0]), -(-columns // block[1])


@cache
def _fp8(dtype: torch.dtype) -> Tensor:
    """The value of each byte in an FP8 dtype: float32 (256,)."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()
