"""The families by `model_type`: ours, those that a user registers, and those of installed plugins."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import entry_points
from typing import Any

from torch import nn

from ligermodels.archs import (
    arcee,
    deepseek,
    ernie,
    exaone,
    gemma,
    gemma4,
    glm,
    glm_moe,
    glm_moe_lite,
    gpt_oss,
    granite,
    llama,
    mellum,
    minimax,
    mistral,
    mistral3,
    mistral4,
    mixtral,
    olmo,
    phi,
    qwen,
    qwen3_5,
    qwen_moe,
    qwen_omni,
    qwen_vl,
    seed_oss,
    smollm,
)
from ligermodels.archs.extra_heads import require_model
from ligermodels.archs.family import Family
from ligermodels.errors import ConfigError, ConfigWarning, short

ENTRY_POINTS = "ligermodels.families"
"""Group of entry points: modules whose import registers families, imported when a `model_type` is unknown."""

MODULES = (
    llama, mistral, mixtral, gemma, gemma4, qwen, qwen_moe, qwen_vl, qwen_omni, qwen3_5, phi, olmo, granite, smollm,
    glm, glm_moe, minimax, ernie, exaone, seed_oss, arcee, mellum, gpt_oss, deepseek, glm_moe_lite,
    mistral4, mistral3,
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.model_type: family for module in MODULES for family in module.FAMILIES}


def register(family: Family) -> None:
    """Make checkpoints of `family.model_type` loadable; a user's own family is added the same way as ours."""
    FAMILIES[family.model_type] = family


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a Hugging Face config; ConfigError when its `model_type` is missing or unknown, or of heads alone.

    ConfigWarning when `architectures` names a model of another family: tensors of the two may have the same names.
    """
    model_type = config.get("model_type")
    if model_type is None:
        require_model(config)
        raise ConfigError("config.json: field 'model_type' is missing")
    if not isinstance(model_type, str):
        raise ConfigError(f"config.json: field 'model_type' must be a string, got {short(model_type)}")
    if model_type not in FAMILIES:
        for plugin in entry_points(group=ENTRY_POINTS):
            plugin.load()
    if model_type not in FAMILIES:
        require_model(config)
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(
            f"config.json: model_type {short(model_type)} is not implemented; implemented: {known}. One of your own is "
            "registered by ligermodels.archs.register, in a module that --import or an entry point names"
        )
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    named = _plain(first.partition("For")[0]) if isinstance(first, str) else ""
    if named != _plain(model_type) and named in map(_plain, FAMILIES):
        warnings.warn(
            f"config.json: architectures names {short(first)}, but model_type, which decides, is {model_type!r}; "
            "correct the one that is wrong",
            ConfigWarning,
            stacklevel=3,
        )
    return FAMILIES[model_type]


def _plain(name: str) -> str:
    """The part of a class's name, or of a `model_type`, that both have in common."""
    return name.lower().removesuffix("_text").replace("_", "")


def module_difference(ours: nn.Module, theirs: nn.Module) -> tuple[str, Any, Any] | None:
    """As `first_difference`, of two models: the types of modules of one name, their configs, and their attributes that
    are numbers, strings or None."""
    named = dict(theirs.named_modules())
    for name, module in ours.named_modules():
        twin = named.get(name)
        if twin is None:
            continue  # its tensors, if there are any, have no place in the weight map
        sharded = callable(getattr(module, "unshard", None))  # FSDP2 makes a subclass
        kind = getattr(module, "stored_as", type(module))
        if kind is not type(twin) and not (sharded and type(twin) in type(module).__mro__):
            return name, type(module).__name__, type(twin).__name__
        for attribute, wanted in vars(twin).items():
            plain = isinstance(wanted, int | float | str | None) and not attribute.startswith("_")
            if plain and attribute != "training" and getattr(module, attribute, None) != wanted:
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
