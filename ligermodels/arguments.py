"""Checks of what a caller gives: whole numbers within bounds, finite ones within fp32, names of formats."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Literal, get_args

from ligermodels.errors import InputError, short

LARGEST = 1e38
"""Bound of numbers that fp32 is to hold."""

Quantized = Literal["float8", "int4"]
"""Formats of quantised weights: see `ops.quantize_weight`."""

MOST_HEADS = 1000
"""Most draft heads, steps of one, and layers of each: formats number them by three digits."""

MTP_STEPS = 3
"""Tokens beyond the next one that a head of multi-token prediction predicts, where no number is given."""


def is_whole(value: object) -> bool:
    """Whether `value` is a whole number, of numpy too; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_sequence(value: object) -> bool:
    """Whether `value` is a list, a tuple or another sequence; text and bytes are none."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def check_count(name: str, value: Any, *, least: int = 1, most: int = 2**31 - 1) -> int:
    """`value` as an int; InputError, naming the argument, unless it is a whole number from `least` to `most`."""
    if not is_whole(value) or value < least:
        raise InputError(f"{name}: must be a whole number of at least {least}, got {short(value)}")
    if value > most:
        raise InputError(f"{name}: must be at most {most:,}, got {short(value)}")
    return int(value)


def check_number(name: str, value: Any, *, positive: bool = False) -> Any:
    """`value`; InputError, naming the argument, unless it is a finite number of at least 0, or above it."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value < LARGEST or (positive and value == 0):
        raise InputError(f"{name}: must be a number {'above' if positive else 'of at least'} 0, got {short(value)}")
    return value


def check_flag(name: str, value: Any) -> bool:
    """`value`; InputError, naming the argument, unless it is True or False: any other text would count as True."""
    if not isinstance(value, bool):
        raise InputError(f"{name}: must be True or False, got {short(value)}")
    return value


def check_function(name: str, value: Any) -> None:
    """InputError, naming the argument, unless `value` is None or can be called."""
    if value is not None and not callable(value):
        raise InputError(f"{name}: must be a function, got {short(value)}")


def check_token_id(name: str, value: Any) -> int:
    """`value` as an int; InputError unless it is a whole number within int64."""
    if not is_whole(value) or not -(2**63) <= value < 2**63:
        raise InputError(f"{name} must be a token's id or a list of them, got {short(value)}")
    return int(value)


def check_format(name: str, kind: object) -> None:
    """InputError naming the argument unless `kind` is one of `Quantized`."""
    if not isinstance(kind, str) or kind not in get_args(Quantized):
        raise InputError(f"{name}: must be one of {', '.join(get_args(Quantized))}, got {short(kind)}")
