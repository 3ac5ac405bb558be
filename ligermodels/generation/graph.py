"""Keeping a GPU busy with steps of decoding: each as one CUDA graph, hundreds of kernels for a single launch, and the
next one launched before it is known whether it is needed."""

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ligermodels.layers.async_copy import AsyncHostCopy

Result = TypeVar("Result")


AHEAD = ("cuda",)
"""Types of devices that work on their own, so that it pays to launch what may turn out superfluous."""


class Finished:
    """Whether a loop of steps on a device is at its end, read on the CPU.

    Reading waits for the device, which then waits for the CPU to launch the next step. So on a device AHEAD, if
    `enabled`, what is read from the second time on is what was asked the time before: one step too many is run.
    """

    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        self._late = enabled and device.type in AHEAD
        self._asked: AsyncHostCopy | None = None

    def __call__(self, flag: Tensor) -> int | None:
        """flag: bool, a single one. How many steps ago the end was: 0, or 1 where one step too many was run; None
        before the end."""
        ended, ago = (bool(flag), 0) if self._asked is None else (self._asked.get(), 1)
        self._asked = AsyncHostCopy(flag) if self._late else None
        return ago if ended else None


class Graphed(Generic[Result]):
    """Calls a function of tensors at fixed addresses; from the second call on, by replaying a CUDA graph of it.

    The function reads and changes tensors in place, waits for nothing, and returns tensors, whose memory the next call
    uses again, or nothing. The first call runs it as it is, which compiles its kernels. Not on a CUDA device, or not
    `enabled`, every call does.
    """

    def __init__(self, function: Callable[[], Result], device: torch.device, enabled: bool = True) -> None:
        self._function, self._device = function, device
        self._enabled = enabled and device.type == "cuda"
        self._warm = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    def __call__(self) -> Result:
        if not self._enabled or not self._warm:
            self._warm = True
            return self._function()
        if self._graph is None:
            self._graph = self._record()
        self._graph.replay()
        return self._result

    def _record(self) -> torch.cuda.CUDAGraph:
        """Record the function, without running it.

        `torch.cuda.graph` would wait for the device and give back all memory that torch has cached, of the device and
        of the host, which the next step and the next call of `generate` ask for again: that takes longer than a step.
        """
        make_room(self._device)
        graph = torch.cuda.CUDAGraph()
        # Work of other threads does not disturb a recording of mode "thread_local"; two recordings on one stream would.
        with _RECORDING, torch.cuda.stream(_recording_stream(self._device)):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._result = self._function()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # that the recording is invalid, of which this is the cause
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph


_RECORDING = threading.Lock()


@functools.cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: cuBLAS keeps a workspace for each stream that it was ever used on."""
    return torch.cuda.Stream(device)


def make_room(device: torch.device) -> None:
    """Give back the memory that torch has cached on a CUDA device, if it is more than an eighth of what is free.

    While a graph is recorded torch takes new memory, and cannot give back what it has cached if there is too little.
    That of earlier graphs, which are gone, is in the cache too, and is of use to nothing else.
    """
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if 8 * cached > torch.cuda.mem_get_info(device)[0]:
        torch.cuda.empty_cache()
