"""Fill tensors from the files of a checkpoint: mapped, copied on the host, or uploaded to a GPU by pinned buffers."""

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
"""Threads that copy on the host, so that one tensor is read from disk while another is copied."""
SLICE_ELEMENTS = 2**21
"""Elements per copy of a thread."""
UPLOAD_THREADS = 8
BUFFERS = 2
"""Pinned buffers per upload thread: one is filled while the other is copied to the GPU."""
BUFFER_BYTES = 8 * 2**20
"""Bytes of a buffer, enough for the full rate. The host holds UPLOAD_THREADS x BUFFERS of them."""


class Spec(Protocol):
    """Dtype and shape of a stored tensor."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> Sequence[int]: ...


class Reader(Protocol):
    """A source of tensors. Several threads read at the same time."""

    @property
    def headers(self) -> Mapping[str, Spec]: ...
    def read(self, name: str) -> Tensor: ...
    def read_together(self, names: Sequence[str]) -> Tensor | None: ...


@runtime_checkable
class SliceReader(Reader, Protocol):
    """A reader of parts of tensors, so that no whole tensor has to be in memory."""

    def read_slice(self, name: str, start: int, count: int) -> Tensor: ...


@runtime_checkable
class FileReader(Reader, Protocol):
    """A reader of files: `safetensors_reader.Checkpoint` or `dequantize.Dequantized`."""

    def read_into(self, name: str, start: int, buffer: memoryview) -> None: ...


class Piece(NamedTuple):
    """A part of a native tensor, and the elements of a checkpoint tensor that fill it.

    Args:
        view: the part, a view.
        name: the checkpoint tensor.
        start: its first element for the view.
        dtype: its stored dtype.
        whole: whether the view takes all its elements.
    """

    view: Tensor
    name: str
    start: int
    dtype: torch.dtype
    whole: bool

    @property
    def bytes(self) -> int:
        """Bytes of these elements in the file."""
        return self.view.numel() * self.dtype.itemsize


def fill(reader: Reader, tensors: Sequence[tuple[Tensor, Sequence[Piece]]], *, mapped: bool = False) -> Iterator[int]:
    """Fill tensors by their pieces.

    Args:
        reader: reads the checkpoint tensors.
        tensors: each tensor, and the pieces that cover it exactly once.
        mapped: let a CPU tensor use the memory of the mapped file (by setting its `data`), if the file stores it in the
            same dtype and order.

    Yields:
        Bytes of the files that have been read since the last value.
    """
    copies: list[Piece] = []
    uploads: defaultdict[torch.device, list[Piece]] = defaultdict(list)
    for tensor, pieces in tensors:
        if mapped and tensor.device.type == "cpu" and (stored := _as_stored(reader, tensor, pieces)) is not None:
            tensor.data = stored
            yield stored.nbytes
        elif tensor.device.type == "cuda" and isinstance(reader, FileReader):
            uploads[tensor.device] += pieces
        else:
            copies += pieces
    with ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="copy") as threads:
        yield from threads.map(partial(_copy, reader, torch.is_inference_mode_enabled()), copies)
    for device, pieces in uploads.items():
        yield from upload(cast(FileReader, reader), pieces, device)


def _as_stored(reader: Reader, tensor: Tensor, pieces: Sequence[Piece]) -> Tensor | None:
    """`tensor` as mapped memory of a file, if its pieces are whole tensors, adjacent and in the same order; or None."""
    offset = tensor.storage_offset()
    for piece in pieces:
        follows = piece.view.is_contiguous() and piece.view.storage_offset() == offset
        if not (follows and piece.whole and piece.dtype == tensor.dtype):
            return None
        offset += piece.view.numel()
    stored = reader.read_together([piece.name for piece in pieces])
    if stored is None or stored.data_ptr() % tensor.dtype.itemsize:
        return None
    return stored.view(tensor.dtype).view(tensor.shape)


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
    """Parts of `view` with at most SLICE_ELEMENTS, and the first element of each; `view` begins at `start`."""
    if view.numel() <= SLICE_ELEMENTS:
        yield view, start
        return
    row = view[0].numel()
    rows = max(1, SLICE_ELEMENTS // row)
    for first in range(0, len(view), rows):
        part = view[first : first + rows]
        yield from _slices(part[0] if rows == 1 else part, start + first * row)


def upload(reader: FileReader, pieces: Sequence[Piece], device: torch.device) -> Iterator[int]:
    """Fill pieces on a GPU by asynchronous copies, the largest first.

    The GPU is synchronised before and after. A view that is not contiguous is filled through a temporary copy on it.

    Args:
        reader: reads the checkpoint tensors.
        pieces: the pieces, all on `device`.
        device: the GPU.

    Yields:
        Bytes of each piece, once its copies are queued.
    """
    largest_first = sorted(pieces, key=lambda piece: -piece.bytes)
    of_thread, inference = threading.local(), torch.is_inference_mode_enabled()

    def work(piece: Piece) -> int:
        if not hasattr(of_thread, "lane"):
            of_thread.lane = _Lane(device)
        with torch.inference_mode(inference), torch.cuda.stream(of_thread.lane.stream):
            return of_thread.lane.fill(reader, piece)

    # Work that is still queued on another stream may use memory that the views have taken over.
    torch.cuda.synchronize(device)
    try:
        with ThreadPoolExecutor(UPLOAD_THREADS, thread_name_prefix="upload") as threads:
            yield from threads.map(work, largest_first)
    finally:
        torch.cuda.synchronize(device)


class _Lane:
    """The stream and pinned buffers of a thread. The event of a buffer completes when it may be filled again."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self.stream):  # pins memory in the context of this GPU, not of GPU 0
            buffers = [
                torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(BUFFERS)
            ]
        self.turns = itertools.cycle([(buffer, torch.cuda.Event()) for buffer in buffers])

    def fill(self, reader: FileReader, piece: Piece) -> int:
        """Fill a piece and return its bytes. The current stream must be this lane's stream."""
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
                stored = stored.to(part.device, non_blocking=True)  # then cast on the device
            part.copy_(stored, non_blocking=True)
            copied.record(self.stream)
        if whole is not view:
            view.copy_(whole)
        return piece.bytes
