"""How bad values in tensors, such as a target outside the vocabulary, are reported.

On the CPU they raise InputError. On CUDA they fail a device-side assertion: nothing waits for the device, but the error
names no value, appears at a later call, and ends the process's use of the GPU. `LIGERMODELS_HOST_CHECKS=1` in the
environment, or `set_host_checks(True)`, makes them raise InputError on CUDA too. Each check then waits for the device,
so use this to find an error, like CUDA_LAUNCH_BLOCKING=1. While a CUDA graph is captured, and in code that
torch.compile has compiled, the assertions stay.
"""

import os

import torch
from torch import Tensor

_on_cuda = os.environ.get("LIGERMODELS_HOST_CHECKS", "0") not in ("", "0")


class set_host_checks:
    """Makes checks of values on CUDA raise InputError on the host, or not; each such check waits for the device.

    It takes effect at the call, for the whole process and all threads; as a context manager, it ends with the context.

    Args:
        enabled: True for InputError, False for device-side assertions.
    """

    def __init__(self, enabled: bool) -> None:
        global _on_cuda
        self._previous, _on_cuda = _on_cuda, enabled

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        global _on_cuda
        _on_cuda = self._previous


def checked_on_host(x: Tensor) -> bool:
    """Whether a check of the values of x runs on the host and raises InputError."""
    if x.is_cuda:
        return _on_cuda and not torch.cuda.is_current_stream_capturing()
    return x.device.type == "cpu"
