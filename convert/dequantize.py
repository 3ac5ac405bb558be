"""Read quantised checkpoints as if they were stored in a floating dtype: tensors are dequantised when they are read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ligermodels.convert.bitsandbytes import Bits4, bits4_tensors
from ligermodels.convert.encoded import MXFP4, Encoded, fp8_tensors, matrix_of, mxfp4_tensors
from ligermodels.convert.loading import Reader, Spec
from ligermodels.convert.placement import stored_dtype
from ligermodels.convert.quantization import Quantization
from ligermodels.convert.safetensors_reader import Checkpoint

T = TypeVar("T")

ENCODINGS: Mapping[str, Callable[[Checkpoint, tuple[int, int] | None], dict[str, Encoded]]] = {
    "fp8": fp8_tensors,
    "mxfp4": mxfp4_tensors,
    "bitsandbytes 4 bits": bits4_tensors,
}
"""`Quantization.encoding` -> the function that finds the quantised tensors."""

ACTIVATION_SCALES = r"(^|\.)(k_scale|v_scale|input_scale|([^.]+_)?activation_scale)$"
"""Pattern of scales of activations and of the KV cache, which do not affect the weights."""

CHUNK_ELEMENTS = 2**18
"""Elements that are dequantised at once; they take 4 bytes each."""


class Decoded(NamedTuple):
    """Dtype and shape of a tensor after dequantisation."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class EncodedReader:
    """A `loading.FileReader` that decodes tensors when they are read.

    Args:
        files: reads the stored tensors.
        encoded: name -> tensor to decode.
        dtype: dtype of the decoded tensors.
        plain: name -> header of the tensors that are read as they are stored.
    """

    def __init__(
        self, files: Checkpoint, encoded: Mapping[str, Encoded], dtype: torch.dtype, plain: Mapping[str, Spec]
    ) -> None:
        self.files, self.encoded, self._dtype = files, encoded, dtype
        self.headers = {**plain, **{name: Decoded(dtype, tensor.shape) for name, tensor in encoded.items()}}

    def read(self, name: str) -> Tensor:
        """Tensor `name` on the CPU. Tensors that are not quantised are mapped from their file."""
        if name not in self.encoded:
            return self.files.read(name)
        shape = self.encoded[name].shape
        return self.read_slice(name, 0, math.prod(shape)).view(shape)

    def read_slice(self, name: str, start: int, count: int) -> Tensor:
        """Elements `start` to `start + count` of tensor `name`, flat."""
        if name not in self.encoded:
            return self.files.read_slice(name, start, count)
        elements = torch.empty(count, dtype=self._dtype, device="cpu")
        self._decode(self.encoded[name], start, elements)
        return elements

    def read_together(self, names: Sequence[str]) -> Tensor | None:
        """The bytes of adjacent tensors, mapped from their file; None if they are not adjacent, or one is quantised."""
        return None if any(name in self.encoded for name in names) else self.files.read_together(names)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes of tensor `name` from byte `start` on; both hold whole elements."""
        if name not in self.encoded:
            self.files.read_into(name, start, buffer)
        elif buffer:
            elements = torch.frombuffer(buffer, dtype=torch.uint8).view(self._dtype)
            self._decode(self.encoded[name], start // self._dtype.itemsize, elements)

    def _decode(self, encoded: Encoded, start: int, output: Tensor) -> None:
        """Fill `output`, flat, with the elements from `start` on, a few rows at a time."""
        rows, columns = matrix_of(encoded.shape)
        while left := output.numel():
            row, skipped = divmod(start, columns)
            matrix, first = divmod(row, rows)
            rows_left = -(-(skipped + left) // columns)
            last = min(rows, first + min(rows_left, max(1, CHUNK_ELEMENTS // columns)))
            values = encoded.decode(self.files, matrix, first, last).reshape(-1)[skipped:][:left]
            count = values.numel()
            output[:count] = values
            start, output = start + count, output[count:]


class Dequantized(EncodedReader):
    """A `loading.FileReader` that dequantises tensors: computed in float32, rounded once to `dtype`.

    Quantised tensors appear under their names before quantisation, and scales are hidden. Other tensors are read as
    they are stored.

    Args:
        files: reads the stored tensors.
        quantization: how they are stored.
        dtype: dtype of the dequantised tensors; None for the dtype of most numbers that are not quantised.

    Raises:
        CheckpointError: quantised tensors have no scales, scales have no tensor, or scales have a wrong shape or dtype;
            the message lists all of them.
    """

    def __init__(self, files: Checkpoint, quantization: Quantization, dtype: torch.dtype | None) -> None:
        encoded = ENCODINGS[quantization.encoding](files, quantization.block)
        hidden = {name for tensor in encoded.values() for name in tensor.stored}
        plain = {n: h for n, h in files.headers.items() if n not in hidden and not re.search(ACTIVATION_SCALES, n)}
        super().__init__(files, encoded, dtype or stored_dtype(plain), plain)


class Stored4Bits(NamedTuple):
    """Readers of the two parts of tensors in 4 bits: name -> codes, uint8, of the tensor's shape, and name -> scales,
    float32 (rows, columns / block), of MXFP4 uint8 (..., rows / 32, columns)."""

    codes: EncodedReader
    scales: EncodedReader


def stored_4_bits(reader: Reader, levels: Sequence[float], block: int) -> Stored4Bits | None:
    """Readers of the codes and scales of the tensors that bitsandbytes stored in a 4-bit format.

    Args:
        reader: the checkpoint.
        levels: the 16 values of the format.
        block: elements of a row with one scale. Tensors with other values or blocks are left out.

    Returns:
        The readers; None if the checkpoint has no tensors in 4 bits.
    """
    tensors = _encoded(reader, Bits4)
    if not isinstance(reader, Dequantized) or not tensors:
        return None
    fitting = {name: tensor for name, tensor in tensors.items() if tensor.has(reader.files, levels, block)}
    return _readers(reader.files, fitting, torch.float32)


def stored_mxfp4(reader: Reader) -> Stored4Bits | None:
    """Readers of the codes and scales of the tensors of a checkpoint that are stored in MXFP4; None without any."""
    tensors = _encoded(reader, MXFP4)
    if not isinstance(reader, Dequantized) or not tensors:
        return None
    return _readers(reader.files, tensors, torch.uint8)


def _readers(files: Checkpoint, tensors: Mapping[str, Bits4 | MXFP4], dtype: torch.dtype) -> Stored4Bits:
    """Readers of the codes, and of the scales in this dtype."""
    parts = {name: tensor.parts() for name, tensor in tensors.items()}
    codes, scales = ({name: pair[i] for name, pair in parts.items()} for i in (0, 1))
    return Stored4Bits(EncodedReader(files, codes, torch.uint8, {}), EncodedReader(files, scales, dtype, {}))


def names_in_4_bits(reader: Reader) -> frozenset[str]:
    """Names of the tensors that bitsandbytes stored in 4 bits."""
    return frozenset(_encoded(reader, Bits4))


def names_in_mxfp4(reader: Reader) -> frozenset[str]:
    """Names of the tensors that are stored in MXFP4."""
    return frozenset(_encoded(reader, MXFP4))


def _encoded(reader: Reader, kind: type[T]) -> dict[str, T]:
    """Name -> quantised tensor of this kind."""
    encoded = reader.encoded if isinstance(reader, Dequantized) else {}
    return {name: tensor for name, tensor in encoded.items() if isinstance(tensor, kind)}


def dequantized(
    files: Checkpoint, quantization: Quantization | None, dtype: torch.dtype | None
) -> Checkpoint | Dequantized:
    """A reader of `files`: `files` itself, or with a `quantization` a `Dequantized` of `dtype`."""
    return files if quantization is None else Dequantized(files, quantization, dtype)


def unquantized_dtype(reader: Reader) -> torch.dtype:
    """The dtype of most numbers of a checkpoint, without quantised tensors and their scales; see `stored_dtype`."""
    encoded = reader.encoded if isinstance(reader, Dequantized) else {}
    return stored_dtype({name: header for name, header in reader.headers.items() if name not in encoded})
