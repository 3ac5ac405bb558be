"""config.json: reading it, and writing what readers of either schema understand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ligermodels.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ConfigError names the file when it is missing, not JSON, or not an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a checkpoint folder needs a {path.name}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds a {type(content).__name__}, not an object")
    return content


def dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype a config names (`dtype`, or the older `torch_dtype`); float32 when it names none."""
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype: {name!r} is not a torch dtype")
    return dtype


def rope_parameters(config: Mapping[str, Any], default_theta: float = 10_000.0) -> dict[str, Any]:
    """The rope settings of either schema as one dict with `rope_type` and `rope_theta`.

    `rope_scaling` (v4) wins over `rope_parameters` (v5) when both are set, as in transformers; a setting inside the
    dict wins over one at the top level, and that over `default_theta`.
    """
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"rope_parameters: must be an object, got {found!r}")
    settings = {key: value for key, value in found.items() if key != "type"}
    settings["rope_type"] = found.get("rope_type") or found.get("type") or "default"
    theta = found.get("rope_theta")
    theta = config.get("rope_theta") if theta is None else theta
    settings["rope_theta"] = default_theta if theta is None else theta
    return settings


def for_export(config: Mapping[str, Any], dtype: torch.dtype, default_theta: float = 10_000.0) -> dict[str, Any]:
    """`config` with every field kept, the dtype set, and rope settings in both schemas.

    A reader that knows only one schema would otherwise fall back to the default theta without a word.
    """
    rope = rope_parameters(config, default_theta)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    name = str(dtype).removeprefix("torch.")
    return {
        **config,
        "dtype": name,
        "torch_dtype": name,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": rope,
    }
