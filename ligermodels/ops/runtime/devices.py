"""Properties of GPUs: ops choose kernels and launch sizes by them, never by the name of a GPU.

`pretend` makes the ops take CPU tensors for tensors on a GPU that this machine lacks. So tests record every launch, and
compile it for that GPU.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class GPU(NamedTuple):
    """Properties of a GPU.

    name: its name, for messages. capability: compute capability, or on ROCm the first two numbers of the gfx version.
    shared_memory: most bytes of shared memory per program. num_sms: number of multiprocessors. hip: whether it is an
    AMD GPU.
    """

    name: str
    capability: tuple[int, int]
    shared_memory: int
    num_sms: int
    hip: bool = False

    @property
    def has_bfloat16(self) -> bool:
        """Whether it has tensor cores for bfloat16."""
        return self.hip or self.capability >= (8, 0)

    @property
    def runs_ptx(self) -> bool:
        """Whether the kernels' inline assembly runs: PTX for arithmetic with pairs of bfloat16."""
        return not self.hip and self.has_bfloat16

    @property
    def has_float8(self) -> bool:
        """Whether it has NVIDIA's instructions for the formats float8_e4m3fn and float8_e5m2."""
        return not self.hip and self.capability >= (8, 9)

    @property
    def is_hopper(self) -> bool:
        """Whether its matrix products are WGMMA."""
        return not self.hip and self.capability[0] == 9

    @property
    def chains_products(self) -> bool:
        """Whether Triton compiles products that one after the other add to one sum, as in tf32x3, right in every loop.

        On GPUs with tensor memory (capability 10 and 11), Triton 3.6 to 3.8 overlap such products wrongly
        (triton-lang/triton#10821). On AMD GPUs there is no tf32x3."""
        return not self.hip and self.capability[0] in (8, 9, 12)


_pretended: GPU | None = None
_as_recorded = False


def pretend(gpu: GPU | None) -> None:
    """From now on, ops in this process run kernels on CPU tensors as if these were on `gpu`; None ends that.

    It is for tests that record launches instead of running them.
    """
    global _pretended
    _pretended = gpu


def pretending() -> bool:
    """Whether CPU tensors count as tensors on a GPU, see `pretend`."""
    return _pretended is not None


def is_hip() -> bool:
    """Whether the GPUs of this process are AMD's."""
    return torch.version.hip is not None if _pretended is None else _pretended.hip


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


@torch.compiler.assume_constant_result
def gpu_of(device: torch.device) -> GPU | None:
    """The GPU that `device` is, or is pretended to be; None for other devices."""
    if _pretended is not None:
        return _pretended
    return _properties(device) if device.type == "cuda" else None


@functools.cache
def _properties(device: torch.device) -> GPU:
    found = torch.cuda.get_device_properties(device)
    # Some versions of torch lack the attribute; every device has 48 KiB.
    shared_memory = int(getattr(found, "shared_memory_per_block_optin", 0) or 3 * 2**14)
    capability = torch.cuda.get_device_capability(device)
    return GPU(found.name, capability, shared_memory, found.multi_processor_count, is_hip())
