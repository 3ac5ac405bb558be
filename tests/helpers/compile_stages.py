"""How far Triton compiles a launch for the compile matrix: to its shared memory, or to machine code.

Triton's front end, its GPU dialect and the allocation of shared and tensor memory decide almost all that differs
between launches: tiles, memory, dtypes. They take a third of the time; LLVM and the assembler take two thirds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

PORTABLE = 80, 89
"""Compute capabilities whose PTX every newer GPU runs."""
ALLOCATED = "ttgpuir_to_llvmir"
"""Triton's name of the point at which memory is allocated."""
SHARED = {"shared": "ttg.shared", "tmem_size": "ttg.tensor_memory_size"}
"""Field of Triton's metadata -> attribute of a module."""


class AllocatedError(Exception):
    """Ends a stage once memory is allocated."""


class Stages:
    """Triton's hook of its stages, and its instrumentation of a backend.

    machine_code: whether the next launch is compiled to the end, or until its memory is allocated.

    NVIDIA GPUs share results. Two GPUs of one generation run the same code for a launch. A newer generation also runs
    the older code of a kernel without matrix products and tensor descriptors. If that code needs at most half of the
    newer GPU's shared memory, layouts that differ a little cannot exceed the limit, and it is not compiled again.

    Args:
        shared_memory: of the GPU, in bytes.
        cache: a folder; `cache/shared-CAPABILITY` keeps the memory of launches that newer GPUs need not compile.
    """

    def __init__(self, shared_memory: int, cache: Path) -> None:
        self.machine_code = True
        self._shared_memory, self._cache = shared_memory, cache
        self._module: Any = None

    def __call__(self, *arguments: Any) -> tuple[str, str] | None:
        if not arguments:
            return ("machine code" if self.machine_code else "memory"), ""  # a part of the key in Triton's cache
        backend, stages, options, _, capability = arguments
        type(backend).instrumentation = self
        record: list[Path] = []  # of this launch, if newer GPUs may run it
        to_ttir, to_llir = stages["ttir"], stages["llir"]

        def ttir(source: Any, metadata: dict[str, Any]) -> Any:
            module = to_ttir(source, metadata)
            if capability is None:
                return module  # AMD
            text = str(module)
            launch = metadata["triton_version"], self.machine_code, options.num_warps, options.num_stages, text
            name = hashlib.sha256(repr(launch).encode()).hexdigest()
            products = "tt.dot" in text or "descriptor" in text
            for older in PORTABLE:
                path = self._cache / f"shared-{older}" / name
                if older == capability:
                    record.append(path)
                elif self._covers(path, older, capability, products):
                    metadata.update(shared=int(path.read_text()), tmem_size=None, name="")
                    return ""
            return module

        def llir(module: Any, metadata: dict[str, Any]) -> Any:
            if self.machine_code:
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
                for path in record:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(str(metadata["shared"]))
                return made

            return binary

        stages["ttir"], stages["llir"] = ttir, llir
        *middle, end = list(stages)[1:]
        for name in middle:
            stages[name] = unless_empty(stages[name])
        stages[end] = last(stages[end])
        return None

    def _covers(self, record: Path, older: int, capability: int, products: bool) -> bool:
        if older > capability or not record.exists():
            return False
        if older // 10 == capability // 10:
            return True
        return not products and 2 * int(record.read_text()) <= self._shared_memory

    def load_dialects(self, context: Any) -> None:
        """Nothing: a part of Triton's interface."""

    def patch(self, point: str, passes: Any, context: Any) -> None:
        """Triton calls this within a stage: runs the passes until memory is allocated, and no others."""
        if self._module is not None and point == ALLOCATED:
            passes.run(self._module, point)
            raise AllocatedError


def unless_empty(stage: Callable[..., Any]) -> Callable[..., Any]:
    return lambda code, metadata: stage(code, metadata) if code else code
