"""Tensors that are stored in an encoding of a few bits, with scales."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ligermodels.convert.safetensors_reader import Checkpoint, Header

E8M0 = torch.float8_e8m0fnu
"""A byte b that stands for 2^(b - 127). Many files call it uint8."""


class Encoded(Protocol):
    """A tensor of `shape` (..., rows, columns) as it is stored, in tensors that are called `stored`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stored(self) -> Sequence[str]: ...
    def decode(self, files: Checkpoint, matrix: int, first: int, last: int) -> Tensor:
        """Rows `first` to `last` of matrix number `matrix`, float32 (last - first, columns)."""
        ...


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the matrices in a tensor of this shape."""
    rows, columns = (1, 1, *shape)[-2:]
    return rows, columns


def look_up(table: Tensor, codes: Tensor) -> Tensor:
    """`table[codes]`, codes being bytes. Five times as fast on a CPU as torch's cast of FP8 to float32."""
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def as_float(scales: Tensor) -> Tensor:
    """`scales` in float32; bytes are E8M0."""
    return scales.view(E8M0).float() if scales.dtype == torch.uint8 else scales.float()


def check_dtype(name: str, header: Header, known: Sequence[torch.dtype], faults: defaultdict[str, list[str]]) -> None:
    """Add a fault unless tensor `name` has one of the dtypes `known`."""
    if header.dtype not in known:
        faults["of a dtype that scales and blocks do not have"].append(f"{name} {str(header.dtype)[6:]}")
