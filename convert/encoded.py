"""Tensors that are stored in few bits per element, with scales: FP8 and MXFP4."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ligermodels.convert.safetensors_reader import Checkpoint, Header
from ligermodels.convert.weight_map import raise_faults

E8M0 = torch.float8_e8m0fnu
"""Dtype of scales: byte b has the value 2^(b - 127). Many files declare it as uint8."""


class Encoded(Protocol):
    """A quantised tensor of `shape` (..., rows, columns), stored in the checkpoint tensors named in `stored`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stored(self) -> Sequence[str]: ...
    def decode(self, files: Checkpoint, matrix: int, first: int, last: int) -> Tensor:
        """Rows `first` to `last` of matrix number `matrix`, read from `files`: float32 (last - first, columns)."""
        ...


class Part(NamedTuple):
    """Codes or scales of a quantised tensor, as a tensor of this `shape`; `read` has the arguments of `decode`."""

    shape: tuple[int, ...]
    stored: Sequence[str]
    read: Callable[[Checkpoint, int, int, int], Tensor]

    def decode(self, files: Checkpoint, matrix: int, first: int, last: int) -> Tensor:
        return self.read(files, matrix, first, last)


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the matrices in a tensor of this shape."""
    rows, columns = (1, 1, *shape)[-2:]
    return rows, columns


def look_up(table: Tensor, codes: Tensor) -> Tensor:
    """`table[codes]` for codes of one byte. On a CPU it is five times as fast as torch's cast of FP8 to float32."""
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def as_float(scales: Tensor) -> Tensor:
    """`scales` in float32; uint8 is read as E8M0."""
    return scales.view(E8M0).float() if scales.dtype == torch.uint8 else scales.float()


def check_dtype(name: str, header: Header, known: Sequence[torch.dtype], faults: defaultdict[str, list[str]]) -> None:
    """Add an entry to `faults` unless the `header` of tensor `name` has one of the dtypes `known`."""
    if header.dtype not in known:
        faults["of a dtype that scales and blocks do not have"].append(f"{name} {str(header.dtype)[6:]}")


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


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 codes (OCP Microscaling Formats, E2M1)."""
FP4_BLOCK = 32
"""Elements with one scale; they take 16 bytes."""


class MXFP4(NamedTuple):
    """Matrices that are stored by columns, in blocks of 32 elements of one column (gpt_oss).

    Args:
        shape: (..., rows, columns).
        blocks: checkpoint tensor of the codes, uint8 (..., columns, rows / 32, 16): two elements per byte, the first in
            the low bits.
        scales: checkpoint tensor of the scales, uint8 (..., columns, rows / 32).
    """

    shape: tuple[int, ...]
    blocks: str
    scales: str

    @property
    def stored(self) -> Sequence[str]:
        return self.blocks, self.scales

    def decode(self, files: Checkpoint, matrix: int, first: int, last: int) -> Tensor:
        start, end = first // FP4_BLOCK, -(-last // FP4_BLOCK)
        scales = as_float(self._scales(files, matrix, start, end))
        values = look_up(torch.tensor(FP4, device="cpu"), self._codes(files, matrix, start, end))
        return values.mul_(scales[..., None]).flatten(1).T[first - start * FP4_BLOCK :][: last - first]

    def parts(self) -> tuple[Part, Part]:
        """The codes, one per byte, and the scales (..., rows / 32, columns), both uint8."""
        *lead, rows, columns = self.shape

        def codes(files: Checkpoint, matrix: int, first: int, last: int) -> Tensor:
            start = first // FP4_BLOCK
            blocks = self._codes(files, matrix, start, -(-last // FP4_BLOCK))
            return blocks.flatten(1).T[first - start * FP4_BLOCK :][: last - first]

        def scales(files: Checkpoint, matrix: int, first: int, last: int) -> Tensor:
            return self._scales(files, matrix, first, last).T

        shape = (*lead, rows // FP4_BLOCK, columns)
        return Part(self.shape, self.stored, codes), Part(shape, self.stored, scales)

    def _codes(self, files: Checkpoint, matrix: int, start: int, end: int) -> Tensor:
        """The codes of the blocks of rows `start` to `end` of a matrix: uint8 (columns, end - start, 32)."""
        rows, columns = matrix_of(self.shape)
        blocks = files.read(self.blocks).view(-1, columns, rows // FP4_BLOCK, FP4_BLOCK // 2)[matrix, :, start:end]
        return torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(2)

    def _scales(self, files: Checkpoint, matrix: int, start: int, end: int) -> Tensor:
        """The scales of the blocks of rows `start` to `end` of a matrix: uint8 (columns, end - start)."""
        rows, columns = matrix_of(self.shape)
        return files.read(self.scales).view(-1, columns, rows // FP4_BLOCK)[matrix, :, start:end]


def mxfp4_tensors(files: Checkpoint, block: tuple[int, int] | None) -> dict[str, Encoded]:
    """Name X -> MXFP4 tensor, for all pairs X_blocks and X_scales of a checkpoint. `block` is not used: blocks have 32.

    Raises:
        CheckpointError: blocks without scales or the reverse, wrong dtypes, or shapes that do not match; the message
            lists all of them.
    """
    headers = files.headers
    tensors: dict[str, Encoded] = {}
    faults: defaultdict[str, list[str]] = defaultdict(list)
    ends = ("_blocks", "_scales")
    for name in dict.fromkeys(name.removesuffix(end) for name in headers for end in ends if name.endswith(end)):
        pair = [name + end for end in ends]
        if missing := [stored for stored in pair if stored not in headers]:
            faults["missing from the checkpoint"] += missing
            continue
        for stored in pair:
            check_dtype(stored, headers[stored], (torch.uint8,), faults)
        blocks, scales = (headers[stored].shape for stored in pair)
        if len(blocks) < 3 or blocks != (*scales, FP4_BLOCK // 2):
            faults["of shapes that do not match"].append(f"{pair[0]} {list(blocks)} and {pair[1]} {list(scales)}")
        else:
            *lead, columns, groups = scales
            tensors[name] = MXFP4((*lead, groups * FP4_BLOCK, columns), *pair)
    raise_faults("the checkpoint's mxfp4 blocks and scales do not match", faults)
    return tensors
