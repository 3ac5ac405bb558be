"""PEFT's adapter_config.json: the fields that native LoRA supports, and the rank and scaling of each layer."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

from ligermodels.adapt.expert_files import SHARED
from ligermodels.adapt.lora import AnyLoRA
from ligermodels.adapt.patterns import full_matches
from ligermodels.adapt.targets import container, leaf
from ligermodels.adapt.token_rows import FIELD, rows_by_path
from ligermodels.arguments import LARGEST, ExpertFormat
from ligermodels.convert.config_json import short
from ligermodels.convert.files import ADAPTER_CONFIG
from ligermodels.convert.json_values import is_int, is_list_of, is_number
from ligermodels.errors import AdapterWarning, ConfigError
from ligermodels.layers.expert_lora import ExpertPart
from ligermodels.layers.lora import MOST_RANKS, LoRAPart
from ligermodels.layers.token_rows import TokenRows

NO_EFFECT = frozenset((
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_ga_config", "megatron_core",
    "modules_to_save", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules",
    "target_parameters", "task_type",
))  # fmt: skip
"""Fields that do not change the meaning of the tensors. The names of the tensors tell the adapted layers and the whole
modules; only if one weight of the experts is adapted, `target_parameters` tells which."""
READ = frozenset((
    "alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "lora_dropout", "peft_type", "r", "rank_pattern",
    "trainable_token_indices", "use_rslora",
))  # fmt: skip
LARGEST_ID = 2**31
"""No vocabulary has as many tokens."""
INITS = (True, False, "gaussian", "orthogonal", "eva")
"""Initialisations that do not change the base weights."""
PATTERNS = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}
"""Field with values by regular expression -> field with the value of all other layers. Its default is 8, as in PEFT."""


def adapter_config(
    updates: Mapping[str, AnyLoRA],
    adaptable: Collection[str] | None,
    base_model: str | None = None,
    expert_format: ExpertFormat = "target_parameters",
    modules_to_save: Sequence[str] = (),
) -> dict[str, Any]:
    """The fields of adapter_config.json. The most frequent rank and scaling are values; others are patterns.

    Args:
        updates: the LoRA of each layer, and trained rows of tokens.
        adaptable: the paths of all layers that could be adapted; None if the adapter may have layers that the model
            does not have.
        base_model: name of the base model. Default: None.
        expert_format: see `save_adapter`.
        modules_to_save: the paths of modules that the adapter has whole.
    """
    lora = [update for update in updates.values() if not isinstance(update, TokenRows)]
    parts = [part for update in lora for part in update.parts]
    r = Counter(part.r for part in parts).most_common(1)[0][0]
    alpha = Counter(part.lora_alpha for part in parts).most_common(1)[0][0]
    has_experts = any(isinstance(part, ExpertPart) for part in parts)
    first, rows = lora[0], rows_by_path(updates)
    patterns = {_pattern(part, expert_format): part for part in parts}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": _dropout_of_experts(first.dropout) if has_experts else first.dropout,
        "use_rslora": first.parts[0].use_rslora,
        **_target_fields(parts, adaptable, expert_format),
        "rank_pattern": {name: part.r for name, part in patterns.items() if part.r != r},
        "alpha_pattern": {name: part.lora_alpha for name, part in patterns.items() if part.lora_alpha != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": list(modules_to_save) or None,
        **({FIELD: rows} if rows else {}),
        "use_dora": False,
    }


def _target_fields(
    parts: Iterable[LoRAPart], adaptable: Collection[str] | None, expert_format: ExpertFormat
) -> dict[str, list[str]]:
    """The fields that name the adapted layers and parameters."""
    is_stacked = expert_format == "target_parameters"
    parameters = [part.name for part in parts if isinstance(part, ExpertPart) and is_stacked]
    modules = [_module_name(part, expert_format) for part in parts if part.name not in parameters]
    fields = {"target_modules": _target_names(modules, adaptable, 1)}
    if parameters:
        fields["target_parameters"] = _target_names(parameters, adaptable, 2)
    return fields


def _dropout_of_experts(dropout: float) -> float:
    """The `lora_dropout` of a file with LoRA of experts: 0, with a warning if that is a change."""
    if dropout:
        warnings.warn(
            f"{ADAPTER_CONFIG}: lora_dropout is written as 0 instead of {dropout}: PEFT opens no adapter of experts "
            "with dropout. Give it again to continue training",
            AdapterWarning,
            stacklevel=3,
        )
    return 0.0


def _target_names(paths: Sequence[str], adaptable: Collection[str] | None, components: int) -> list[str]:
    """The names of adapted layers, short if they name no other layer: PEFT adapts every layer that a name ends.

    Args:
        paths: paths of the adapted layers.
        adaptable: paths of all layers that could be adapted; None for whole paths.
        components: number of components of a short name.
    """
    names = {path: ".".join(path.split(".")[-components:]) for path in paths}
    short_names = set(names.values())
    others = [path for path in adaptable or () if path not in names]
    if adaptable is None or any(".".join(path.split(".")[-components:]) in short_names for path in others):
        return list(names)
    return list(dict.fromkeys(names.values()))


def _module_name(part: LoRAPart, expert_format: ExpertFormat) -> str:
    """The name that `target_modules` has for a part; the experts of a layer have a common one."""
    if not isinstance(part, ExpertPart):
        return part.name
    if expert_format == "shared_outer":
        return f"{container(part.name)}.{SHARED[part.leaf]}"
    layer = part.layers[0][0]  # of the first expert, by its name in the file
    return f"{container(container(layer))}.{leaf(layer)}"


def _pattern(part: LoRAPart, expert_format: ExpertFormat) -> str:
    """The key of a part in `rank_pattern` and `alpha_pattern`."""
    if not isinstance(part, ExpertPart) or expert_format == "target_parameters":
        return part.name
    if expert_format == "shared_outer":
        return _module_name(part, expert_format)
    return rf"{re.escape(container(container(part.layers[0][0])))}\.\d+\.{leaf(part.layers[0][0])}"


def _is_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _is_dropout(value: Any) -> bool:
    return value is None or (is_number(value) and 0 <= value < 1)


def _is_ids(value: Any) -> bool:
    """Whether a value is a list of different token ids."""
    distinct = is_list_of(value, is_int) and len(set(value)) == len(value)
    return distinct and min(value, default=0) >= 0 and max(value, default=0) < LARGEST_ID


def _is_ids_by_name(value: Any) -> bool:
    return value is None or (all(map(_is_ids, value.values())) if isinstance(value, dict) else _is_ids(value))


FORMS: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "peft_type": (None, lambda value: value == "LORA", "must be 'LORA': other adapters are not implemented"),
    "bias": ("none", lambda value: value == "none", "must be 'none': trained biases are not implemented"),
    "init_lora_weights": (
        True,
        lambda value: value in INITS,
        "changes the base weights too; save the adapter as a plain LoRA (PEFT has ways)",
    ),
    "modules_to_save": (None, _is_names, "must be a list of names"),
    FIELD: (None, _is_ids_by_name, "must be a list of different token ids from 0 on, or an object of such lists"),
    "lora_dropout": (0.0, _is_dropout, "must be a number in [0, 1)"),
    "use_rslora": (None, lambda value: value is None or isinstance(value, bool), "must be true or false"),
}
"""Field -> its default, whether a value is read, and the reason of an error."""


def check_config(config: Mapping[str, Any]) -> None:
    """Raise ConfigError, naming the field, if native LoRA does not support an adapter_config.json."""
    for name, (default, is_read, reason) in FORMS.items():
        if not is_read(config.get(name, default)):
            raise _error(config, name, reason)
    for name, value in config.items():
        if name not in NO_EFFECT | READ and value not in (None, False, [], {}):
            raise _error(config, name, "is not implemented by native LoRA")
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


def values_by_part(pattern: str, config: Mapping[str, Any], named: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """`values_by_path` of parts that have one or several paths.

    Args:
        pattern: "rank_pattern" or "alpha_pattern".
        config: the fields of adapter_config.json.
        named: path of a part -> the paths by which the patterns name it; for experts perhaps one for each.

    Raises:
        ConfigError: the paths of a part have different values.
    """
    by_path = values_by_path(pattern, config, [path for paths in named.values() for path in paths])
    values: dict[str, Any] = {}
    for part, paths in named.items():
        if len(found := {by_path[path] for path in paths}) > 1:
            reason = f"has values {sorted(found)} for the experts of {part}, and native LoRA has one for all of them"
            raise _error(config, pattern, reason)
        values[part] = found.pop()
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
    return is_int(value) and 0 < value <= MOST_RANKS if ranks else is_number(value) and 0 < value <= LARGEST


def _error(config: Mapping[str, Any], field: str, reason: str) -> ConfigError:
    return ConfigError(f"{ADAPTER_CONFIG}: field {field!r} {reason}, got {short(config.get(field))}")
