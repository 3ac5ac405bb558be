"""The cache of transformers under both of its names: `past_key_values`, and since transformers 5.24 `cache`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

from ligermodels.errors import InputError

OLD, NEW = "past_key_values", "cache"
NAME = NEW if NEW in [field.name for field in fields(BaseModelOutputWithPast)] else OLD
"""The name in the installed transformers, of arguments and of fields of outputs."""


def by_either_name(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a forward with an argument `past_key_values` take it under the name `cache` too.

    The result raises InputError if both are given.
    """

    @functools.wraps(forward)
    def named(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.pop(NEW, None)
        if cache is not None:
            if kwargs.get(OLD) is not None:
                raise InputError(f"{NEW}: is given beside {OLD}, its older name; give one of them")
            kwargs[OLD] = cache
        return forward(*args, **kwargs)

    return named


def renamed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for a forward of transformers, with the cache under its name there."""
    return {NAME if name == OLD else name: value for name, value in options.items()}
