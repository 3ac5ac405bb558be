"""Parameter groups of optimizers: learning rates and weight decay, also by patterns of parameter names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

from torch import nn

from ligermodels.errors import InputError

BLOCK = re.compile(r"^.*?blocks\.\d+\.")


def parameter_groups(
    rates: Iterable[tuple[Iterable[nn.Parameter], float]],
    weight_decay: float,
    *,
    names: Mapping[int, str] | None = None,
    learning_rate_patterns: Mapping[str, float] | None = None,
    weight_decay_patterns: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups: matrices with weight decay, other parameters without, and exceptions by name.

    The stacked biases of experts have two dimensions, and are no matrices.

    A pattern is an `fnmatch` pattern for the name of a parameter or of a module that contains it, whole
    ("decoder.embed", "decoder.blocks.0.mlp.*") or relative to its block ("mlp.down"). The first pattern that matches
    counts, for vectors too.

    Args:
        rates: pairs (parameters, learning rate). Parameters that require no gradient are left out.
        weight_decay: weight decay of matrices.
        names: id of a parameter -> its name, for patterns and stacked biases.
        learning_rate_patterns: pattern -> learning rate of the parameters that match it.
        weight_decay_patterns: pattern -> weight decay of the parameters that match it.

    Returns:
        Groups for an optimizer, in the order of `rates`, matrices first.

    Raises:
        InputError: no parameter requires a gradient, or a pattern matches no parameter that requires one.
    """
    lr_of, decay_of = (
        _ByPattern(name, patterns or {}, names or {})
        for name, patterns in (
            ("learning_rate_patterns", learning_rate_patterns),
            ("weight_decay_patterns", weight_decay_patterns),
        )
    )
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for index, (parameters, lr) in enumerate(rates):
        trained = [p for p in parameters if p.requires_grad]
        for is_matrix in (True, False):
            for p in (p for p in trained if (p.ndim >= 2) == is_matrix):
                decays = is_matrix and not (names or {}).get(id(p), "").endswith("bias")
                options = {"lr": lr_of(p, lr), "weight_decay": decay_of(p, weight_decay if decays else 0.0)}
                key = (index, is_matrix, *options.values())
                groups.setdefault(key, {"params": [], **options})["params"].append(p)
    if not groups:
        raise InputError("no parameter requires a gradient: there is nothing to train")
    for by_pattern in (lr_of, decay_of):
        by_pattern.check_used()
    return list(groups.values())


class _ByPattern:
    """A number for a parameter, by the patterns of the setting `setting`."""

    def __init__(self, setting: str, patterns: Mapping[str, float], names: Mapping[int, str]) -> None:
        self._setting, self._patterns, self._names = setting, patterns, names
        self._seen: list[str] = []

    def __call__(self, parameter: nn.Parameter, default: float) -> float:
        name = self._names.get(id(parameter), "")
        self._seen.append(name)
        return next((value for pattern, value in self._patterns.items() if _matches(pattern, name)), default)

    def check_used(self) -> None:
        for pattern in self._patterns:
            if not any(_matches(pattern, name) for name in self._seen):
                some = ", ".join(self._seen[:3])
                raise InputError(
                    f"{self._setting}: {pattern!r} matches no trained parameter; their names are {some}, ..."
                )


def _matches(pattern: str, name: str) -> bool:
    """Whether `pattern` matches a parameter's name or a module that contains it, whole or relative to its block."""
    prefixes = [*accumulate(name.split("."), lambda module, part: f"{module}.{part}")]
    return any(fnmatchcase(prefix, pattern) or fnmatchcase(BLOCK.sub("", prefix), pattern) for prefix in prefixes)
