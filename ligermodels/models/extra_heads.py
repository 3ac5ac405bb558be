"""How a config, and tensors' names, tell of heads: within a model's own checkpoint (`full-hf`), or without a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ligermodels.errors import ConfigError, short

MEDUSA_TYPE, MTP_TYPE = "medusa", "mtp"
"""`model_type` of heads without a model."""
MEDUSA_PREFIX = "medusa_head."
"""Of the tensors' names."""
MEDUSA_COUNTS = ("medusa_num_heads", "medusa_num_layers")
"""Fields of config.json."""


def without_heads(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The base model's part of a checkpoint's config, and patterns of the tensors that are none of it.

    A checkpoint that holds the model and heads says so in its config.
    """
    if not set(MEDUSA_COUNTS) <= set(config):
        return dict(config), []
    return {key: value for key, value in config.items() if key not in MEDUSA_COUNTS}, [f"^{re.escape(MEDUSA_PREFIX)}"]


def require_model(config: Mapping[str, Any]) -> None:
    """ConfigError for the config of heads without a model, which says of which model they are, if it does."""
    kind = config.get("model_type", MEDUSA_TYPE if set(MEDUSA_COUNTS) <= set(config) else None)
    if kind not in (MEDUSA_TYPE, MTP_TYPE):
        return
    what, opener = {
        MEDUSA_TYPE: ("Medusa heads", "MedusaModel"),
        MTP_TYPE: ("a head of multi-token prediction", "MTPModel"),
    }[kind]
    raise ConfigError(
        f"config.json: is of {what}, without a model: open {base_of_heads(config)}, and put them on it by "
        f"{opener}.from_pretrained(model, heads); on the command line, by --heads"
    )


def base_of_heads(config: Mapping[str, Any]) -> str:
    """For a message: the base model of heads, by its name where their config has it."""
    name = config.get("base_model_name_or_path")
    return f"their base model, {short(name)}" if isinstance(name, str) and name else "their base model"
