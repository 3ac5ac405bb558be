"""Properties of GPUs, launch sizes by them, and their random generators: ops choose kernels by properties, never by the
name of a GPU."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ligermodels.ops.runtime import dispatch


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
    def has_pdl(self) -> bool:
        """Whether it has CUDA's programmatic dependent launch: kernels that start before the previous one ends."""
        return not self.hip and self.capability >= (9, 0)

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


def is_hip() -> bool:
    """Whether the GPUs of this process are AMD's."""
    return torch.version.hip is not None if dispatch.pretended is None else dispatch.pretended.hip


@contextmanager
def own_random_numbers(device: torch.device | str, seed: int | None = None) -> Iterator[None]:
    """Context manager after which torch's random generators are as before.

    Args:
        device: device of the computation.
        seed: seed of all generators within; None leaves them as they are.
    """
    # Of all GPUs, because `torch.manual_seed` seeds all.
    has_gpus = torch.device(device).type == "cuda" or torch.cuda.is_initialized()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if has_gpus else [], device_type="cuda"):
            if seed is not None:
                torch.manual_seed(seed)
            yield
    finally:
        if not has_gpus:  # `torch.manual_seed` also seeds the GPUs that the program uses later
            torch.cuda.manual_seed_all(torch.initial_seed())


@torch.compiler.assume_constant_result
def gpu_of(device: torch.device) -> GPU | None:
    """The GPU that `device` is, or is pretended to be; None for other devices."""
    if dispatch.pretended is not None:
        return dispatch.pretended
    return _properties(device) if device.type == "cuda" else None


@functools.cache
def _properties(device: torch.device) -> GPU:
    found = torch.cuda.get_device_properties(device)
    # Some versions of torch lack the attribute; every device has 48 KiB.
    shared_memory = int(getattr(found, "shared_memory_per_block_optin", 0) or 3 * 2**14)
    capability = torch.cuda.get_device_capability(device)
    return GPU(found.name, capability, shared_memory, found.multi_processor_count, is_hip())


def num_sms(device: torch.device) -> int:
    """The number of multiprocessors of the device, or a small fixed number for the interpreter."""
    gpu = gpu_of(device)
    return 2 if gpu is None else gpu.num_sms


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may use on the device, minus a reserve for the compiler."""
    gpu = gpu_of(device)
    return 2**16 if gpu is None else gpu.shared_memory - 2**13


def pipeline_stages(device: torch.device, most: int, tile_bytes: int, held_bytes: int = 0) -> int:
    """Pipeline stages of a loop on a device that the shared memory allows.

    Args:
        device: the device of the kernel.
        most: stages where there is enough shared memory.
        tile_bytes: bytes of shared memory that each stage after the first holds.
        held_bytes: bytes of shared memory that the kernel holds beside the stages.
    """
    return 1 + min(max(shared_memory(device) - held_bytes, 0) // tile_bytes, most - 1)


def power_of_2_above(n: int) -> int:
    """The smallest power of two that is at least n and at least 1."""
    return 1 << max(n - 1, 0).bit_length()
