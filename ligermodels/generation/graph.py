"""Keeping a GPU busy with steps of decoding: each as one CUDA graph, hundreds of kernels for a single launch, and the
next one launched before it is known whether it is needed."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ligermodels import ops
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
    `enabled`, every call does. Of what a graph holds, linear layers are `ops.decode_linear`.
    """

    def __init__(self, function: Callable[[], Result], device: torch.device, enabled: bool = True) -> None:
        self._function = function
        self._enabled = enabled and device.type == "cuda"
        self._warm = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    def __call__(self) -> Result:
        if not self._enabled:
            return self._function()
        if not self._warm:
            self._warm = True
            with ops.DecodeLinears():
                return self._function()
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph), ops.DecodeLinears():  # records, and does not run
                self._result = self._function()
            self._graph = graph
        self._graph.replay()
        return self._result
