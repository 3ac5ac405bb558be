"""The setting `data_weights` of a recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ligermodels.errors import ConfigError


def weights_of(value: Any) -> Any:
    """The weights in a number, in a text such as "0.7,0.3", or in a list of both; other values unchanged."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    parts = [part for item in items for part in (item.split(",") if isinstance(item, str) else [item])]
    try:
        return tuple(float(part) if isinstance(part, str | int) else part for part in parts)
    except ValueError:
        raise ConfigError(f"data_weights: must be numbers, got {value!r}") from None


def check_weights(weights: Sequence[float], data: Sequence[str], *, streaming: bool) -> None:
    """Raise ConfigError unless all weights are positive numbers, one for each value of `data`, if there are any.

    Args:
        weights: the weights.
        data: the setting `data`; empty if it is not given yet.
        streaming: whether the data is streamed, so that its documents are not counted.
    """
    if any(not 0 < weight < math.inf for weight in weights):
        raise ConfigError(f"data_weights: must be positive numbers, got {', '.join(map(str, weights))}")
    if weights and data and len(weights) != len(data):
        raise ConfigError(f"data_weights: must have a weight for each value of data, {len(data)}, got {len(weights)}")
    if weights and streaming:
        raise ConfigError("data_weights: counts documents, which streaming does not; leave one of the two out")
