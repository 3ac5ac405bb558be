"""Which face of an op runs: the Triton kernels or the torch reference. And where Triton itself comes from.

CUDA tensors go to the kernels, CPU tensors to the reference; with TRITON_INTERPRET=1 in the environment when this
package is imported, CPU tensors go to the kernels too, run by Triton's interpreter. float64 always goes to the
reference: the kernels compute in float32.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal

import torch

from ligermodels.errors import BackendError

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton for this platform: kernels stay plain functions that nobody calls
    triton = SimpleNamespace(jit=lambda function: function)
    tl = SimpleNamespace(constexpr=Any)
    HAS_TRITON = False
else:
    HAS_TRITON = True

INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"  # Triton decides it when a kernel is defined

Face = Literal["reference", "triton"]
_forced: Face | None = None


def use_kernels(*tensors: torch.Tensor | None) -> bool:
    """Whether the Triton kernels, rather than the reference, serve these tensors. Raises BackendError if they cannot.

    None is allowed among the tensors, and ignored.
    """
    on_cuda = True
    for t in tensors:  # a plain loop: every op begins with this
        if t is not None:
            if t.dtype == torch.float64:
                return False
            on_cuda = on_cuda and t.is_cuda
    if _forced == "reference":
        return False
    if (on_cuda and HAS_TRITON and not INTERPRETED) or INTERPRETED:
        return True
    if _forced == "triton":
        raise BackendError(
            "the Triton kernels were asked for, but they need triton and CUDA tensors; "
            "on the CPU they run only with TRITON_INTERPRET=1 set before ligermodels is imported"
        )
    return False


@contextmanager
def force(face: Face | None) -> Iterator[None]:
    """Within the context every op runs `face`: "reference" or "triton"; None lets each op choose again.

    It holds for the whole process, all threads. The backward pass follows the forward pass that it belongs to.
    """
    global _forced
    if face not in ("reference", "triton", None):
        raise BackendError(f'face must be "reference", "triton" or None, got {face!r}')
    previous, _forced = _forced, face
    try:
        yield
    finally:
        _forced = previous


@functools.cache
def processors(device: torch.device) -> int:
    """How many multiprocessors the device has, to size grids by; a small fixed number for the interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on the device, less what the compiler takes for itself."""
    if device.type != "cuda":
        return 2**16
    # Without its own word for it: what every device has.
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 3 * 2**14)) - 2**13


def power_of_2_above(n: int) -> int:
    """The smallest power of two that is not below n, at least 1."""
    return 1 << max(n - 1, 0).bit_length()
