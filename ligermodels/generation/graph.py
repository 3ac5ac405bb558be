"""A step of decoding as one CUDA graph: hundreds of kernels for a single launch."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")


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
