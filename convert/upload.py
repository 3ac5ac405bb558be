"""From files to a GPU: through pinned buffers, by several threads, each reading on while its last bytes are copied."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

THREADS = 8
BUFFERS = 2
"""Of each thread: one is filled while the other is copied."""
BUFFER_BYTES = 8 * 2**20
"""Large enough for a copy to run at full rate; together the buffers are what the host holds."""


class Upload(NamedTuple):
    """A tensor on a GPU, and where it comes from.

    `read(start, buffer)` fills a buffer with the bytes of its elements, in order, from byte `start` on, as they are
    stored, in `dtype`; threads call it side by side.
    """

    target: Tensor
    dtype: torch.dtype
    read: Callable[[int, memoryview], None]


def upload(uploads: Sequence[Upload], device: torch.device) -> Iterator[int]:
    """Fill the target of each of `uploads`, all on `device`, the largest first; gives their bytes as each is done.

    The device is idle before and after. It holds a copy of a target only while that is filled, and only of one whose
    elements are not in a row.
    """
    largest_first = sorted(uploads, key=lambda each: -each.target.numel() * each.dtype.itemsize)
    lanes, inference = threading.local(), torch.is_inference_mode_enabled()

    def work(each: Upload) -> int:
        if not hasattr(lanes, "own"):
            lanes.own = _Lane(device)
        with torch.inference_mode(inference), torch.cuda.stream(lanes.own.stream):
            return lanes.own.fill(each)

    # Memory of the targets may have been freed by work that is still under way on another stream.
    torch.cuda.synchronize(device)
    try:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="upload") as threads:
            yield from threads.map(work, largest_first)
    finally:
        torch.cuda.synchronize(device)


class _Lane:
    """One thread's stream and buffers; of each buffer an event that says when it may be filled again."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self.stream):  # Or the memory would be pinned by way of the first GPU.
            buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(BUFFERS)]
        self.turns = itertools.cycle([(buffer, torch.cuda.Event()) for buffer in buffers])

    def fill(self, upload: Upload) -> int:
        """Fill a target, on the current stream, which is this lane's; gives its bytes."""
        target, dtype = upload.target, upload.dtype
        whole = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        elements, size = whole.view(-1), dtype.itemsize
        for first in range(0, elements.numel(), BUFFER_BYTES // size):
            part = elements[first : first + BUFFER_BYTES // size]
            buffer, copied = next(self.turns)
            buffer = buffer[: part.numel() * size]
            copied.synchronize()
            upload.read(first * size, memoryview(buffer.numpy().data))
            stored = buffer.view(dtype)
            if dtype != part.dtype:
                stored = stored.to(part.device, non_blocking=True)  # To be cast there.
            part.copy_(stored, non_blocking=True)
            copied.record(self.stream)
        if whole is not target:
            target.copy_(whole)
        return elements.numel() * size
