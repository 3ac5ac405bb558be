"""Match names of layers with regular expressions from files and recipes.

Python's matching time can be exponential in the length of a name. Such expressions are matched in a separate process
with a time limit.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence

SECONDS = 10
"""Time limit for matching an expression with all names."""
_PROGRAM = """
import json, re, sys
pattern, texts = json.load(sys.stdin)
json.dump([re.fullmatch(pattern, text) is not None for text in texts], sys.stdout)
"""


def full_matches(pattern: str, texts: Sequence[str]) -> list[bool]:
    """For each text, whether `re.fullmatch` matches it with `pattern`.

    Raises ValueError if `pattern` is not a regular expression, or takes more than SECONDS. Its message continues a
    sentence that begins with the expression.
    """
    try:
        expression = re.compile(pattern)
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(f"is no regular expression: {error}") from None
    if _is_quick(pattern):
        return [expression.fullmatch(text) is not None for text in texts]
    try:
        process = subprocess.run(
            [sys.executable, "-I", "-c", _PROGRAM],
            input=json.dumps([pattern, list(texts)]),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"takes more than {SECONDS} seconds as a regular expression; give a simpler one") from None
    matches: list[bool] = json.loads(process.stdout)
    return matches


def _is_quick(pattern: str) -> bool:
    """Whether the pattern has at most three repetitions and repeats no group, so that its time is at most cubic."""
    return len(re.findall(r"[*+{]|(?<!\()\?", pattern)) <= 3 and re.search(r"\)[*+{]", pattern) is None
