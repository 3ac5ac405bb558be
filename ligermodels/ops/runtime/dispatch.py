"""The choice between an op's two backends, its Triton kernels and its torch reference; and the import of Triton.

CUDA tensors go to the kernels, CPU tensors to the reference. If TRITON_INTERPRET=1 is set when this package is
imported, CPU tensors go to the kernels too, in Triton's interpreter. float64 always goes to the reference: the kernels
compute in float32. Meta tensors have the shapes and dtypes of what the kernels would keep and return on a GPU.
"""

import functools
import os
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from ligermodels.errors import BackendError

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton for this platform: kernels stay plain functions that are never called
    triton = SimpleNamespace(jit=lambda function: function)
    tl = SimpleNamespace(constexpr=Any)
    HAS_TRITON = False
else:
    HAS_TRITON = True

INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"  # Triton decides it when a kernel is defined
IN_INTERPRETER = tl.constexpr(INTERPRETED) if HAS_TRITON else INTERPRETED
"""The same, as kernels can read it."""

Backend = Literal["reference", "triton"]
_backend: Backend | None = None


def use_kernels(*tensors: Tensor | None) -> bool:
    """Whether the Triton kernels, rather than the reference, serve these tensors; None among them is ignored.

    Raises BackendError if `set_backend("triton")` holds but the kernels cannot serve them.
    """
    on_cuda, on_meta = True, False
    for t in tensors:  # a plain loop: every op begins with this
        if t is not None:
            if t.dtype == torch.float64:
                return False
            if not t.is_cuda:
                on_cuda, on_meta = False, on_meta or t.is_meta
    if on_meta:
        return True  # nothing runs
    if _backend == "reference":
        return False
    if (on_cuda and HAS_TRITON and not INTERPRETED) or INTERPRETED:
        return True
    if _backend == "triton":
        raise BackendError(
            'set_backend("triton") holds, but the kernels need triton and CUDA tensors; on the CPU they run only with '
            "TRITON_INTERPRET=1 set before ligermodels is imported"
        )
    return False


class set_backend:
    """Every op runs on `backend`, "reference" or "triton"; with None each op chooses by its tensors.

    It holds for the whole process, all threads, from the call on; as a context manager, until its end. A backward pass
    runs on the backend of its forward pass.
    """

    def __init__(self, backend: Backend | None) -> None:
        global _backend
        if backend not in ("reference", "triton", None):
            raise BackendError(f'backend must be "reference", "triton" or None, got {backend!r}')
        self._previous, _backend = _backend, backend

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        global _backend
        _backend = self._previous


@functools.cache
def num_sms(device: torch.device) -> int:
    """The number of multiprocessors of the device, or a small fixed number for the interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may use on the device, less a reserve for the compiler."""
    if device.type != "cuda":
        return 2**16
    # torch may lack the attribute: then what every device has.
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 3 * 2**14)) - 2**13


def power_of_2_above(n: int) -> int:
    """The smallest power of two that is not below n, at least 1."""
    return 1 << max(n - 1, 0).bit_length()
