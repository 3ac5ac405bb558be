"""Checks of the fields of layer configs. Each raises a ConfigError that names the field."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ligermodels.arguments import LARGEST, is_number, is_whole
from ligermodels.errors import ConfigError, short


def check_sizes(config: Any, *names: str, least: int = 1) -> None:
    """Raise ConfigError unless these fields of `config` are whole numbers of at least `least`; None is allowed if it is
    the default of the field."""
    for name, value in _fields(config, *names):
        if not _is_absent(config, name, value) and (not is_whole(value) or value < least):
            raise ConfigError(f"{name}: must be a whole number of at least {least}, got {short(value)}")


def check_numbers(config: Any, *names: str, positive: bool = False, negative: bool = False) -> None:
    """Raise ConfigError unless these fields of `config` are finite numbers of at least 0, or above 0 if `positive`, or
    below 0 if `negative`; None is allowed if it is the default of the field."""
    for name, value in _fields(config, *names):
        if _is_absent(config, name, value):
            continue
        size = -value if is_number(value) and negative else value
        if not is_number(value) or not 0 <= size < LARGEST or (size == 0 and (positive or negative)):
            bound = "below" if negative else "above" if positive else "of at least"
            raise ConfigError(f"{name}: must be a number {bound} 0, got {short(value)}")


def check_choice(config: Any, name: str, choices: Collection[str | None]) -> None:
    """Raise ConfigError unless the field `name` of `config` is one of `choices`."""
    ((_, value),) = _fields(config, name)
    if value not in tuple(choices):
        raise ConfigError(f"{name}: must be one of {', '.join(map(str, choices))}, got {short(value)}")


def check_multiple(config: Any, name: str, divisor: str) -> None:
    """Raise ConfigError unless the field `name` of `config` is a multiple of the field `divisor`."""
    (_, value), (_, unit) = _fields(config, name, divisor)
    if value % unit:
        raise ConfigError(f"{name}: must be a multiple of {divisor}, {unit}; got {value}")


def _fields(config: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, getattr(config, name)) for name in names]


def _is_absent(config: Any, name: str, value: Any) -> bool:
    return value is None and type(config).__dataclass_fields__[name].default is None
