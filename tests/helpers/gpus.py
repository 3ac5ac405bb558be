"""GPUs for which every kernel is compiled, and the launches that ops make on each of them, without a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ligermodels.ops.runtime import devices
from ligermodels.ops.runtime.devices import GPU

KIB = 1024
GPUS = {
    "sm_80": GPU("NVIDIA A100", (8, 0), 163 * KIB, 108),
    "sm_89": GPU("NVIDIA L40S", (8, 9), 99 * KIB, 142),
    "sm_90": GPU("NVIDIA H100", (9, 0), 227 * KIB, 132),
    "sm_100": GPU("NVIDIA B200", (10, 0), 227 * KIB, 148),
    "sm_120": GPU("NVIDIA GeForce RTX 5090", (12, 0), 99 * KIB, 170),
    "gfx942": GPU("AMD Instinct MI300X", (9, 4), 64 * KIB, 304, hip=True),
}


class Launch(NamedTuple):
    """A kernel as it would be compiled for a launch: the arguments of triton.compiler.ASTSource, and the options."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]
    grid: Any

    @property
    def name(self) -> str:
        return f"{self.kernel.fn.__module__}.{self.kernel.fn.__qualname__}"


def target_of(name: str) -> Any:
    from triton.backends.compiler import GPUTarget

    gpu = GPUS[name]
    return GPUTarget("hip", name, 64) if gpu.hip else GPUTarget("cuda", 10 * gpu.capability[0] + gpu.capability[1], 32)


class Driver:
    """A driver of Triton's that only names its target."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def recorded(name: str) -> Iterator[list[Launch]]:
    """Every launch within, each kind once, on the named GPU; no kernel runs. Ends with the process."""
    import triton

    launches: dict[Any, Launch] = {}

    def record(*, key: Any, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel = fn.jit_function
        options = {name: compile[name] for name in ("num_warps", "num_stages", "num_ctas")}
        launch = Launch(kernel, compile["signature"], compile["constants"], compile["configs"][0], options, None)
        launches.setdefault((launch.name, str(key)), launch)
        return True

    torch.cuda.current_device = lambda: 0
    triton.runtime.driver.set_active(Driver(target_of(name)))
    triton.knobs.runtime.jit_cache_hook = record
    devices.pretend(GPUS[name])
    found: list[Launch] = []
    yield found
    found += launches.values()
    devices.pretend(None)
    triton.knobs.runtime.jit_cache_hook = None


def compiled(launch: Launch, target: Any) -> int:
    """Bytes of shared memory."""
    from triton.compiler import ASTSource, compile

    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    return compile(source, target=target, options=launch.options).metadata.shared
