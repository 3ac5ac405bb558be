"""Names of the arguments of transformers' forwards: those without a name have the order of the model's class, and the
cache has two names, `past_key_values` and since transformers 5.24 `cache`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

from ligermodels.errors import InputError
from ligermodels.integrations.modules import native_of

OLD, NEW = "past_key_values", "cache"
NAME = NEW if NEW in [field.name for field in fields(BaseModelOutputWithPast)] else OLD
"""The name in the installed transformers, of arguments and of fields of outputs."""


def by_name(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a forward take its arguments as the forward of the module's class does.

    Arguments without a name have the order of the class, such as pixels before the mask. The cache may be called
    `cache` or `past_key_values`.

    Args:
        forward: function of the module and named arguments, with `past_key_values`.

    Returns:
        A function that raises TypeError for too many arguments or one given twice, and InputError for two caches.
    """

    @functools.wraps(forward)
    def named(module: Any, *args: Any, **kwargs: Any) -> Any:
        names, kind = native_of(module).arguments, type(module).__name__
        if len(args) > len(names):
            raise TypeError(f"{kind}.forward: takes {len(names)} arguments without a name, got {len(args)}")
        for name, value in zip(names, args, strict=False):
            if name in kwargs:
                raise TypeError(f"{kind}.forward: got two values for the argument {name}")
            kwargs[name] = value
        cache = kwargs.pop(NEW, None)
        if cache is not None:
            if kwargs.get(OLD) is not None:
                raise InputError(f"{NEW}: is given beside {OLD}, its older name; give one of them")
            kwargs[OLD] = cache
        return forward(module, **kwargs)

    return named


def renamed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for a forward of transformers, with the cache under its name there."""
    return {NAME if name == OLD else name: value for name, value in options.items()}
