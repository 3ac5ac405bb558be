"""Tensors that bitsandbytes stores in 4 bits per element (nf4 or fp4), with scales that may be quantised too.

The format is that of QLoRA (https://arxiv.org/abs/2305.14314), sections 3 and E. The 16 values are in the files."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ligermodels.convert.encoded import Encoded, Part, check_dtype, look_up
from ligermodels.convert.json_values import as_object, is_int, is_list_of, is_number
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.weight_map import raise_faults

STATE = ".quant_state.bitsandbytes__"
"""The tensor NAME is quantised if there is a tensor NAME.quant_state.bitsandbytes__TYPE, which holds sizes as JSON."""
LARGEST_STATE = 4096
"""Bytes of that JSON, at most."""


class Scales(NamedTuple):
    """One scale for each block of consecutive elements.

    Args:
        name: checkpoint tensor of the scales: float32, or uint8 codes of 256 values.
        block: elements with one scale.
        table: checkpoint tensor of the 256 values, float32; None for scales in float32.
        outer: checkpoint tensor of the scales of the scales, float32; None for scales in float32.
        outer_block: scales with one outer scale.
        offset: added to the scales.
    """

    name: str
    block: int
    table: str | None = None
    outer: str | None = None
    outer_block: int = 1
    offset: float = 0.0

    @property
    def stored(self) -> Sequence[str]:
        return [name for name in (self.name, self.table, self.outer) if name is not None]

    def decode(self, files: Checkpoint, start: int, end: int) -> Tensor:
        """Scales of the blocks `start` to `end`, read from `files`: float32 (end - start,)."""
        scales = files.read_slice(self.name, start, end - start)
        if self.table is not None and self.outer is not None:
            outer = files.read(self.outer)[torch.arange(start, end, device="cpu") // self.outer_block]
            scales = look_up(files.read(self.table), scales).mul_(outer).add_(self.offset)
        return scales


class Bits4(NamedTuple):
    """A matrix in 4 bits per element, in blocks of consecutive elements of the flattened matrix.

    Args:
        shape: (rows, columns).
        name: checkpoint tensor of the codes, two per byte, the first in the high bits; the bytes may be declared as
            another dtype.
        table: checkpoint tensor of the values of the 16 codes, float32.
        state: checkpoint tensor of the sizes, as JSON.
        scales: of the blocks.
    """

    shape: tuple[int, ...]
    name: str
    table: str
    state: str
    scales: Scales

    @property
    def stored(self) -> Sequence[str]:
        return self.name, self.table, self.state, *self.scales.stored

    def decode(self, files: Checkpoint, matrix: int, first: int, last: int) -> Tensor:
        block, start, end = self.scales.block, first * self.shape[1], last * self.shape[1]
        scales = self.scales.decode(files, start // block, -(-end // block))
        scales = scales[torch.arange(start, end, device="cpu") // block - start // block]
        values = look_up(files.read(self.table), self._codes(files, first, last).view(-1))
        return values.mul_(scales).view(last - first, -1)

    def has(self, files: Checkpoint, values: Sequence[float], block: int) -> bool:
        """Whether the codes, read from `files`, stand for `values`, and each block is `block` elements of one row."""
        blocks = self.scales.block == block and self.shape[1] % block == 0
        return blocks and bool(files.read(self.table).tolist() == list(values))

    def parts(self) -> tuple[Part, Part]:
        """The codes, uint8, one per byte; and the scales, float32 (rows, columns / block), of whole blocks in a row."""
        rows, columns = self.shape
        blocks = columns // self.scales.block

        def codes(files: Checkpoint, matrix: int, first: int, last: int) -> Tensor:
            return self._codes(files, first, last)

        def scales(files: Checkpoint, matrix: int, first: int, last: int) -> Tensor:
            return self.scales.decode(files, first * blocks, last * blocks).view(-1, blocks)

        return Part(self.shape, self.stored, codes), Part((rows, blocks), self.stored, scales)

    def _codes(self, files: Checkpoint, first: int, last: int) -> Tensor:
        """The codes of rows `first` to `last`, read from `files`: uint8 (last - first, columns)."""
        start, end = first * self.shape[1], last * self.shape[1]
        pairs = files.read(self.name).reshape(-1).view(torch.uint8)[start // 2 : -(-end // 2)]
        return torch.stack([pairs >> 4, pairs & 15], dim=-1).view(-1)[start % 2 :][: end - start].view(last - first, -1)


def bits4_tensors(files: Checkpoint, block: tuple[int, int] | None) -> dict[str, Encoded]:
    """Name -> tensor in 4 bits, for all tensors X of a checkpoint with a tensor X.quant_state.bitsandbytes__TYPE. Their
    sizes of blocks are in the checkpoint, so `block` is not used.

    Raises:
        CheckpointError: sizes that are no such JSON, missing tensors, or wrong dtypes or shapes; the message lists all
            of them.
    """
    faults: defaultdict[str, list[str]] = defaultdict(list)
    tensors: dict[str, Encoded] = {}
    for state in [name for name in files.headers if STATE in name]:
        name = state.rpartition(STATE)[0]
        found = _tensor(name, state, _read_state(files, state))
        if found is None:
            faults["without readable sizes"].append(state)
        elif missing := [stored for stored in found.stored if stored not in files.headers]:
            faults["missing from the checkpoint"] += missing
        else:
            _check(found, files, faults)
            tensors[name] = found
    raise_faults("the checkpoint's tensors in bitsandbytes' 4 bits do not match", faults)
    return tensors


def _read_state(files: Checkpoint, name: str) -> dict[str, Any]:
    """The sizes in tensor `name`; empty if it does not hold a JSON object."""
    header = files.headers[name]
    if header.dtype != torch.uint8 or math.prod(header.shape) > LARGEST_STATE:
        return {}
    try:
        return dict(as_object(json.loads(bytes(files.read(name).reshape(-1).tolist()))))
    except (ValueError, RecursionError):
        return {}


def _tensor(name: str, state: str, sizes: dict[str, Any]) -> Bits4 | None:
    """The tensor `name` by its `sizes`; None if they are incomplete or not positive."""
    shape, block = sizes.get("shape"), sizes.get("blocksize")
    if not isinstance(shape, list) or len(shape) != 2 or not is_list_of(shape, _is_positive) or not _is_positive(block):
        return None
    scales = Scales(f"{name}.absmax", block)
    if "nested_blocksize" in sizes:
        outer_block, offset = sizes["nested_blocksize"], sizes.get("nested_offset")
        if not _is_positive(outer_block) or not is_number(offset) or not math.isfinite(offset):
            return None
        nested = f"{name}.nested_quant_map", f"{name}.nested_absmax"
        scales = Scales(f"{name}.absmax", block, *nested, outer_block, float(offset))
    return Bits4((shape[0], shape[1]), name, f"{name}.quant_map", state, scales)


def _is_positive(size: Any) -> TypeGuard[int]:
    return is_int(size) and size > 0


def _check(tensor: Bits4, files: Checkpoint, faults: defaultdict[str, list[str]]) -> None:
    """Add an entry to `faults` for each stored tensor of a wrong dtype or number of elements."""
    scales = tensor.scales
    elements = math.prod(tensor.shape)
    blocks = -(-elements // scales.block)
    wanted = {tensor.table: (torch.float32, 16)}
    if scales.table is None or scales.outer is None:
        wanted[scales.name] = torch.float32, blocks
    else:
        wanted[scales.name] = torch.uint8, blocks
        wanted |= {scales.table: (torch.float32, 256), scales.outer: (torch.float32, -(-blocks // scales.outer_block))}
    for name, (dtype, count) in wanted.items():
        check_dtype(name, files.headers[name], (dtype,), faults)
        if math.prod(files.headers[name].shape) != count:
            faults[f"of shapes that do not fit {list(tensor.shape)}"].append(name)
    codes = files.headers[tensor.name]
    if math.prod(codes.shape) * codes.dtype.itemsize != -(-elements // 2):
        faults[f"of shapes that do not fit {list(tensor.shape)}"].append(tensor.name)
