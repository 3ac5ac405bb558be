"""From the files of a checkpoint to tensors: mapped, copied on the host, or uploaded to a GPU by pinned buffers."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

COPY_THREADS = 4
"""Threads that copy on the host: pages of one tensor are read from disk while another is copied."""
SLICE_ELEMENTS = 2**21
"""Elements that a thread copies at once."""
UPLOAD_THREADS = 8
BUFFERS = 2
"""Pinned buffers of each upload thread: one is filled while the other is copied to the GPU."""
BUFFER_BYTES = 8 * 2**20
"""Large enough to copy at full rate. All buffers together are what the host holds."""


class Spec(Protocol):
    """What planning needs to know of a stored tensor."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> Sequence[int]: ...


class Reader(Protocol):
    """Where tensors are read from. Threads read at the same time."""

    @property
    def headers(self) -> Mapping[str, Spec]: ...
    def read(self, name: str) -> Tensor: ...
    def read_together(self, names: Sequence[str]) -> Tensor | None: ...


@runtime_checkable
class SliceReader(Reader, Protocol):
    """A reader of files or of what is made of them, of which no whole tensor need be in memory."""

    def read_slice(self, name: str, start: int, count: int) -> Tensor: ...


@runtime_checkable
class FileReader(Reader, Protocol):
    """A reader of files, see `safetensors_reader.Checkpoint`; other tensors are in memory already."""

    def read_into(self, name: str, start: int, buffer: memoryview) -> None: ...


class Piece(NamedTuple):
    """A `view` of a native tensor, to be filled with the elements of checkpoint tensor `name` from element `start` on.

    The checkpoint tensor is stored in `dtype`; `whole` says whether the view has all its elements.
    """

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
    """Fill each tensor by its pieces, which cover it once; yields the bytes of the files as they are done.

    The host holds the buffers of uploads at most. With `mapped`, a tensor on the host becomes (its `data`) the file's
    own memory, where the file has it in the right dtype and order.
    """
    copies: list[Piece] = []
    uploads: defaultdict[torch.device, list[Piece]] = defaultdict(list)
    for tensor, pieces in tensors:
        if mapped and tensor.device.type == "cpu" and (found := _as_stored(reader, tensor, pieces)) is not None:
            tensor.data = found
            yield found.nbytes
        elif tensor.device.type == "cuda" and isinstance(reader, FileReader):
            uploads[tensor.device] += pieces
        else:
            copies += pieces
    with ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="copy") as threads:
        yield from threads.map(partial(_copy, reader, torch.is_inference_mode_enabled()), copies)
    for device, each in uploads.items():
        yield from upload(cast(FileReader, reader), each, device)


def _as_stored(reader: Reader, tensor: Tensor, pieces: Sequence[Piece]) -> Tensor | None:
    """`tensor` in the memory of a file, if its pieces are stored whole and one after another in the same order."""
    offset = tensor.storage_offset()
    for piece in pieces:
        follows = piece.view.is_contiguous() and piece.view.storage_offset() == offset
        if not (follows and piece.whole and piece.dtype == tensor.dtype):
            return None
        offset += piece.view.numel()
    found = reader.read_together([piece.name for piece in pieces])
    if found is None or found.data_ptr() % tensor.dtype.itemsize:
        return None
    return found.view(tensor.dtype).view(tensor.shape)


def _copy(reader: Reader, inference: bool, piece: Piece) -> int:
    with torch.inference_mode(inference):
        if isinstance(reader, SliceReader):
            for view, start in _slices(piece.view, piece.start):
                view.copy_(reader.read_slice(piece.name, start, view.numel()).view(view.shape))
        else:
            elements = reader.read(piece.name).reshape(-1)[piece.start : piece.start + piece.view.numel()]
            piece.view.copy_(elements.view(piece.view.shape))
    return piece.bytes


def _slices(view: Tensor, start: int) -> Iterator[tuple[Tensor, int]]:
    """`view` in parts of at most SLICE_ELEMENTS, and of which element on each is, `start` being that of `view`."""
    if view.numel() <= SLICE_ELEMENTS:
        yield view, start
        return
    row = view[0].numel()
    rows = max(1, SLICE_ELEMENTS // row)
    for first in range(0, len(view), rows):
        part = view[first : first + rows]
        yield from _slices(part[0] if rows == 1 else part, start + first * row)


def upload(reader: FileReader, pieces: Sequence[Piece], device: torch.device) -> Iterator[int]:
    """Fill `pieces`, all on `device`, the largest first; yields the bytes of each once it is on its way.

    The device is synchronised before and after. It holds a copy of a view that is not contiguous while that is filled.
    """
    largest_first = sorted(pieces, key=lambda piece: -piece.bytes)
    lanes, inference = threading.local(), torch.is_inference_mode_enabled()

    def work(piece: Piece) -> int:
        if not hasattr(lanes, "own"):
            lanes.own = _Lane(device)
        with torch.inference_mode(inference), torch.cuda.stream(lanes.own.stream):
            return lanes.own.fill(reader, piece)

    # Memory of the views may have been freed by work that is still queued on another stream.
    torch.cuda.synchronize(device)
    try:
        with ThreadPoolExecutor(UPLOAD_THREADS, thread_name_prefix="upload") as threads:
            yield from threads.map(work, largest_first)
    finally:
        torch.cuda.synchronize(device)


class _Lane:
    """The stream and the pinned buffers of a thread. The event of a buffer says when it may be filled again."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self.stream):  # Pins memory by the context of this GPU instead of the first one's.
            buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(BUFFERS)]
        self.turns = itertools.cycle([(buffer, torch.cuda.Event()) for buffer in buffers])

    def fill(self, reader: FileReader, piece: Piece) -> int:
        """Fill a piece on the current stream, which is this lane's; returns its bytes."""
        view, dtype = piece.view, piece.dtype
        whole = view if view.is_contiguous() else torch.empty_like(view, memory_format=torch.contiguous_format)
        elements, size = whole.view(-1), dtype.itemsize
        for first in range(0, elements.numel(), BUFFER_BYTES // size):
            part = elements[first : first + BUFFER_BYTES // size]
            buffer, copied = next(self.turns)
            buffer = buffer[: part.numel() * size]
            copied.synchronize()
            reader.read_into(piece.name, (piece.start + first) * size, memoryview(buffer.numpy().data))
            stored = buffer.view(dtype)
            if dtype != part.dtype:
                stored = stored.to(part.device, non_blocking=True)  # Cast on the device.
            part.copy_(stored, non_blocking=True)
            copied.record(self.stream)
        if whole is not view:
            view.copy_(whole)
        return piece.bytes
