"""Records that may be compared: those of one run, which is one commit, torch and way of measuring on one GPU."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

Record = dict[str, Any]
OURS = re.compile(r"ligermodels|medusa tree step|bare step|gemms|.*nativize")
COMMIT = re.compile(r"[0-9a-f]{7,40}")
BY_PARTS = ("floor_gemms_ms", "floor_attention_ms", "floor_memory_bound_ms", "floor_optimizer_ms")
"""Of lower bounds that are sums of parts timed one by one; later ones are the time of a whole step."""


def run_of(record: Record) -> Hashable:
    """What records of one run share."""
    return tuple(record.get(key) for key in ("commit", "gpu", "torch", "measure"))


def why_not(record: Record) -> str | None:
    """Why a record is not reported, or None: nobody can go back to code that was never committed."""
    commit = str(record.get("commit", "none"))
    return None if COMMIT.fullmatch(commit) else f"of no commit ({commit})"


def of_one_measure(record: Record) -> Record:
    """Without the share of a lower bound that was found in another way than those it would stand beside."""
    if not any(key in record for key in BY_PARTS):
        return record
    return {key: value for key, value in record.items() if key not in (*BY_PARTS, "floor_ms", "of_floor")}


def last_run(records: Sequence[Record]) -> list[Record]:
    """Those of the run that the last one is of."""
    return [r for r in records if run_of(r) == run_of(records[-1])]


def broadest_run(records: Iterable[Record], key: str) -> list[Record]:
    """Records with `key` of the run that has it of the most peers, the last of such runs: one for each provider.

    Of the most peers, because a later run beside fewer of them may lack the fastest.
    """
    found: dict[Hashable, dict[str, Record]] = {}
    for record in records:
        if key in record and "failed" not in record:
            run = run_of(record)
            found[run] = {**found.pop(run, {}), record["provider"]: record}  # popped: runs in the order of their ends
    latest_first = [list(run.values()) for run in reversed(found.values())]
    return max(latest_first, key=lambda run: sum(is_peer(r["provider"]) for r in run), default=[])


def is_float8(provider: str) -> bool:
    """Whether it computes its products in float8, beside others that compute them in bf16."""
    return "float8" in provider


def is_peer(provider: str) -> bool:
    """Whether it is someone else's: neither one of ours nor a part of a computation."""
    return OURS.match(provider) is None
