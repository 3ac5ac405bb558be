"""The first difference between two models, or between two configs."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from ligermodels.layers.sharding import is_fsdp

Difference = tuple[str, Any, Any]
"""Path of a module, attribute or config field, and the value that each of the two has there."""


def module_difference(ours: nn.Module, theirs: nn.Module) -> Difference | None:
    """The first difference between modules of the same name: in their class, config, or attributes that are numbers,
    strings or None. None if there is no difference; modules that only one model has are skipped."""
    twins = dict(theirs.named_modules())
    for name, module in ours.named_modules():
        twin = twins.get(name)
        if twin is None:
            continue  # the weight map names its tensors, if it has any
        if not _same_class(module, twin):
            return name, *_class_names(type(module), type(twin))
        for attribute, expected in vars(twin).items():
            plain = isinstance(expected, int | float | str | None) or is_dataclass(expected)
            if not plain or attribute.startswith("_") or attribute in ("training", "config"):
                continue
            value = getattr(module, attribute, None)
            if value != expected:
                return f"{name}.{attribute}".lstrip("."), value, expected
        difference = first_difference(vars(module).get("config"), vars(twin).get("config"), f"{name}.config")
        if difference is not None:
            return difference
    return None


def _class_names(ours: type, theirs: type) -> tuple[str, str]:
    """The names of two classes, with their modules where the names are equal (an nn.Linear in place of ours)."""
    if ours.__name__ != theirs.__name__:
        return ours.__name__, theirs.__name__
    return f"{ours.__module__}.{ours.__name__}", f"{theirs.__module__}.{theirs.__name__}"


def _same_class(module: nn.Module, twin: nn.Module) -> bool:
    """Whether both have one class, or `module` has the subclass that FSDP2 makes of it."""
    return type(module) is type(twin) or (is_fsdp(module) and type(twin) in type(module).__mro__)


def first_difference(ours: Any, theirs: Any, path: str = "") -> Difference | None:
    """The first field in which two configs differ, or None where they are equal.

    Args:
        ours: a config dataclass, or a value within one.
        theirs: the config or value to compare with.
        path: path of these values; the returned path begins with it.
    """
    if ours == theirs:
        return None
    alike = type(ours) is type(theirs)
    if alike and is_dataclass(ours):
        values = vars(ours), vars(theirs)
        parts = [(f".{f.name}", *(value[f.name] for value in values)) for f in fields(ours) if f.compare]
    elif alike and isinstance(ours, tuple) and len(ours) == len(theirs):
        parts = [(f"[{i}]", one, other) for i, (one, other) in enumerate(zip(ours, theirs, strict=True))]
    else:
        return path.lstrip("."), ours, theirs
    differences = (first_difference(one, other, path + name) for name, one, other in parts)
    return next((found for found in differences if found is not None), (path.lstrip("."), ours, theirs))
