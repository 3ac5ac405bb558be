"""Tensors that are stored in few bits per element, with scales."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ligermodels.convert.safetensors_reader import Checkpoint, Header

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
