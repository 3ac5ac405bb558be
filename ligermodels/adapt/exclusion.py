"""Which parts of a model's blocks are left as they are, by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from ligermodels.errors import InputError, short


class Exclusion:
    """Patterns (`fnmatch`) of names, whole ("decoder.blocks.3.mlp.down") or within a block ("mlp.*"), of layers and of
    modules around them ("mlp"). InputError, naming `exclude`, for anything but a sequence of strings."""

    def __init__(self, patterns: Sequence[str]) -> None:
        if isinstance(patterns, str):
            raise InputError(f"exclude: must be a sequence of patterns, got {patterns!r}; give [{patterns!r}]")
        if not isinstance(patterns, Sequence) or not all(isinstance(each, str) for each in patterns):
            raise InputError(f"exclude: must be a sequence of patterns, got {short(patterns)}")
        self._patterns, self._used = patterns, set[str]()

    def __call__(self, block: str, name: str) -> bool:
        """Whether the layer `name` of a block, or a module around it, has a name that matches."""
        whole = name.split(".")
        names = [".".join(whole[:count]) for count in range(1, len(whole) + 1)]
        hits = {p for p in self._patterns for n in names if fnmatchcase(n, p) or fnmatchcase(f"{block}.{n}", p)}
        self._used.update(hits)
        return bool(hits)

    def check_used(self) -> None:
        """InputError for a pattern that has matched nothing."""
        if unmatched := [pattern for pattern in self._patterns if pattern not in self._used]:
            raise InputError(f"exclude: {unmatched[0]!r} matches no layer in the blocks")
