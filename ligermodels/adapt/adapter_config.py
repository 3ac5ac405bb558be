"""PEFT's adapter_config.json: the fields that native LoRA supports, and the rank and scaling of each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from typing import Any

from ligermodels.adapt.lora import leaf
from ligermodels.adapt.patterns import full_matches
from ligermodels.arguments import LARGEST
from ligermodels.convert.config_json import short
from ligermodels.convert.files import ADAPTER_CONFIG
from ligermodels.errors import ConfigError
from ligermodels.layers.lora import MOST_RANKS, LoRA

NO_EFFECT = frozenset((
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_ga_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
))  # fmt: skip
"""Fields that do not change the meaning of the tensors. The names of the tensors tell the adapted layers."""
READ = frozenset((
    "alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "lora_dropout", "peft_type", "r", "rank_pattern",
    "use_rslora",
))  # fmt: skip
INITS = (True, False, "gaussian", "orthogonal", "eva")
"""Initialisations that do not change the base weights."""
PATTERNS = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}
"""Field with values by regular expression -> field with the value of all other layers. Its default is 8, as in PEFT."""


def adapter_config(
    updates: Mapping[str, LoRA], adaptable: Collection[str] | None, base_model: str | None = None
) -> dict[str, Any]:
    """The fields of adapter_config.json. The most frequent rank and scaling are values; others are patterns.

    Args:
        updates: the LoRA of each layer.
        adaptable: the paths of all layers that could be adapted; None if the adapter may have layers that the model
            does not have.
        base_model: name of the base model. Default: None.
    """
    parts = {part.name: part for update in updates.values() for part in update.parts}
    r = Counter(part.r for part in parts.values()).most_common(1)[0][0]
    alpha = Counter(part.lora_alpha for part in parts.values()).most_common(1)[0][0]
    # PEFT adapts all layers with a path that ends in a name. So short names are used only if they name no other layer.
    names = dict.fromkeys(map(leaf, parts))
    use_names = adaptable is not None and all(path in parts for path in adaptable if leaf(path) in names)
    first = next(iter(updates.values()))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": first.dropout,
        "use_rslora": first.parts[0].use_rslora,
        "target_modules": list(names if use_names else parts),
        "rank_pattern": {name: part.r for name, part in parts.items() if part.r != r},
        "alpha_pattern": {name: part.lora_alpha for name, part in parts.items() if part.lora_alpha != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
    }


def check_config(config: Mapping[str, Any]) -> None:
    """Raise ConfigError, naming the field, if native LoRA does not support an adapter_config.json."""
    if config.get("peft_type") != "LORA":
        raise _error(config, "peft_type", "must be 'LORA': other adapters are not implemented")
    if config.get("bias", "none") != "none":
        raise _error(config, "bias", "must be 'none': trained biases are not implemented")
    if config.get("init_lora_weights", True) not in INITS:
        reason = "changes the base weights too; save the adapter as a plain LoRA (PEFT has ways)"
        raise _error(config, "init_lora_weights", reason)
    for name, value in config.items():
        if name not in NO_EFFECT | READ and value not in (None, False, [], {}):
            raise _error(config, name, "is not implemented by native LoRA")
    if not isinstance(config.get("use_rslora") or False, bool):
        raise _error(config, "use_rslora", "must be true or false")
    for pattern, name in PATTERNS.items():
        _check_pattern(config, pattern, ranks=name == "r")
        if not _is_positive(config.get(name, 8), ranks=name == "r"):
            raise _error(config, name, f"must be a number above 0 (a rank: an integer of at most {MOST_RANKS})")


def values_by_path(pattern: str, config: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The rank or lora_alpha of each layer: the value of the first regular expression that matches its path.

    As in PEFT, an expression matches the end of the path, from a dot on.

    Args:
        pattern: "rank_pattern" or "alpha_pattern".
        config: the fields of adapter_config.json.
        paths: paths of the layers in transformers.

    Returns:
        Path -> value; the value of `config` for all layers where no expression matches.

    Raises:
        ConfigError: an expression takes too long.
    """
    values = dict.fromkeys(paths, config.get(PATTERNS[pattern], 8))
    for expression, value in reversed((config.get(pattern) or {}).items()):
        try:
            matching = full_matches(rf"(.*\.)?({expression})", paths)
        except ValueError as error:
            raise ConfigError(f"{ADAPTER_CONFIG}: field {pattern!r}: {short(expression)} {error}") from None
        values |= dict.fromkeys(compress(paths, matching), value)
    return values


def _check_pattern(config: Mapping[str, Any], name: str, *, ranks: bool) -> None:
    pattern = config.get(name) or {}
    if not isinstance(pattern, dict) or not all(_is_positive(value, ranks=ranks) for value in pattern.values()):
        reason = f"must be an object of numbers above 0 (ranks: integers of at most {MOST_RANKS})"
        raise _error(config, name, reason)
    for expression in pattern:
        try:
            full_matches(expression, [])
        except ValueError as error:
            reason = f"must have regular expressions as keys, and {short(expression)} {error}"
            raise _error(config, name, reason) from None


def _is_positive(value: Any, *, ranks: bool) -> bool:
    types, most = (int, MOST_RANKS) if ranks else (int | float, LARGEST)
    return isinstance(value, types) and not isinstance(value, bool) and 0 < value <= most


def _error(config: Mapping[str, Any], field: str, reason: str) -> ConfigError:
    return ConfigError(f"{ADAPTER_CONFIG}: field {field!r} {reason}, got {short(config.get(field))}")
