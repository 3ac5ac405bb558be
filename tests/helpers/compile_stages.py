"""How far Triton compiles a launch for the compile matrix: to its shared memory, or to machine code.

Triton's front end, its GPU dialect and the allocation of shared and tensor memory decide almost all that differs
between launches: tiles, memory, dtypes. They take a third of the time; LLVM and the assembler take two thirds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import IntEnum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PORTABLE = 80, 89
"""Compute capabilities whose PTX every newer GPU runs, and whose results are kept for them."""
ALLOCATED = "ttgpuir_to_llvmir"
"""Triton's name of the point at which memory is allocated."""
SHARED = {"shared": "ttg.shared", "tmem_size": "ttg.tensor_memory_size"}
"""Field of Triton's metadata -> attribute of a module."""
BACKENDS = {"cuda": "nvidia", "hip": "amd"}
"""Triton's name of a backend in targets -> in its instrumentation."""


class Shown(IntEnum):
    """What older GPUs show of a launch on a newer one."""

    NOTHING = 0
    FITS = 1
    """It needs less than the shared memory; the code is other code."""
    RUNS = 2
    """The code is the same until memory is allocated."""
    MACHINE_CODE = 3
    """So is the machine code, or the PTX."""


class AllocatedError(Exception):
    """Ends a stage once memory is allocated."""


class Stages:
    """Triton's hook of its stages, and its instrumentation of a backend.

    GPUs share results. Two NVIDIA GPUs of one generation run the same code for a launch. A newer generation also runs
    the older code of a kernel without matrix products and tensor descriptors. If that code needs at most half of the
    newer GPU's shared memory, layouts that differ a little cannot exceed the limit, and it is not compiled again.

    The code of products differs, and AMD's code does. Their operands in shared memory have the same sizes: launches
    that need a quarter of it by the older code have needed at most half by the newer code. Capability 12 has the
    instructions of capability 8: there, half has never become more.

    Args:
        shared_memory: of the GPU, in bytes.
        cache: a folder; `cache/shared-CAPABILITY` keeps the memory of launches that newer GPUs need not compile.
    """

    def __init__(self, shared_memory: int, cache: Path) -> None:
        self._shared_memory, self._cache = shared_memory, cache
        self._module: Any = None
        self._launch, self._machine_code, self._products = "", True, False

    def begin(self, launch: str, machine_code: bool) -> None:
        """Before a launch is compiled: to the end with `machine_code`, else until its memory is allocated.

        Args:
            launch: a hash of what Triton compiles.
        """
        self._launch, self._machine_code = launch, machine_code

    def shown(self, launch: str, capability: int | None) -> Shown:
        """What older GPUs show of a launch on this one.

        Args:
            launch: a hash of what Triton compiles.
            capability: of this GPU; None for an AMD GPU.
        """
        found = Shown.NOTHING
        for older in PORTABLE:
            for name, most in ((f"{launch}-machine-code", Shown.MACHINE_CODE), (launch, Shown.RUNS)):
                path = self._cache / f"shared-{older}" / name
                if (capability is None or older < capability) and path.exists():
                    shared, products = map(int, path.read_text().split())
                    same = capability is not None and (older // 10 == capability // 10 or not products)
                    if self._margin(older, capability, bool(products)) * shared <= self._shared_memory:
                        found = max(found, most if same else Shown.FITS)
        return found

    def _margin(self, older: int, capability: int | None, products: bool) -> int:
        """The factor by which memory may grow from an older GPU's code to this one's."""
        if capability is None:
            return 4
        if older // 10 == capability // 10:
            return 1
        return 4 if products and capability // 10 != 12 else 2

    def __call__(self, *arguments: Any) -> tuple[str, str] | None:
        if not arguments:
            return ("machine code" if self._machine_code else "memory"), ""  # a part of the key in Triton's cache
        backend, stages, _, _, capability = arguments
        self._instrument(backend)
        to_ttir, to_llir = stages["ttir"], stages["llir"]

        def ttir(source: Any, metadata: dict[str, Any]) -> Any:
            module = to_ttir(source, metadata)
            text = str(module)
            self._products = "tt.dot" in text or "descriptor" in text
            return module

        def llir(module: Any, metadata: dict[str, Any]) -> Any:
            if self._machine_code:
                return to_llir(module, metadata)
            self._module = module
            try:
                to_llir(module, metadata)
            except AllocatedError:
                metadata.update({name: module.get_int_attr(attribute) for name, attribute in SHARED.items()}, name="")
                return ""
            finally:
                self._module = None
            raise AssertionError(f"Triton no longer calls its instrumentation at {ALLOCATED!r}")

        def last(stage: Callable[..., Any]) -> Callable[..., Any]:
            def binary(code: Any, metadata: dict[str, Any]) -> Any:
                made = stage(code, metadata) if code else b""
                if capability in PORTABLE:
                    folder = self._cache / f"shared-{capability}"
                    folder.mkdir(parents=True, exist_ok=True)
                    partial = folder / f"{self._launch}-{os.getpid()}"  # another process may read at any moment
                    partial.write_text(f"{metadata['shared']} {int(self._products)}")
                    partial.rename(folder / (self._launch + "-machine-code" * self._machine_code))
                return made

            return binary

        stages["ttir"], stages["llir"] = ttir, llir
        *middle, end = list(stages)[1:]
        for name in middle:
            stages[name] = unless_empty(stages[name])
        stages[end] = last(stages[end])
        return None

    def _instrument(self, backend: Any) -> None:
        """Have Triton call `patch` within its stages: an attribute of a backend until Triton 3.8, then a callback."""
        if find_spec("triton._instrumentation") is None:
            type(backend).instrumentation = self
            return
        registry: Any = import_module("triton._instrumentation")
        place = {"point": ALLOCATED.replace("_", "-"), "backend": BACKENDS[backend.target.backend]}
        registry.unregister_instrumentation(**place)
        registry.register_instrumentation(**place, callback=lambda passes: self.patch(ALLOCATED, passes, None))

    def load_dialects(self, context: Any) -> None:
        """Nothing: a part of Triton's interface."""

    def patch(self, point: str, passes: Any, context: Any) -> None:
        """Triton calls this within a stage: runs the passes until memory is allocated, and no others."""
        if self._module is not None and point == ALLOCATED:
            passes.run(self._module, point)
            raise AllocatedError


def unless_empty(stage: Callable[..., Any]) -> Callable[..., Any]:
    return lambda code, metadata: stage(code, metadata) if code else code
