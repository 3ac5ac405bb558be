"""Records that may be compared: those of one run, which is one commit on one GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]
OURS = re.compile(r"ligermodels|medusa tree step|bare step|gemms|.*nativize")


def broadest_run(records: Iterable[Record], key: str) -> list[Record]:
    """Records with `key` of the run that has it of the most peers, the last of such runs: one for each provider.

    Of the most peers, because a later run beside fewer of them may lack the fastest.
    """
    found: dict[tuple[Any, Any], dict[str, Record]] = {}
    for record in records:
        if key in record and "failed" not in record:
            run = (record.get("commit"), record.get("gpu"))
            found[run] = {**found.pop(run, {}), record["provider"]: record}  # popped: runs in the order of their ends
    latest_first = [list(run.values()) for run in reversed(found.values())]
    return max(latest_first, key=lambda run: sum(is_peer(r["provider"]) for r in run), default=[])


def is_peer(provider: str) -> bool:
    """Whether it is someone else's: neither one of ours nor a part of a computation."""
    return OURS.match(provider) is None
