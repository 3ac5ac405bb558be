"""The choice between an op's two backends, its Triton kernels and its torch reference; and the import of Triton.

CUDA tensors go to the kernels, CPU tensors to the reference. If TRITON_INTERPRET=1 is set when this package is
imported, CPU tensors go to the kernels too, in Triton's interpreter. float64 always goes to the reference: the kernels
compute in float32. Meta tensors get the shapes and dtypes that the kernels would save and return on a GPU.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ligermodels.arguments import check_flag
from ligermodels.errors import BackendError

if TYPE_CHECKING:
    from ligermodels.ops.runtime.devices import GPU

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton for this platform: kernels stay plain functions that are never called
    triton = SimpleNamespace(jit=lambda function, **_: function)
    tl = SimpleNamespace(constexpr=Any)
    HAS_TRITON = False
    OutOfResources: type[Exception] = RuntimeError
else:
    HAS_TRITON = True
    OutOfResources = triton.runtime.errors.OutOfResources

INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"  # Triton decides it when a kernel is defined
IN_INTERPRETER = tl.constexpr(INTERPRETED) if HAS_TRITON else INTERPRETED
"""INTERPRETED as a constant that kernels can read."""

Backend = Literal["reference", "triton"]


def _is_on(variable: str) -> bool:
    """Whether a variable of the environment turns a setting on, as 1 does: not if it is unset, empty, 0, false, no or
    off."""
    return os.environ.get(variable, "").lower() not in ("", "0", "false", "no", "off")


class Setting:
    """A setting of the whole process and all threads. It takes effect at the call; as a context manager, it ends with
    the context."""

    value: Any

    def __init__(self, value: Any) -> None:
        self._previous, type(self).value = self.value, value

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        type(self).value = self._previous


class set_backend(Setting):
    """Makes every op run on one backend, for the whole process and all threads.

    It takes effect at the call; as a context manager, it ends with the context. A backward pass runs on the backend of
    its forward pass, except for ops whose backward pass computes parts of the forward pass again, or is shared with
    other ops (losses of a linear head, sums of experts' rows, float8): they ask for the setting again.

    Args:
        backend: "reference" or "triton"; None lets each op choose by its tensors.

    Raises:
        BackendError: `backend` is something else; and ops raise it if "triton" cannot serve their tensors.

    Examples:
        >>> with set_backend("reference"):
        ...     y = rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)
    """

    value: Backend | None = None

    def __init__(self, backend: Backend | None) -> None:
        if backend not in ("reference", "triton", None):
            raise BackendError(f'backend must be "reference", "triton" or None, got {backend!r}')
        super().__init__(backend)


class set_host_checks(Setting):
    """Makes checks of values, such as of a target outside the vocabulary, raise InputError on CUDA too, or not.

    On the CPU such a check raises InputError. On CUDA it fails a device-side assertion: nothing waits for the device,
    but the error names no value, appears at a later call, and ends the process's use of the GPU. With this setting, or
    LIGERMODELS_HOST_CHECKS=1 in the environment, each check on CUDA waits for the device, so use it to find an error,
    like CUDA_LAUNCH_BLOCKING=1. While a CUDA graph is captured, and in code that torch.compile has compiled, the
    assertions stay.

    It takes effect at the call, for the whole process and all threads; as a context manager, it ends with the context.

    Args:
        enabled: True for InputError, False for device-side assertions.

    Raises:
        InputError: `enabled` is not True or False.
    """

    value: bool = _is_on("LIGERMODELS_HOST_CHECKS")

    def __init__(self, enabled: bool) -> None:
        super().__init__(check_flag("set_host_checks: enabled", enabled))


class set_batch_invariant(Setting):
    """Makes the result for a token independent of the batch that it is computed in, bit for bit, or not.

    With this setting, matrix products and attention sum in an order that depends on the token's own row or document
    alone: not on the number of rows, on their lengths, on packing, or on whether a token is decoded or is part of a
    longer pass (He and Thinking Machines Lab, 2025,
    https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/). That holds in forward passes;
    gradients of parameters are sums over a batch. Ops that cannot do so raise BackendError.

    It takes effect at the call, for the whole process and all threads; as a context manager, it ends with the context.
    The environment variable LIGERMODELS_BATCH_INVARIANT=1 sets it when ligermodels is imported.

    Args:
        enabled: True for results that do not depend on the batch, False for the fastest kernels.

    Raises:
        InputError: `enabled` is not True or False.

    Examples:
        >>> with set_batch_invariant(True):
        ...     y = linear(torch.ones(3, 8), torch.ones(5, 8))
    """

    value: bool = _is_on("LIGERMODELS_BATCH_INVARIANT")

    def __init__(self, enabled: bool) -> None:
        super().__init__(check_flag("set_batch_invariant: enabled", enabled))


def batch_invariant_if(enabled: bool) -> set_batch_invariant:
    """The context of `set_batch_invariant(True)` if `enabled`; else the setting stays as it is."""
    return set_batch_invariant(enabled or set_batch_invariant.value)


def refuse_batch_invariant(name: str, advice: str = "turn the mode off for it") -> None:
    """Raise BackendError, which names an op or a layer that has no batch-invariant form, if the mode is on."""
    if set_batch_invariant.value:
        raise BackendError(f"batch_invariant: {name} has no batch-invariant form; {advice}")


pretended: "GPU | None" = None
"""The GPU that CPU tensors count as being on, see `pretend`."""
_as_recorded = False


def pretend(gpu: "GPU | None") -> None:
    """From now on, ops in this process run kernels on CPU tensors as if these were on `gpu`; None ends that.

    It is for tests that record launches instead of running them, and compile them for a GPU that the machine lacks.
    """
    global pretended
    pretended = gpu


@contextmanager
def as_recorded() -> Iterator[None]:
    """Context manager in which all threads compute as while a CUDA graph is recorded, to compile its kernels before."""
    global _as_recorded
    before, _as_recorded = _as_recorded, True
    try:
        yield
    finally:
        _as_recorded = before


def is_recording() -> bool:
    """Whether the current stream's work goes into a CUDA graph now, or computes as if it did (`as_recorded`)."""
    if torch.compiler.is_compiling():  # it does not trace the next questions
        return False
    return _as_recorded or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def checked_on_host(x: Tensor) -> bool:
    """Whether a check of the values of x runs on the host and raises InputError."""
    if x.is_cuda:
        return set_host_checks.value and not is_recording()
    return x.device.type == "cpu"


def use_kernels(*tensors: Tensor | None) -> bool:
    """Whether an op on these tensors runs its Triton kernels rather than its reference; None is ignored.

    Raises BackendError if `set_backend("triton")` is on but the kernels cannot run on these tensors.
    """
    meta, cuda = False, True
    for t in tensors:  # a plain loop is the fastest: each op begins with it
        if t is not None:
            if t.dtype == torch.float64:
                return False
            meta, cuda = meta or t.is_meta, cuda and t.is_cuda
    if meta:
        return True  # nothing runs
    if set_backend.value == "reference":
        return False
    if INTERPRETED or (HAS_TRITON and (cuda or pretended is not None)):
        return True
    if set_backend.value == "triton":
        raise BackendError(
            'set_backend("triton") is on, but the kernels need triton and CUDA tensors; on the CPU they run only with '
            "TRITON_INTERPRET=1 set before ligermodels is imported"
        )
    return False
