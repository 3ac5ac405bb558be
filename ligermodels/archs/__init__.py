"""One short file a family: a Hugging Face config becomes a DecoderConfig and a weight map."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligermodels.archs import gemma, granite, llama, mistral, mixtral, olmo, phi, qwen, smollm
from ligermodels.archs.family import Family
from ligermodels.errors import ConfigError

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for module in (llama, mistral, mixtral, gemma, qwen, phi, olmo, granite, smollm)
    for family in module.FAMILIES
}


def register(family: Family) -> None:
    """Make checkpoints of `family.model_type` loadable; a user's own family is added the same way as ours."""
    FAMILIES[family.model_type] = family


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a Hugging Face config; ConfigError when its `model_type` is missing or unknown."""
    model_type = config.get("model_type")
    if model_type is None:
        raise ConfigError("config.json: field 'model_type' is missing")
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"config.json: model_type {model_type!r} is not implemented; implemented: {known}")
    return FAMILIES[model_type]


__all__ = ["FAMILIES", "Family", "family_of", "register"]
