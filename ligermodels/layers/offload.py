"""Tensors in host memory between the forward and the backward pass, for `activation_checkpointing="offload"`."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ligermodels.errors import InputError

DEVICES = ("cuda", "meta")
"""Types of devices whose tensors move. On the meta device nothing is copied: allocations are as on a GPU."""
SMALLEST = 1024
"""Bytes of the smallest tensors that move."""


def moves(value: object) -> bool:
    """Whether `saved_in_host_memory` moves this value: a plain tensor on a GPU, no parameter, of SMALLEST bytes."""
    return type(value) is Tensor and value.device.type in DEVICES and value.nbytes >= SMALLEST


@contextmanager
def saved_in_host_memory() -> Iterator[None]:
    """Context manager: tensors that autograd saves are in page-locked host memory until the backward pass needs them.

    The copies run on a stream of their own, beside the computation. When the context ends, later work on the current
    stream waits for them, so that the GPU's memory is free for that work, whatever the host has launched by then.

    A tensor that is changed in place within the context is an InputError in the backward pass. Later changes have no
    effect on the gradients.
    """
    copies: list[HostCopy] = []

    def pack(tensor: Tensor) -> Any:
        if not moves(tensor):
            return tensor
        copies.append(HostCopy(tensor))
        return copies[-1]

    def unpack(saved: Any) -> Tensor:
        return saved.get() if isinstance(saved, HostCopy) else saved

    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        for copy in copies:
            copy.finish()
        copies.clear()


def host_bytes() -> int:
    """Bytes of host memory that tensors of `saved_in_host_memory` take now; of the meta device, as they would."""
    return sum(sum(map(_rounded, copy.sizes)) for copy in _alive)


class HostCopy:
    """A tensor's values in host memory.

    When it is read, the copy made before it starts its way back: the backward pass needs that one next.

    Args:
        tensor: the tensor. Its values are copied by work that is queued now, until `finish`.
    """

    _returning: tuple[Tensor, torch.cuda.Event | None] | None = None  # on its way back to the GPU

    def __init__(self, tensor: Tensor) -> None:
        self._buffers: list[Tensor] = []
        dense = tensor if tensor.is_contiguous() else tensor.clone()
        self._source: tuple[Tensor, Tensor, int] | None = (tensor, dense, tensor._version)
        self._layout: dict[str, Any] = {"size": dense.shape, "stride": dense.stride(), "dtype": dense.dtype}
        self._device, self._changed = tensor.device, False
        self.sizes = _sizes(tensor.nbytes)
        for size in () if tensor.is_meta else self.sizes:
            self._buffers.append(_buffer(self._device, _rounded(size)))
        self._parts = [buffer[:size] for buffer, size in zip(self._buffers, self.sizes, strict=False)]
        self._copied = _copy(self._parts, self._split(dense), self._device)
        self._previous = _latest.get(self._device)
        _latest[self._device] = weakref.ref(self)
        _alive.add(self)

    def finish(self) -> None:
        """Let go of the tensor. Later work on the current stream waits for the copy."""
        if self._source is None:
            return
        _wait(self._copied, self._device)
        tensor, _, version = self._source
        self._changed, self._source = tensor._version != version, None

    def get(self) -> Tensor:
        """A new tensor with the values, on the device of the old one.

        Raises:
            InputError: the tensor was changed in place before `finish`.
        """
        if self._changed:
            raise InputError(
                f"activation_checkpointing: the input of a block, {tuple(self._layout['size'])}, was changed in place "
                "within the block, while 'offload' copied it; change a copy of it"
            )
        tensor, returned = self._start_return()
        self._returning = None
        _wait(returned, self._device)
        if tensor.is_cuda:  # has no effect if its memory belongs to this stream, as it does unless a user changes it
            tensor.record_stream(torch.cuda.current_stream(self._device))
        previous = None if self._previous is None else self._previous()
        if previous is not None:
            previous._start_return()
        return tensor

    def _start_return(self) -> tuple[Tensor, torch.cuda.Event | None]:
        # Memory of the current stream, and the copy waits for that stream: memory of the copies' stream would be
        # free only when the GPU has used it, and the host may be many blocks ahead of the GPU by then.
        if self._returning is None:
            tensor = torch.empty_strided(**self._layout, device=self._device)
            self._returning = tensor, _copy(self._split(tensor), self._parts, self._device)
        return self._returning

    def _split(self, dense: Tensor) -> Sequence[Tensor]:
        """The bytes of a tensor without gaps, in the sizes of the parts in host memory."""
        return dense.detach().as_strided((dense.numel(),), (1,)).view(torch.uint8).split(self.sizes)

    def __del__(self) -> None:
        if self._returning is not None and self._returning[1] is not None:  # still copied to, and not needed
            self._returning[0].record_stream(_side_stream(self._device))
        for buffer in self._buffers:
            _free[self._device, len(buffer)].append(buffer)


_free: defaultdict[tuple[torch.device, int], list[Tensor]] = defaultdict(list)
"""Free buffers in host memory, by device and size. The GPU may still read them, but later copies to them are on the
same stream. torch's allocator would wait for the GPU before it reuses them, and take more while the host is ahead."""
_latest: dict[torch.device, weakref.ref[HostCopy]] = {}
_alive: weakref.WeakSet[HostCopy] = weakref.WeakSet()


def _buffer(device: torch.device, size: int) -> Tensor:
    try:
        return _free[device, size].pop()
    except IndexError:
        pass
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    except RuntimeError as error:
        raise InputError(
            f"activation_checkpointing: the host has no {size:,} bytes of page-locked memory left for 'offload', which "
            f"has {host_bytes():,}; use fewer tokens per forward pass, or 'full'"
        ) from error


def _sizes(nbytes: int) -> list[int]:
    """Sizes of the parts of `nbytes` in host memory.

    torch rounds page-locked memory up to powers of two: a single buffer would take up to twice the bytes."""
    sizes: list[int] = []
    while nbytes and len(sizes) < 4:
        sizes.append(1 << nbytes.bit_length() - 1)
        nbytes -= sizes[-1]
    return [*sizes, nbytes] if nbytes else sizes


def _rounded(size: int) -> int:
    return 1 << (size - 1).bit_length()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@torch.no_grad()
def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor], device: torch.device) -> torch.cuda.Event | None:
    """Copy, on a GPU after the work that its current stream has now, beside later work. Returns the end of that."""
    if device.type != "cuda":
        for target, source in () if device.type == "meta" else zip(targets, sources, strict=True):
            target.copy_(source)
        return None
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
    return side.record_event()


def _wait(event: torch.cuda.Event | None, device: torch.device) -> None:
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
