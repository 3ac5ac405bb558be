"""Import paths of an earlier release: importing one warns and gives the module at its new path."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED: Mapping[str, str] = {
    **{f"archs.{name}": f"models.{name}" for name in (
        "causal_lm", "decoder", "export", "extra_heads", "generation", "inputs", "native", "output", "state_dict",
        "untie",
    )},
    **{f"archs.{name}": f"adapt.{name}" for name in (
        "adapter", "exclusion", "float8", "float8_agreement", "lora", "patterns", "quantize", "quantized_loading",
    )},
    "archs.family": "models.families",
    "archs.mtp": "models.mtp_format",
    "archs.generation_options": "generation.options",
    "speculative.distillation": "models.reference_kl",
}  # fmt: skip
"""Module of an earlier release -> module that has its names now, both within the package."""


class _MovedModules(MetaPathFinder, Loader):
    """Finds the modules of MOVED. An import of an old path gives the very module of the new one."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the module `fullname` if it is a moved one, or None. `path` and `target` are not used."""
        old = fullname.removeprefix(f"{self.package}.")
        return ModuleSpec(fullname, self, origin=f"{self.package}.{MOVED[old]}") if old in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module at the new path, after a DeprecationWarning."""
        new = str(spec.origin)
        warnings.warn(f"{spec.name} is now {new}; change the import", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run again; the import system has set `__spec__` to the old path's."""
        module.__spec__ = self.own_spec


def redirect(package: str) -> None:
    """Make the old import paths of `package` work."""
    sys.meta_path.append(_MovedModules(package))
