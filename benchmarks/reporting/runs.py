"""Comparable records: they belong to one run, with one commit, GPU, torch and version of the timing method."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

Record = dict[str, Any]
OURS = re.compile(r"ligermodels|medusa tree step|bare step|gemms|.*nativize")
COMMIT = re.compile(r"[0-9a-f]{7,40}")
BY_PARTS = ("floor_gemms_ms", "floor_attention_ms", "floor_memory_bound_ms", "floor_optimizer_ms")
"""Fields of old lower bounds, which are sums of separately timed parts; new lower bounds time a whole step."""


def run_of(record: Record) -> Hashable:
    """The fields that are equal in all records of a run."""
    return tuple(record.get(key) for key in ("commit", "gpu", "torch", "measure"))


def why_not(record: Record) -> str | None:
    """The reason why a record is not reported, or None. Code that was never committed cannot be run again."""
    commit = str(record.get("commit", "none"))
    return None if COMMIT.fullmatch(commit) else f"of no commit ({commit})"


def of_one_measure(record: Record) -> Record:
    """The record without an old lower bound, which is not comparable with new ones."""
    if not any(key in record for key in BY_PARTS):
        return record
    return {key: value for key, value in record.items() if key not in (*BY_PARTS, "floor_ms", "of_floor")}


def last_run(records: Sequence[Record]) -> list[Record]:
    """The records of the last record's run."""
    return [r for r in records if run_of(r) == run_of(records[-1])]


def broadest_run(records: Iterable[Record], key: str) -> list[Record]:
    """Records with `key` of the run with the most peers, the last of such runs: one for each provider.

    A later run with fewer peers may lack the fastest.
    """
    runs: dict[Hashable, dict[str, Record]] = {}
    for record in records:
        if key in record and "failed" not in record:
            run = run_of(record)
            runs[run] = {**runs.pop(run, {}), record["provider"]: record}  # popped: in the order of their last record
    latest_first = [list(run.values()) for run in reversed(runs.values())]
    return max(latest_first, key=lambda run: sum(is_peer(r["provider"]) for r in run), default=[])


def is_float8(provider: str) -> bool:
    """Whether a provider computes its products in float8."""
    return "float8" in provider


def is_peer(provider: str) -> bool:
    """Whether a provider is a peer: neither ours nor a part of a computation."""
    return OURS.match(provider) is None
