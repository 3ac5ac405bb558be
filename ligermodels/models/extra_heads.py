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
    MEDUSA_TYPE: ("Medusa heads", "MedusaModel", "medusa"),
    MTP_TYPE: ("a head for multi-token prediction", "MTPModel", "mtp"),
    EAGLE_TYPE: ("an EAGLE-3 head", "Eagle3Model", "eagle"),
    DFLASH_TYPE: ("a DFlash head", "DFlashModel", "dflash"),
    DSPARK_TYPE: ("a DSpark head", "DSparkModel", "dspark"),
}
"""Type of draft heads -> their name, the class that loads them, and the command for them, which is also the kind of
their recipe."""


def without_heads(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The `config` of a model without the fields of Medusa heads, and patterns of their tensors; none if it has no such
    fields, or is the config of heads without a model."""
    if not {"model_type", *MEDUSA_COUNTS} <= set(config):
        return dict(config), []
    return {key: value for key, value in config.items() if key not in MEDUSA_COUNTS}, [f"^{re.escape(MEDUSA_PREFIX)}"]


def draft_type(config: Mapping[str, Any]) -> str | None:
    """EAGLE_TYPE, DFLASH_TYPE or DSPARK_TYPE for the config of such a head, in any of its forms; None for another.
    SafeAILab's EAGLE-3 heads name a model in `architectures`; they alone have a `draft_vocab_size` beside it."""
    names = config.get("architectures")
    names = str(names if isinstance(names, list) else "").lower()
    kind = config.get("speculators_model_type")
    unnamed = EAGLE_TYPE if kind is None and config.get("draft_vocab_size") is not None else None
    return next((each for each in (EAGLE_TYPE, DSPARK_TYPE, DFLASH_TYPE) if kind == each or each in names), unnamed)


def heads_type(config: Mapping[str, Any]) -> str | None:
    """The type, of HEADS, of the draft heads that a config describes, without a model; None if it does not."""
    kind = draft_type(config) or config.get("model_type", MEDUSA_TYPE if set(MEDUSA_COUNTS) <= set(config) else None)
    return kind if isinstance(kind, str) and kind in HEADS else None


def require_type(config: Mapping[str, Any], kind: str, folder: object) -> None:
    """ConfigError if a config describes draft heads of another type; it names the class and the command for them.

    Args:
        config: config.json, or an empty dict if there is none.
        kind: the type of HEADS to load.
        folder: the folder or hub id with the config, for the message.
    """
    found = heads_type(config)
    if found is None or found == kind:
        return
    heads, model_class, command = HEADS[found]
    raise ConfigError(
        f"{folder}: holds {heads}, not {HEADS[kind][0]}: load it with {model_class}.from_pretrained; on the command "
        f"line, use `ligermodels {command}`"
    )


def require_command(config: Mapping[str, Any], command: str, folder: object) -> None:
    """`require_type` for the heads of a command.

    Args:
        config: config.json, or an empty dict if there is none.
        command: the command, or the kind of a recipe.
        folder: the folder or hub id with the config, for the message.
    """
    require_type(config, next(kind for kind, (*_, name) in HEADS.items() if name == command), folder)


def require_model(config: Mapping[str, Any]) -> None:
    """ConfigError for the config of draft heads without a model; it names their base model if the config does."""
    if (kind := heads_type(config)) is None:
        return
    heads, model_class, _ = HEADS[kind]
    raise ConfigError(
        f"config.json: describes {heads}, without a model: open {base_of_heads(config)}, then load the heads with "
        f"{model_class}.from_pretrained(model, heads); on the command line, give that model, and the heads by --heads "
        "(commands that train heads: --start-from)"
    )


def base_of_heads(config: Mapping[str, Any]) -> str:
    """Text for a message: the base model of draft heads, with its name if their config has it."""
    name, found = config.get("base_model_name_or_path"), config.get("speculators_config")
    if isinstance(found, Mapping) and isinstance(verifier := found.get("verifier"), Mapping):
        name = verifier.get("name_or_path")
    return f"their base model, {short(name)}" if name and isinstance(name, str) else "their base model"
