"""The base model that an adapter names, and whether a model that is to have the adapter is this model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ligermodels.convert import hub
from ligermodels.convert.config_json import read_json
from ligermodels.convert.files import ADAPTER_CONFIG
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.errors import AdapterWarning, CheckpointError, ConfigError, HubError, short, warn_caller
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.families import FAMILIES

TENSORS, ELEMENTS = 64, 1 << 11
"""Number of tensors of two checkpoints that are compared, and of the elements in the middle of each."""


def check_base(model: CausalLM, config: Mapping[str, Any]) -> None:
    """Raise ConfigError if the base model of an adapter is of another family than `model`; warn if its weights are
    known to be others.

    Layers of two models may have the same names and shapes, so the adapter's tensors do not show it. A base model that
    is neither a local folder nor in the hub's cache is not checked, nor are weights in other files, dtypes or layouts.
    """
    spec, name = model.require_export_spec(), config.get("base_model_name_or_path")
    folder = _local_base(name, config.get("revision"))
    base: Mapping[str, Any] = {}
    with suppress(CheckpointError, ConfigError):
        if folder is not None:
            base = read_json(folder / "config.json")
    configs = [spec.hf_config] if spec.source is None else [spec.hf_config, spec.source.hf_config]
    if "model_type" in base and not _types(base) & set[str]().union(*map(_types, configs)):
        raise ConfigError(
            f"{ADAPTER_CONFIG}: base_model_name_or_path: {short(name)} has model_type {short(base['model_type'])}, but "
            f"this model has {short(spec.hf_config['model_type'])}; give the adapter its own base model, or correct "
            "the field"
        )
    if folder is None or spec.source is None:
        return
    if (tensor := _other_values(folder, spec.source.folder)) is not None:
        warn_caller(
            f"{ADAPTER_CONFIG}: base_model_name_or_path: the adapter is for {short(name)}, whose {tensor} has other "
            f"values than in {spec.source.folder}: its updates are added to other weights than they were trained with. "
            "Give the adapter its own base model, or correct the field",
            AdapterWarning,
        )


def _local_base(name: Any, revision: Any) -> Path | None:
    """The folder of a base model, if it is on this machine."""
    if isinstance(name, str) and name:
        options = {"revision": revision} if isinstance(revision, str) else {}
        with suppress(CheckpointError, HubError):
            return hub.resolve(name, weights=False, local_files_only=True, **options)
    return None


def _other_values(one: Path, other: Path) -> str | None:
    """A tensor of the same name, shape and dtype in two checkpoints, with other values; None if none was found."""
    with suppress(CheckpointError, OSError):
        if one.samefile(other):
            return None
        with Checkpoint(one) as ours, Checkpoint(other) as theirs:
            found = theirs.headers
            names = [n for n, h in ours.headers.items() if n in found and h[:2] == found[n][:2]]  # dtype, shape
            for name in names[:: -(-len(names) // TENSORS) or 1]:
                count = math.prod(found[name].shape)
                part = max(0, (count - ELEMENTS) // 2), min(ELEMENTS, count)
                values = [checkpoint.read_slice(name, *part).view(torch.uint8) for checkpoint in (ours, theirs)]
                if not torch.equal(*values):
                    return name
    return None


def _types(config: Mapping[str, Any]) -> set[str]:
    """The `model_type` of a checkpoint, and of its language model alone."""
    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is None or family.text is None:
        return {model_type}
    with suppress(ConfigError):
        return {model_type, family.text(config)["model_type"]}
    return {model_type}
