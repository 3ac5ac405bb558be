"""Where bad values in tensors, such as a target outside the vocabulary, are reported.

On the CPU they raise InputError. On CUDA they fail a device-side assertion: nothing waits for the device, but the error
names no value, appears at a later call, and ends the process's use of the GPU. `LIGERMODELS_HOST_CHECKS=1` in the
environment, or `set_host_checks(True)`, asks for the InputError there too. Each check then waits for the device, so
that this is for finding an error, as CUDA_LAUNCH_BLOCKING=1 is. While a CUDA graph is captured, and in what
torch.compile has compiled of a model, the assertions stay.
"""

import os

import torch
from torch import Tensor

_on_cuda = os.environ.get("LIGERMODELS_HOST_CHECKS", "0") not in ("", "0")


class set_host_checks:
    """Whether checks of values on CUDA raise InputError on the host, at the cost of a wait for each.

    It holds for the whole process, all threads, from the call on; as a context manager, until its end.
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
    """Whether a check may read values of x, and is to raise if they are bad."""
    if x.is_cuda:
        return _on_cuda and not torch.cuda.is_current_stream_capturing()
    return x.device.type == "cpu"
