"""Regular expressions that come with files and recipes, over names of layers. Python's may take longer than anybody
waits, exponentially long in a name; such ones are matched in a process of their own, with a limit of time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence

SECONDS = 10
"""Limit of the time that an expression takes for all names."""
_PROGRAM = """
import json, re, sys
pattern, texts = json.load(sys.stdin)
json.dump([re.fullmatch(pattern, text) is not None for text in texts], sys.stdout)
"""


def full_matches(pattern: str, texts: Sequence[str]) -> list[bool]:
    """Whether `re.fullmatch` finds `pattern` in each of the texts.

    Raises ValueError, which says so in words that follow the expression, if it is no regular expression, or takes more
    than SECONDS.
    """
    try:
        expression = re.compile(pattern)
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(f"is no regular expression: {error}") from None
    if _is_quick(pattern):
        return [expression.fullmatch(text) is not None for text in texts]
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _PROGRAM],
            input=json.dumps([pattern, list(texts)]),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"takes more than {SECONDS} seconds as a regular expression; give a simpler one") from None
    found: list[bool] = json.loads(done.stdout)
    return found


def _is_quick(pattern: str) -> bool:
    """Whether it has at most three repetitions, and none of a group: its time is at most cubic in the text."""
    return len(re.findall(r"[*+{]|(?<!\()\?", pattern)) <= 3 and re.search(r"\)[*+{]", pattern) is None
