"""Names of earlier versions, old -> new. They work for one release, with a DeprecationWarning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ligermodels.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

SETTINGS = {
    "heads": "num_heads",
    "layers": "num_layers",
    "length": "seq_len",
    "held_out": "validation_fraction",
    "held_out_tokens": "validation_tokens",
    "lambda0": "heads_loss_weight",
    "lambda0_schedule": "heads_loss_weight_schedule",
    "drift": "kl_to_reference",
    "warmup": "warmup_steps",
    "final_lr": "min_lr_ratio",
    "grad_clip": "max_grad_norm",
}
"""Settings of recipes for heads, and so flags of `medusa train`."""
VALUES = {("reference", "host"): "cpu_offload"}
"""(setting, old value) -> new value."""
EVAL_FLAGS = {"--length": "--seq-len", "--held-out-of": "--validation-of"}
COMMANDS = {"generate-data": "self-distillation-data"}


def flag(setting: str) -> str:
    """The command-line flag of a setting."""
    return f"--{setting.replace('_', '-')}"


TRAIN_FLAGS = {flag(old): flag(new) for old, new in SETTINGS.items()} | {"--no-drift": "--no-kl-to-reference"}
TRAIN_VALUES = {(flag(name), old): new for (name, old), new in VALUES.items()}


def warn(old: str, new: str, source: str = "", stacklevel: int = 1) -> None:
    """Warn (DeprecationWarning) that the name `old` in the file `source` is now `new`. A `stacklevel` of 2 names the
    caller of this function."""
    where = f"{source}: " if source else ""
    warnings.warn(f"{where}{old} is now {new}; the old name works for one more release", DeprecationWarning, stacklevel)


def current_settings(settings: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """`settings` of a recipe under their new names. Raises ConfigError if both names of a setting are given."""
    current: dict[str, Any] = {}
    for key, value in settings.items():
        name = SETTINGS.get(key, key)
        if name != key:
            if name in settings:
                raise ConfigError(f"{source}: {key!r} is the old name of {name!r}; give one of the two")
            warn(key, name, source)
        if isinstance(value, str) and (name, value) in VALUES:
            warn(f"{name}: {value}", VALUES[name, value], source)
            value = VALUES[name, value]
        current[name] = value
    return current


def renamed_arguments(**names: str) -> Callable[[F], F]:
    """A decorator that accepts keyword arguments by their old names too: old -> new."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for old in names.keys() & options.keys():
                if names[old] in options:
                    raise TypeError(
                        f"{function.__name__}: {old!r} is the old name of {names[old]!r}; give one of the two"
                    )
                warn(f"{function.__name__}({old}=)", f"{names[old]}=", stacklevel=3)
                options[names[old]] = options.pop(old)
            return function(*args, **options)

        return call  # type: ignore[return-value]

    return decorate
