"""Where bad values in tensors, such as a target outside the vocabulary, are reported.

On the CPU they raise InputError. On CUDA they fail a device-side assertion: nothing waits for the device, but the error
names no value, appears at a later call, and ends the process's use of the GPU. `LIGERMODELS_HOST_CHECKS=1` in the
environment, or `set_host_checks(True)`, asks for the InputError there too. Each check then waits for the device, so
that this is for finding an error, as CUDA_LAUNCH_BLOCKING=1 is. While a CUDA graph is captured, and in what
torch.compile has compiled of a model, the assertions stay.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_on_cuda = os.environ.get("LIGERMODELS_HOST_CHECKS", "0") not in ("", "0")


@contextmanager
def set_host_checks(enabled: bool) -> Iterator[None]:
    """Context manager: whether checks of values on CUDA raise InputError on the host, at the cost of a wait for each.

    It holds for the whole process, all threads.
    """
    global _on_cuda
    previous, _on_cuda = _on_cuda, enabled
    try:
        yield
    finally:
        _on_cuda = previous


def checked_on_host(x: Tensor) -> bool:
    """Whether a check may read values of x, and is to raise if they are bad."""
    if x.is_cuda:
        return _on_cuda and not torch.cuda.is_current_stream_capturing()
    return x.device.type == "cpu"
