"""config.json: reading it, and writing what readers of either schema understand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from ligermodels.convert.files import ADAPTER_CONFIG
from ligermodels.convert.input_files import check_depth, read_json_object
from ligermodels.convert.weight_map import FLOATS
from ligermodels.errors import ConfigError
from ligermodels.errors import short as short


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ConfigError names the file when it is missing, not JSON, or not an object."""
    hint = "is this the folder of what you want to open?"
    if path.name == "config.json" and (path.parent / ADAPTER_CONFIG).is_file():
        hint = "the folder holds an adapter: open its base model, then the adapter with load_adapter, or --adapter"
    return read_json_object(path, ConfigError, f"; {hint}")


def as_config(config: Mapping[Any, Any]) -> dict[str, Any]:
    """a config that is a dict; ConfigError for fields whose names are no text, and for nesting without end."""
    for name in config:
        if not isinstance(name, str):
            raise ConfigError(f"config: the keys of a config are names of fields, got {short(name)}")
    found = dict(config)
    try:
        check_depth(found)
    except ValueError as error:
        raise ConfigError(f"config: {error}") from None
    return found


def as_object(value: Any) -> Mapping[str, Any]:
    """`value` if it is a JSON object; otherwise an empty one."""
    return value if isinstance(value, Mapping) else {}


def is_int(value: Any) -> bool:
    """Whether `value` is a whole number; True and False are none, although Python's `bool` is an `int`."""
    return isinstance(value, int) and not isinstance(value, bool)


THINKER, TEXT = "thinker_config", "text_config"
"""Fields in which a config of several models holds that of the one that reads and writes text: the first, where there
is one (Qwen's Omni models), holds the second."""


def nested_configs(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """`config` (under "") and those within it, up to the language model's, each under the field that holds it."""
    found = {"": config}
    for name in (THINKER, TEXT):
        within = next(reversed(found.values())).get(name)
        found |= {name: within} if isinstance(within, Mapping) else {}
    return found


def joined(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The config of which these are the `nested_configs`."""
    found: dict[str, Any] = {}
    for field in reversed(list(configs)):
        found = {field: {**configs[field], **found}}
    return dict(found[""])


def dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype a config names (`dtype`, or the older `torch_dtype`); float32 when it names none.

    Raises ConfigError for one that is not in FLOATS.
    """
    field = "torch_dtype" if config.get("dtype") is None else "dtype"
    name = _first(config.get(field), "float32")
    dtype = getattr(torch, str(name).removeprefix("torch."), None) if isinstance(name, str | torch.dtype) else None
    if dtype not in FLOATS:
        known = ", ".join(sorted(str(each).removeprefix("torch.") for each in FLOATS))
        raise ConfigError(f"config.json: {field}: {short(name)} is not one of {known}")
    return dtype


def are_token_ids(found: Any, *, several: bool) -> bool:
    """Whether it is a token's id, or with `several` a list of them, or null. Published checkpoints have ids outside the
    vocabulary, and negative ones that stand for none."""
    ids = found if several and isinstance(found, list) else [] if found is None else [found]
    return all(isinstance(token, int) and not isinstance(token, bool) and abs(token) < 2**31 for token in ids)


def check_generation(config: Mapping[str, Any], where: str = "generation_config.json") -> None:
    """ConfigError unless the token ids of a generation_config.json are ids, as far as they are there."""
    for name, several in (("eos_token_id", True), ("pad_token_id", False)):
        if not are_token_ids(config.get(name), several=several):
            raise ConfigError(
                f"{where}: field {name!r} must be a token's id{' or a list of them' * several}, got "
                f"{short(config[name])}; correct it, or remove it to have that of config.json"
            )


FULL = "full_attention"
LAYER_THETAS = {FULL: "rope_theta", "sliding_attention": "rope_local_base_freq"}
"""Where the v4 schema keeps the base of each layer type. Its `rope_scaling` is that of full attention alone."""

OLDER_ROPE_TYPES = {"su": "longrope"}
"""Older name of a rope type -> its present one."""


def rope_parameters(
    config: Mapping[str, Any], default_theta: float | Mapping[str, Any] = 10_000.0, layer_type: str | None = None
) -> dict[str, Any]:
    """The rope settings of either schema as one dict with `rope_type` and `rope_theta`.

    `rope_scaling` (v4) wins over `rope_parameters` (v5) when both are set, as in transformers; a setting inside the
    dict wins over one at the top level, and that over `default_theta`. But an `original_max_position_embeddings` at the
    top level wins (Phi-3).

    With a `layer_type`, such as "full_attention", the settings are those of its layers: its entry of `rope_parameters`,
    and LAYER_THETAS say how the v4 schema writes them. `default_theta` may have one base for each layer type; or be,
    with its own "rope_type", all settings of a config that has none, and with a "default_theta" the base where neither
    they nor the config name one; or have these for each layer type.

    Raises ConfigError where the settings are not objects, or are by layer type where they should not be, or reversed.
    """
    old, new = (_object(config, name) for name in ("rope_scaling", "rope_parameters"))
    if isinstance(of_type := isinstance(default_theta, Mapping) and default_theta.get(layer_type or FULL), Mapping):
        new, default_theta = new or cast(Mapping[str, Any], default_theta), of_type["rope_theta"]
    nested = _layer_types(new)
    if _is_rope(default_theta):
        whole = dict(cast(Mapping[str, Any], default_theta))
        default_theta = whole.pop("default_theta", 10_000.0)
        new = whole if config.get("rope_parameters") is None and not old else new
    if layer_type is None:
        if nested := nested or _layer_types(old):
            raise ConfigError(f"rope_parameters: one rope for all layers is implemented, got one for each of {nested}")
        found = old or new
    elif new and not nested:
        raise ConfigError(f"rope_parameters: must hold an object for each layer type, such as {layer_type!r}")
    else:
        found = _object(new, layer_type, "rope_parameters.")
        if layer_type == FULL:
            found = {**_settings(found), **_settings(old)}
    settings = _settings(found)
    settings.setdefault("rope_type", "default")
    if isinstance(default_theta, Mapping):
        default_theta = default_theta.get(layer_type or FULL, 10_000.0)
    theta = LAYER_THETAS.get(layer_type or FULL, "rope_theta")
    settings["rope_theta"] = _first(settings.get("rope_theta"), config.get(theta), default_theta)
    part = "partial_rotary_factor"
    resolved = {part: _first(settings.get(part), config.get(part))}
    if settings["rope_type"] in ("llama3", "yarn", "longrope"):
        name = "original_max_position_embeddings"
        resolved[name] = _first(config.get(name) if layer_type is None else None, settings.get(name))
    settings |= {name: value for name, value in resolved.items() if value is not None}
    return settings


def _is_rope(default_theta: float | Mapping[str, Any]) -> bool:
    """Whether these are the settings of a rope, rather than one base, or one for each layer type."""
    return isinstance(default_theta, Mapping) and "rope_type" in default_theta


def _object(config: Mapping[str, Any], name: str, where: str = "") -> Mapping[str, Any]:
    found = config.get(name) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where}{name}: must be an object, got {short(found)}")
    return found


def _layer_types(settings: Mapping[str, Any]) -> list[str]:
    """The keys under which `settings` nests others: no setting of a rope is itself an object."""
    return [name for name, value in settings.items() if isinstance(value, Mapping)]


def _settings(found: Mapping[str, Any]) -> dict[str, Any]:
    """`found` with its type, if it names one, under `rope_type` and by today's name."""
    settings = {name: value for name, value in found.items() if name not in ("type", "rope_type")}
    kind = found.get("rope_type") or found.get("type")
    if kind:
        settings["rope_type"] = OLDER_ROPE_TYPES.get(kind, kind) if isinstance(kind, str) else kind
    return settings


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)


def for_export(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    default_theta: float | Mapping[str, Any] = 10_000.0,
    attribute_map: Mapping[str, str | None] | None = None,
) -> dict[str, Any]:
    """`config` with every field kept, the dtype set, and rope settings in both schemas.

    A reader of one schema would otherwise take the default theta silently. `default_theta` as of `rope_parameters`.
    The v4 schema has no scaling of other layers than those of full attention, and no explicit `factor` of longrope.
    `attribute_map`: v4's name of a field -> that of v5, which v4 would not read; or None, for a field that no release
    reads for this model, and that is left out.
    """
    name = str(dtype).removeprefix("torch.")
    exported = {**config, "dtype": name, "torch_dtype": name}
    for older, newer in (attribute_map or {}).items():
        if newer is not None and config.get(older) is None and config.get(newer) is not None:
            exported[older] = config[newer]
    thetas = default_theta if isinstance(default_theta, Mapping) and not _is_rope(default_theta) else {}
    layer_types = dict.fromkeys([*thetas, *_layer_types(_object(config, "rope_parameters"))])
    if layer_types:
        by_type = {each: rope_parameters(config, default_theta, each) for each in layer_types}
        exported |= {LAYER_THETAS[each]: by_type[each]["rope_theta"] for each in layer_types if each in LAYER_THETAS}
        main = rope_parameters(config, default_theta, FULL)
        exported["rope_parameters"] = by_type
    else:
        main = rope_parameters(config, default_theta)
        if main["rope_type"] == "mrope":  # Qwen2-VL: not all readers know the name; its further settings tell.
            main["rope_type"] = "default"
        exported |= {name: main[name] for name in ("rope_theta", "partial_rotary_factor") if name in main}
        exported["rope_parameters"] = main
    scaling = {name: value for name, value in main.items() if name not in ("rope_theta", "partial_rotary_factor")}
    if main["rope_type"] == "longrope":
        # What v4 reads: Phi-3 takes exactly a type, under its older name, and the two lists.
        scaling["type"] = scaling.pop("rope_type")
        original = scaling.pop("original_max_position_embeddings", None)
        if original is not None:
            exported["original_max_position_embeddings"] = original
    exported["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    unread = [older for older, newer in (attribute_map or {}).items() if newer is None]
    return {name: value for name, value in exported.items() if name not in unread}
