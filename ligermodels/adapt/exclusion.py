"""Exclude layers of a model's blocks by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from ligermodels.errors import InputError, short


class Exclusion:
    """`fnmatch` patterns for names of layers, or of modules that contain them ("mlp").

    A name is whole ("decoder.blocks.3.mlp.down") or relative to its block ("mlp.*"). Raises InputError, naming
    `exclude`, for anything but a sequence of strings.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        if isinstance(patterns, str):
            raise InputError(f"exclude: must be a sequence of patterns, got {patterns!r}; give [{patterns!r}]")
        if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
            raise InputError(f"exclude: must be a sequence of patterns, got {short(patterns)}")
        self._patterns, self._used = patterns, set[str]()

    def __call__(self, block: str, name: str) -> bool:
        """Whether a pattern matches the layer `name` of `block`, or a module that contains it."""
        parts = name.split(".")
        names = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        hits = {p for p in self._patterns for n in names if fnmatchcase(n, p) or fnmatchcase(f"{block}.{n}", p)}
        self._used.update(hits)
        return bool(hits)

    def check_used(self) -> None:
        """Raise InputError for a pattern that has matched nothing."""
        if unmatched := [pattern for pattern in self._patterns if pattern not in self._used]:
            raise InputError(f"exclude: {unmatched[0]!r} matches no layer in the blocks")
