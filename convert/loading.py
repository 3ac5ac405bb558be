"""From the files of a checkpoint to tensors: mapped, copied, or uploaded to a GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ligermodels.convert.upload import Upload, upload

THREADS = 4
"""That copy side by side: one tensor's pages are faulted in or read from disk while another's are copied."""


class Reader(Protocol):
    """What is loaded from: see `safetensors_reader.Checkpoint`."""

    def read(self, name: str) -> Tensor: ...
    def read_together(self, names: Sequence[str]) -> Tensor | None: ...
    def read_into(self, name: str, start: int, buffer: memoryview) -> None: ...


class Piece(NamedTuple):
    """A `view` of a native tensor, to be filled with the elements of checkpoint tensor `name`, which is stored in
    `dtype`, from element `start` on; `whole` when that leaves none of it."""

    view: Tensor
    name: str
    start: int
    dtype: torch.dtype
    whole: bool

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return self.view.numel() * self.dtype.itemsize


def fill(reader: Reader, tensors: Sequence[tuple[Tensor, Sequence[Piece]]], *, mapped: bool = False) -> Iterator[int]:
    """Fill each tensor by its pieces, which cover it once; gives bytes of the files as they are done.

    The host holds the buffers of `upload` at most. With `mapped`, a tensor on the host becomes (its `data`) the file's
    own memory, where that holds it in the right dtype and order.
    """
    copies: list[Piece] = []
    uploads: defaultdict[torch.device, list[Upload]] = defaultdict(list)
    for tensor, pieces in tensors:
        if mapped and tensor.device.type == "cpu" and (found := _as_stored(reader, tensor, pieces)) is not None:
            tensor.data = found
            yield found.nbytes
        elif tensor.device.type == "cuda":
            uploads[tensor.device] += [
                Upload(each.view, each.dtype, partial(_read_into, reader, each)) for each in pieces
            ]
        else:
            copies += pieces
    with ThreadPoolExecutor(THREADS, thread_name_prefix="copy") as threads:
        yield from threads.map(partial(_copy, reader, torch.is_inference_mode_enabled()), copies)
    for device, each in uploads.items():
        yield from upload(each, device)


def _as_stored(reader: Reader, tensor: Tensor, pieces: Sequence[Piece]) -> Tensor | None:
    """`tensor` in the memory of a file, if its pieces lie there whole, one after another, as they do in it."""
    at = tensor.storage_offset()
    for piece in pieces:
        in_a_row = piece.view.is_contiguous() and piece.view.storage_offset() == at
        if not (in_a_row and piece.whole and piece.dtype == tensor.dtype):
            return None
        at += piece.view.numel()
    found = reader.read_together([piece.name for piece in pieces])
    if found is None or found.data_ptr() % tensor.dtype.itemsize:
        return None
    return found.view(tensor.dtype).view(tensor.shape)


def _copy(reader: Reader, inference: bool, piece: Piece) -> int:
    with torch.inference_mode(inference):
        elements = reader.read(piece.name).reshape(-1)[piece.start : piece.start + piece.view.numel()]
        piece.view.copy_(elements.view(piece.view.shape))
    return piece.bytes


def _read_into(reader: Reader, piece: Piece, start: int, buffer: memoryview) -> None:
    reader.read_into(piece.name, piece.start * piece.dtype.itemsize + start, buffer)
