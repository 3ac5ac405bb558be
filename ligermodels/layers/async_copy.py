"""Asynchronous copies from the device to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class AsyncHostCopy:
    """Copies a tensor to the host without blocking; `get` waits for that copy alone.

    Kernels launched after it is made run while the copy is on its way. Of a tensor on the CPU it holds the value at
    the time.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._copy = tensor.clone()

    def get(self) -> Any:
        """The value, as `Tensor.tolist` gives it."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()
