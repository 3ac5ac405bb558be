"""config.json: reading it, and writing it so that transformers 4 and 5 read the same model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ligermodels.convert.files import ADAPTER_CONFIG, HOLDS_ADAPTER
from ligermodels.convert.input_files import check_depth, read_json_object
from ligermodels.convert.json_values import is_int, is_list_of, is_object
from ligermodels.convert.rope_settings import THETA, rope_fields
from ligermodels.convert.weight_map import FLOAT_NAMES, float_dtype
from ligermodels.errors import ConfigError
from ligermodels.errors import short as short

RUN = ("recipe.yaml", "content.json")
"""Files that a training run writes at its start."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`.

    Raises:
        ConfigError: the file is missing, not JSON, or holds no object.
    """
    hint = f"is this the folder of {'an adapter' if path.name == ADAPTER_CONFIG else 'a checkpoint'}?"
    if path.name == "config.json" and (path.parent / ADAPTER_CONFIG).is_file():
        hint = f"the folder {HOLDS_ADAPTER}"
    elif path.name == "config.json" and all((path.parent / name).is_file() for name in RUN):
        hint = "the folder holds a run that has not written its result; `train --resume --out FOLDER` continues it"
    return read_json_object(path, ConfigError, f"; {hint}")


def config_in(folder: Path) -> dict[str, Any]:
    """config.json in a folder; empty if there is none."""
    path = folder / "config.json"
    return read_json(path) if path.is_file() else {}


def as_config(config: Mapping[Any, Any]) -> dict[str, Any]:
    """A config that a caller gives, as a dict of its own: neither changes the other.

    Raises:
        ConfigError: a name of a field is no string, or values are nested too deep or in themselves.
    """
    for name in config:
        if not isinstance(name, str):
            raise ConfigError(f"config: the keys of a config are names of fields, got {short(name)}")
    fields = dict(config)
    try:
        check_depth(fields)
    except ValueError as error:
        raise ConfigError(f"config: {error}") from None
    return copy.deepcopy(fields)


THINKER, TEXT = "thinker_config", "text_config"
"""Fields in which a multimodal config nests the config of the language model. Configs of Qwen's Omni models nest
TEXT within THINKER."""


def nested_configs(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """`config` and the configs nested in it, down to the language model's config, which is last.

    The keys are "" for `config`, then the fields THINKER and TEXT, where they exist.
    """
    configs = {"": config}
    for field in (THINKER, TEXT):
        inner = next(reversed(configs.values())).get(field)
        if is_object(inner):
            configs[field] = inner
    return configs


def joined(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The config that `nested_configs` splits into `configs`."""
    inner: dict[str, Any] = {}
    for field in reversed(list(configs)):
        inner = {field: {**configs[field], **inner}}
    return dict(inner[""])


def named_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that a config names in `dtype`, or in the older `torch_dtype`; None if it names none.

    A config without one may have it in the language model's config (Qwen3-VL).

    Raises:
        ConfigError: the field names no dtype of FLOATS.
    """
    levels = [(at, each, field) for at, each in nested_configs(config).items() for field in ("dtype", "torch_dtype")]
    named = ((each[field], f"{at}.{field}".lstrip(".")) for at, each, field in levels if each.get(field) is not None)
    name, field = next(named, (None, ""))
    if name is None:
        return None
    if (dtype := float_dtype(name)) is None:
        raise ConfigError(f"config.json: {field}: {short(name)} is not one of {', '.join(FLOAT_NAMES)}")
    return dtype


def dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """`named_dtype`; float32 if the config names none."""
    return named_dtype(config) or torch.float32


def are_token_ids(value: Any, *, several: bool) -> bool:
    """Whether `value` is a token id, null or, if `several`, a list of token ids.

    Ids outside the vocabulary count, and so do negative ids, which published checkpoints use for "no token".
    """
    return value is None or _is_token_id(value) or (several and is_list_of(value, _is_token_id))


def _is_token_id(value: Any) -> bool:
    return is_int(value) and abs(value) < 2**31


def check_generation(config: Mapping[str, Any], where: str = "generation_config.json") -> None:
    """ConfigError, naming the file `where`, if a token id of a generation config is none."""
    for name, several in (("eos_token_id", True), ("pad_token_id", False)):
        if not are_token_ids(config.get(name), several=several):
            raise ConfigError(
                f"{where}: field {name!r} must be a token's id{' or a list of them' * several}, got "
                f"{short(config[name])}; correct it, or remove it to use the one of config.json"
            )


def for_export(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    default_theta: float | Mapping[str, Any] = THETA,
    attribute_map: Mapping[str, str | None] | None = None,
) -> dict[str, Any]:
    """`config` as it is written, for readers of both schemas: with the dtype, and with rotary settings in both schemas.

    A reader that finds its schema's rotary settings missing would use its default base without a warning.

    Args:
        config: the Hugging Face config; all its fields are kept, except those that `attribute_map` drops.
        dtype: dtype of the weights.
        default_theta: the rotary base of a config that names none, or a dict as in `rope_parameters`.
        attribute_map: name of a field in transformers 4 -> its name in transformers 5. The field is written under both
            names. None instead of a name drops a field that no release reads for this model.
    """
    name = str(dtype).removeprefix("torch.")
    exported = {**config, "dtype": name, "torch_dtype": name}
    names = attribute_map or {}
    for older, newer in names.items():
        if newer is not None and config.get(older) is None and config.get(newer) is not None:
            exported[older] = config[newer]
    exported |= rope_fields(config, default_theta)
    return {field: value for field, value in exported.items() if names.get(field, field) is not None}
