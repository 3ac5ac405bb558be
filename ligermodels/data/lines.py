"""Lines of JSON as the fields of records, and turns of chats that tables hold as text."""

from __future__ import annotations

import ast
import json
import re
from contextlib import suppress
from typing import Any

from ligermodels.convert.input_files import parse_json

LINE_BYTES = 8 << 20
"""Most bytes of a line: tokenising 8 MiB takes about 1 GB of memory."""

OF_TURNS = (
    *("messages", "conversations", "prompt", "completion"),
    *("chosen", "rejected", "rejected_response", "rejected_messages"),
)
"""Fields that may hold a list of turns. A cell of a table holds it as text."""

_BEGINS_AS_TURNS = re.compile(r"""\s*\[?\s*\{\s*(["'])(role|content|from|value)\1\s*:""")
_KEYS = ({"role", "content"}, {"from", "value"})


def fields_of(line: bytes) -> dict[str, Any]:
    """The fields of a line of JSON, without null values; {} for a line that is no object.

    Turns that a field holds as text, as cells of tables do, are lists. Raises ValueError for an invalid line.
    """
    return {name: _with_turns(name, value) for name, value in without_nulls(_parsed(line)).items()}


def _parsed(line: bytes) -> Any:
    if len(line) > LINE_BYTES:
        raise ValueError(
            f"has more than {LINE_BYTES:,} bytes; cut the text into several lines, or give it as a .txt file"
        )
    try:
        record = parse_json(line.removeprefix(b"\xef\xbb\xbf"))
        if b"\\ud" in line.lower():
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair (\\ud...), which is no character") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    return record


def _with_turns(name: str, value: Any) -> Any:
    """The value of a field, with the turns in it if it is a list of turns written as text.

    JSON, or as Python writes a list, which is in tables that pandas wrote. Raises ValueError for a text that begins as
    turns do but is neither.
    """
    if name not in OF_TURNS or not isinstance(value, str) or not _BEGINS_AS_TURNS.match(value):
        return value
    for parse in (parse_json, ast.literal_eval):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return found if _are_turns(found := parse(value), alone=name.startswith(("chosen", "rejected"))) else value
    if value.lstrip().startswith("{"):
        return value
    raise ValueError(f'"{name}" begins as a list of turns, but cannot be read: write it as JSON, or use JSON Lines')


def _are_turns(value: Any, *, alone: bool) -> bool:
    """Whether a value is a list of turns, or with `alone` a turn by itself."""
    turns = value if isinstance(value, list) else [value] if alone else []
    return bool(turns) and all(any(without_nulls(turn).keys() >= keys for keys in _KEYS) for turn in turns)


def without_nulls(value: Any) -> dict[str, Any]:
    """An object without null values, because templates treat a null as present; {} for any other value."""
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else {}


def decoded(value: Any) -> Any:
    """A string decoded as JSON; any other value, and a string that is no JSON, unchanged."""
    if isinstance(value, str):
        with suppress(ValueError):
            return parse_json(value)
    return value
