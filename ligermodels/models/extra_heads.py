"""How a config and tensor names show draft heads: in a model's own checkpoint, or in a checkpoint of heads alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ligermodels.errors import ConfigError, short

MEDUSA_TYPE, MTP_TYPE, EAGLE_TYPE, DFLASH_TYPE, DSPARK_TYPE = "medusa", "mtp", "eagle3", "dflash", "dspark"
"""`model_type` or `speculators_model_type` in the config of draft heads without a model."""
MEDUSA_PREFIX = "medusa_head."
"""Prefix of the tensors of Medusa heads in the checkpoint of a model."""
MEDUSA_COUNTS = ("medusa_num_heads", "medusa_num_layers")
"""Fields of config.json of a checkpoint with Medusa heads."""

HEADS = {
    MEDUSA_TYPE: ("Medusa heads", "MedusaModel"),
    MTP_TYPE: ("a head for multi-token prediction", "MTPModel"),
    EAGLE_TYPE: ("an EAGLE-3 head", "Eagle3Model"),
    DFLASH_TYPE: ("a DFlash head", "DFlashModel"),
    DSPARK_TYPE: ("a DSpark head", "DSparkModel"),
}
"""Type of draft heads -> their name, and the class that loads them."""


def without_heads(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The `config` of a model without the fields of Medusa heads, and patterns of their tensors; none if it has no such
    fields, or is the config of heads without a model."""
    if not {"model_type", *MEDUSA_COUNTS} <= set(config):
        return dict(config), []
    return {key: value for key, value in config.items() if key not in MEDUSA_COUNTS}, [f"^{re.escape(MEDUSA_PREFIX)}"]


def draft_type(config: Mapping[str, Any]) -> str | None:
    """EAGLE_TYPE, DFLASH_TYPE or DSPARK_TYPE for the config of such a head, in any of its forms; None for another."""
    names = config.get("architectures")
    names = str(names if isinstance(names, list) else "").lower()
    kind = config.get("speculators_model_type")
    return next((each for each in (EAGLE_TYPE, DSPARK_TYPE, DFLASH_TYPE) if kind == each or each in names), None)


def require_model(config: Mapping[str, Any]) -> None:
    """ConfigError for the config of draft heads without a model; it names their base model if the config does."""
    model_type = config.get("model_type", MEDUSA_TYPE if set(MEDUSA_COUNTS) <= set(config) else None)
    model_type = draft_type(config) or model_type
    if not isinstance(model_type, str) or model_type not in HEADS:
        return
    heads, model_class = HEADS[model_type]
    raise ConfigError(
        f"config.json: describes {heads}, without a model: open {base_of_heads(config)}, then load the heads with "
        f"{model_class}.from_pretrained(model, heads); on the command line, with --heads"
    )


def base_of_heads(config: Mapping[str, Any]) -> str:
    """Text for a message: the base model of draft heads, with its name if their config has it."""
    name, found = config.get("base_model_name_or_path"), config.get("speculators_config")
    if isinstance(found, Mapping) and isinstance(verifier := found.get("verifier"), Mapping):
        name = verifier.get("name_or_path")
    return f"their base model, {short(name)}" if name and isinstance(name, str) else "their base model"
