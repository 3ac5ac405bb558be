"""The base model that an adapter names, and whether it is of the family of another model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ligermodels.convert import hub
from ligermodels.convert.config_json import read_json
from ligermodels.convert.files import ADAPTER_CONFIG
from ligermodels.errors import CheckpointError, ConfigError, HubError, short
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.families import FAMILIES


def check_family(model: CausalLM, config: Mapping[str, Any]) -> None:
    """Raise ConfigError if the base model of an adapter is of another family than `model`.

    Layers of two families may have the same names and shapes, so the tensors do not show it. A base model that is
    neither a local folder nor in the hub's cache is not checked.
    """
    spec, name = model.require_export_spec(), config.get("base_model_name_or_path")
    base: Mapping[str, Any] = {}
    with suppress(CheckpointError, ConfigError, HubError):
        if isinstance(name, str) and name:
            base = read_json(hub.resolve(name, weights=False, local_files_only=True) / "config.json")
    configs = [spec.hf_config] if spec.source is None else [spec.hf_config, spec.source.hf_config]
    if "model_type" in base and not _types(base) & set[str]().union(*map(_types, configs)):
        raise ConfigError(
            f"{ADAPTER_CONFIG}: base_model_name_or_path: {short(name)} has model_type {short(base['model_type'])}, but "
            f"this model has {short(spec.hf_config['model_type'])}; give the adapter its own base model, or correct "
            "the field"
        )


def _types(config: Mapping[str, Any]) -> set[str]:
    """The `model_type` of a checkpoint, and of its language model alone."""
    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is None or family.text is None:
        return {model_type}
    with suppress(ConfigError):
        return {model_type, family.text(config)["model_type"]}
    return {model_type}
