"""The registry of families by `model_type`: the package's own, registered by users, and installed plugins."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import ConfigError, ConfigWarning, short
from ligermodels.models.decoder import DecoderConfig
from ligermodels.models.extra_heads import require_model

OWN_FAMILIES = "ligermodels.archs.registry"
"""The module whose import registers the families of this package; imported when a `model_type` is unknown."""
ENTRY_POINTS = "ligermodels.families"
"""Group of entry points: modules whose import registers families, imported when a `model_type` is unknown."""


class FamilyLike(Protocol):
    """The interface of a family that models use. `archs.Family` implements and documents it."""

    @property
    def model_type(self) -> str: ...
    @property
    def decoder_config(self) -> Callable[[Mapping[str, Any]], DecoderConfig]: ...
    @property
    def layouts(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def default_theta(self) -> float | Mapping[str, Any]: ...
    @property
    def text(self) -> Callable[[Mapping[str, Any]], dict[str, Any]] | None: ...
    @property
    def attribute_map(self) -> Mapping[str, str | None]: ...
    @property
    def mtp(self) -> Any: ...
    def weight_maps(self, config: DecoderConfig) -> list[WeightMap]: ...


FAMILIES: dict[str, FamilyLike] = {}


def register(family: FamilyLike) -> None:
    """Make checkpoints of `family.model_type` loadable; a user's own family is added the same way as ours."""
    FAMILIES[family.model_type] = family


def family_of(config: Mapping[str, Any]) -> FamilyLike:
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
        importlib.import_module(OWN_FAMILIES)
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
