"""Rotary settings of config.json in the schemas of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligermodels.convert.json_values import first_value, is_object, object_field
from ligermodels.errors import ConfigError

FULL = "full_attention"
LAYER_THETAS = {FULL: "rope_theta", "sliding_attention": "rope_local_base_freq"}
"""Layer type -> field with its rotary base in the v4 schema, where `rope_scaling` is for full attention only."""

OLDER_ROPE_TYPES = {"su": "longrope"}
"""Older name of a rope type -> its present name."""

THETA = 10_000.0
"""Rotary base where neither the config nor the family names one."""


def rope_parameters(
    config: Mapping[str, Any], default_theta: float | Mapping[str, Any] = THETA, layer_type: str | None = None
) -> dict[str, Any]:
    """The rotary settings of a config, from either schema, as one dict with `rope_type` and `rope_theta`.

    `rope_scaling` (v4) overrides `rope_parameters` (v5), as in transformers. A setting within these overrides one at
    the top level of the config, and that overrides `default_theta`. One exception: without a `layer_type`, the top
    level's `original_max_position_embeddings` overrides the nested one (Phi-3).

    Args:
        config: the Hugging Face config.
        default_theta: the rotary base of a config that names none. Or one of these dicts: layer type -> base; layer
            type -> settings, used if the config has no `rope_parameters`; or, with a key "rope_type", the settings of a
            config that has none. In settings "default_theta" is the base of a config's settings without `rope_theta`.
        layer_type: layers that the settings are for, such as "full_attention", in models with a rope for each layer
            type. The v5 schema nests their settings under this name; LAYER_THETAS has the fields of the v4 schema.

    Raises:
        ConfigError: settings are not objects, or are nested by layer type where `layer_type` is None, or are not nested
            where it is given.
    """
    old, new = (object_field(config, name) for name in ("rope_scaling", "rope_parameters"))
    defaults, theta = _defaults(default_theta, layer_type or FULL)
    if not new and (layer_types(defaults) or (not old and config.get("rope_parameters") is None)):
        new = defaults
    settings = _select(old, new, layer_type)
    settings.setdefault("rope_type", "default")
    top_level_theta = config.get(LAYER_THETAS.get(layer_type or FULL, "rope_theta"))
    settings["rope_theta"] = first_value(settings.get("rope_theta"), top_level_theta, theta)
    part = "partial_rotary_factor"
    resolved = {part: first_value(settings.get(part), config.get(part))}
    if settings["rope_type"] in ("llama3", "yarn", "deepseek_yarn", "longrope"):
        name = "original_max_position_embeddings"
        resolved[name] = first_value(config.get(name) if layer_type is None else None, settings.get(name))
    return {**settings, **{name: value for name, value in resolved.items() if value is not None}}


def rope_fields(config: Mapping[str, Any], default_theta: float | Mapping[str, Any] = THETA) -> dict[str, Any]:
    """The fields that state the rotary settings of `config` in both schemas.

    The v4 schema cannot state a scaling of layers other than full attention, nor an explicit `factor` of longrope. A
    config whose base is null in `rope_parameters` keeps its own fields: it has no rotation (OLMo Hybrid).
    """
    if has_null_theta(config):
        return {}
    by_default = default_theta if is_object(default_theta) and "rope_type" not in default_theta else {}
    types = dict.fromkeys([*by_default, *layer_types(object_field(config, "rope_parameters"))])
    if types:
        by_type = {name: rope_parameters(config, default_theta, name) for name in types}
        fields = {LAYER_THETAS[name]: by_type[name]["rope_theta"] for name in types if name in LAYER_THETAS}
        main = rope_parameters(config, default_theta, FULL)
        fields["rope_parameters"] = by_type
    else:
        main = rope_parameters(config, default_theta)
        if main["rope_type"] == "mrope":  # Qwen2-VL; not all readers know the name, and they read its other settings
            main["rope_type"] = "default"
        fields = {name: main[name] for name in ("rope_theta", "partial_rotary_factor") if name in main}
        fields["rope_parameters"] = main
    scaling = {name: value for name, value in main.items() if name not in ("rope_theta", "partial_rotary_factor")}
    if main["rope_type"] == "longrope":
        # For transformers 4, Phi-3's scaling has exactly a "type" and the two lists of factors.
        scaling["type"] = scaling.pop("rope_type")
        original = scaling.pop("original_max_position_embeddings", None)
        if original is not None:
            fields["original_max_position_embeddings"] = original
    fields["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    return fields


def has_null_theta(config: Mapping[str, Any]) -> bool:
    """Whether `rope_parameters` of a config has null as its rotary base, and the config names no other."""
    settings = config.get("rope_parameters")
    is_null = is_object(settings) and "rope_theta" in settings and settings["rope_theta"] is None
    return is_null and config.get("rope_theta") is None


def layer_types(settings: Mapping[str, Any]) -> list[str]:
    """Layer types by which `settings` are nested: keys with objects as values. No setting of a rope is an object."""
    return [name for name, value in settings.items() if is_object(value)]


def _defaults(default_theta: float | Mapping[str, Any], layer_type: str) -> tuple[Mapping[str, Any], Any]:
    """Settings of a config that has none (empty if the family has no such defaults), and the default base."""
    if not is_object(default_theta):
        return {}, default_theta
    if "rope_type" in default_theta:
        return _without_base(default_theta), default_theta.get("default_theta", THETA)
    default = default_theta.get(layer_type, THETA)
    if not is_object(default):
        return {}, default
    by_type = {name: _without_base(settings) for name, settings in default_theta.items()}
    return by_type, first_value(default.get("default_theta"), default["rope_theta"])


def _without_base(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` without the base of other settings."""
    return {name: value for name, value in settings.items() if name != "default_theta"}


def _select(old: Mapping[str, Any], new: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    """The settings for `layer_type` in `rope_scaling` (old) and `rope_parameters` (new)."""
    nested = layer_types(new)
    if layer_type is None:
        nested = nested or layer_types(old) or [name for name in new if name in LAYER_THETAS]
        if nested:
            raise ConfigError(f"rope_parameters: one rope for all layers is implemented, got one for each of {nested}")
        return _renamed(old or new)
    if types := layer_types(old):
        raise ConfigError(f"rope_scaling: holds settings for each of {types}, which are read in rope_parameters alone")
    if new and not nested:
        raise ConfigError(f"rope_parameters: must hold an object for each layer type, such as {layer_type!r}")
    settings = _renamed(object_field(new, layer_type, "rope_parameters."))
    return _renamed({**settings, **_renamed(old)}) if layer_type == FULL else settings


def _renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with their type, if there is one, under `rope_type` and with its present name.

    ConfigError if the type is null: its other settings would have no effect.
    """
    renamed = {name: value for name, value in settings.items() if name not in ("type", "rope_type")}
    types = [settings[name] for name in ("rope_type", "type") if name in settings]
    rope_type = first_value(*types)
    if types and rope_type is None:
        raise ConfigError("config.json: rope_parameters: rope_type is null; name a type, such as 'default'")
    if types:
        renamed["rope_type"] = OLDER_ROPE_TYPES.get(str(rope_type), rope_type)
    return renamed
