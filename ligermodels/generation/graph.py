"""Keeping a GPU busy with steps of decoding: each as one CUDA graph, hundreds of kernels for a single launch, and the
next one launched before it is known whether it is needed."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

Result = TypeVar("Result")


class Finished:
    """Reads on the CPU whether a loop of steps on a device is at its end.

    Reading waits for the device, which then waits for the CPU to launch the next step. With `late`, from the second
    time on what is read is what was asked the time before, which by then is mostly known: one step too many is run.
    """

    def __init__(self, late: bool) -> None:
        self._late = late
        self._asked: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def __call__(self, flag: Tensor) -> int | None:
        """flag: bool, a single one. How many steps ago the end was: 0, or 1 where one step too many was run; None
        before the end."""
        if not self._late:
            return 0 if bool(flag) else None
        if self._asked is None:
            ended = 0 if bool(flag) else None
        else:
            if self._event is not None:
                self._event.synchronize()
            ended = 1 if bool(self._asked) else None
        if flag.is_cuda:
            if self._asked is None:
                self._asked, self._event = torch.empty((), dtype=torch.bool, pin_memory=True), torch.cuda.Event()
            self._asked.copy_(flag, non_blocking=True)
            cast(torch.cuda.Event, self._event).record(torch.cuda.current_stream(flag.device))
        else:
            self._asked = flag.clone()
        return ended


def runs_ahead(device: torch.device) -> bool:
    """Whether there is something to gain from not waiting for the device."""
    return device.type == "cuda"


class Graphed(Generic[Result]):
    """Calls a function of tensors at fixed addresses; from the second call on, by replaying a CUDA graph of it.

    The function reads and changes tensors in place, waits for nothing, and returns a tensor, whose memory the next call
    uses again, or nothing. The first call runs it as it is, which compiles its kernels. Not on a CUDA device, or not
    `enabled`, every call does.
    """

    def __init__(self, function: Callable[[], Result], device: torch.device, enabled: bool = True) -> None:
        self._function = function
        self._enabled = enabled and device.type == "cuda"
        self._warm = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    def __call__(self) -> Result:
        if not self._enabled or not self._warm:
            self._warm = True
            return self._function()
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # records, and does not run
                self._result = self._function()
            self._graph = graph
        self._graph.replay()
        return self._result
