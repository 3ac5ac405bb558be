"""Quantised checkpoints as if they had been stored in a floating dtype: tensors are dequantised as they are read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.convert.encoded import Encoded, matrix_of
from ligermodels.convert.fp8 import fp8_tensors
from ligermodels.convert.loading import Spec
from ligermodels.convert.mxfp4 import mxfp4_tensors
from ligermodels.convert.quantization import Quantization
from ligermodels.convert.safetensors_reader import Checkpoint, Header

ENCODINGS: Mapping[str, Callable[[Mapping[str, Header], tuple[int, int] | None], dict[str, Encoded]]] = {
    "fp8": fp8_tensors,
    "mxfp4": mxfp4_tensors,
}
"""What finds the quantised tensors, by `Quantization.encoding`."""

OF_ACTIVATIONS = r"(^|\.)(k_scale|v_scale|input_scale|([^.]+_)?activation_scale)$"
"""Scales of inputs and of the cache; they say nothing of the weights."""

AT_A_TIME = 2**18
"""Elements that are float32 at a time."""


class Decoded(NamedTuple):
    """What is known of a tensor before it is dequantised."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Dequantized:
    """A reader of `files` (`loading.FileReader`) that dequantises tensors to `dtype`, in float32 and rounded once.

    They have the names of the tensors that were quantised; scales are not seen. Other tensors are as they are stored.

    Raises one CheckpointError that lists every quantised tensor without its scales, scales without their tensor, and
    scales of a wrong shape or dtype.
    """

    def __init__(self, files: Checkpoint, quantization: Quantization, dtype: torch.dtype) -> None:
        self._files, self._dtype = files, dtype
        self._encoded = ENCODINGS[quantization.encoding](files.headers, quantization.block)
        hidden = {name for each in self._encoded.values() for name in each.stored}
        self.headers: Mapping[str, Spec] = {
            **{n: h for n, h in files.headers.items() if n not in hidden and not re.search(OF_ACTIVATIONS, n)},
            **{name: Decoded(dtype, each.shape) for name, each in self._encoded.items()},
        }

    def read(self, name: str) -> Tensor:
        """Tensor `name`, on the CPU; what was not quantised is mapped from its file."""
        if name not in self._encoded:
            return self._files.read(name)
        shape = self._encoded[name].shape
        return self.read_slice(name, 0, math.prod(shape)).view(shape)

    def read_slice(self, name: str, start: int, count: int) -> Tensor:
        """Elements `start` to `start + count` of tensor `name`, flat."""
        if name not in self._encoded:
            return self._files.read_slice(name, start, count)
        found = torch.empty(count, dtype=self._dtype, device="cpu")
        self._decode(self._encoded[name], start, found)
        return found

    def read_together(self, names: Sequence[str]) -> Tensor | None:
        """As of `Checkpoint`; None when one of them is quantised."""
        return None if any(name in self._encoded for name in names) else self._files.read_together(names)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of tensor `name` from its byte `start` on, both those of whole elements."""
        if name not in self._encoded:
            self._files.read_into(name, start, buffer)
        elif buffer:
            found = torch.frombuffer(buffer, dtype=torch.uint8).view(self._dtype)
            self._decode(self._encoded[name], start // self._dtype.itemsize, found)

    def _decode(self, encoded: Encoded, start: int, found: Tensor) -> None:
        """Fill `found`, flat, with the elements from `start` on, a few rows at a time."""
        rows, columns = matrix_of(encoded.shape)
        while left := found.numel():
            row, skipped = divmod(start, columns)
            matrix, first = divmod(row, rows)
            wanted = -(-(skipped + left) // columns)
            last = min(rows, first + min(wanted, max(1, AT_A_TIME // columns)))
            values = encoded.decode(self._files, matrix, first, last).reshape(-1)[skipped:][:left]
            count = values.numel()
            found[:count] = values
            start, found = start + count, found[count:]


def dequantized(files: Checkpoint, quantization: Quantization | None, dtype: torch.dtype) -> Checkpoint | Dequantized:
    """`files` as they are read: through `Dequantized` if there is a `quantization`."""
    return files if quantization is None else Dequantized(files, quantization, dtype)
