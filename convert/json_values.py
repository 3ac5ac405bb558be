"""Checks of values from JSON files that a user may have written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from ligermodels.errors import ConfigError, short


def is_object(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether `value` is a JSON object."""
    return isinstance(value, Mapping)


def as_object(value: Any) -> Mapping[str, Any]:
    """`value` if it is a JSON object; otherwise an empty object."""
    return value if is_object(value) else {}


def object_field(config: Mapping[str, Any], name: str, path: str = "") -> Mapping[str, Any]:
    """The object in field `name` of `config`; empty if the field is missing or null.

    Args:
        config: an object.
        name: the field.
        path: prefix of `name` in the message, such as "rope_parameters.".

    Raises:
        ConfigError: the field holds another value.
    """
    value = config.get(name)
    if value is None:
        return {}
    if not is_object(value):
        raise ConfigError(f"{path}{name}: must be an object, got {short(value)}")
    return value


def is_int(value: Any) -> TypeGuard[int]:
    """Whether `value` is a whole number; True and False are not, although Python's `bool` is a subclass of `int`."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is a number; True and False are not."""
    return is_int(value) or isinstance(value, float)


def is_list_of(value: Any, item: Any) -> bool:
    """Whether `value` is a list in which all items pass the function `item`."""
    return isinstance(value, list) and all(map(item, value))


def is_file_name(value: Any) -> TypeGuard[str]:
    """Whether `value` names a file within a folder, without a path that could lead out of it."""
    return isinstance(value, str) and value not in ("", ".", "..") and not {"/", "\0"} & set(value)


def first_value(*values: Any) -> Any:
    """The first of `values` that is not None, or None."""
    return next((value for value in values if value is not None), None)
