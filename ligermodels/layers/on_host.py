"""Values of the device that the host asks for now and reads later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class OnHost:
    """A copy of a tensor that is on its way to the host, while the device goes on with what it is asked to do next.

    Of a tensor on the CPU it is that tensor's value at the time too.
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
        """As `Tensor.tolist`; waits until the copy is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()
