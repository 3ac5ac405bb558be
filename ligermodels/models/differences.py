"""Where two models, or two configs, differ."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn


def module_difference(ours: nn.Module, theirs: nn.Module) -> tuple[str, Any, Any] | None:
    """As `first_difference`, of two models: the types of modules of one name, their configs, and their attributes that
    are numbers, strings or None."""
    named = dict(theirs.named_modules())
    for name, module in ours.named_modules():
        twin = named.get(name)
        if twin is None:
            continue  # its tensors, if there are any, have no place in the weight map
        sharded = callable(getattr(module, "unshard", None))  # FSDP2 makes a subclass
        if type(module) is not type(twin) and not (sharded and type(twin) in type(module).__mro__):
            return name, type(module).__name__, type(twin).__name__
        for attribute, wanted in vars(twin).items():
            plain = isinstance(wanted, int | float | str | None) or is_dataclass(wanted)
            if not plain or attribute.startswith("_") or attribute in ("training", "config"):
                continue
            if getattr(module, attribute, None) != wanted:
                return f"{name}.{attribute}".lstrip("."), getattr(module, attribute, None), wanted
        found = first_difference(getattr(module, "config", None), getattr(twin, "config", None))
        if found is not None:
            return (f"{name}.config.{found[0]}".lstrip("."), *found[1:])
    return None


def first_difference(ours: Any, theirs: Any, where: str = "") -> tuple[str, Any, Any] | None:
    """The first field in which two configs differ: its path and both values; None when they are equal."""
    if ours == theirs:
        return None
    if is_dataclass(ours) and type(ours) is type(theirs):
        parts = [(f".{f.name}", getattr(ours, f.name), getattr(theirs, f.name)) for f in fields(ours) if f.compare]
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        parts = [(f"[{i}]", one, other) for i, (one, other) in enumerate(zip(ours, theirs, strict=True))]
    else:
        return where.removeprefix("."), ours, theirs
    found = (first_difference(one, other, where + name) for name, one, other in parts)
    return next((each for each in found if each is not None), (where.removeprefix("."), ours, theirs))
