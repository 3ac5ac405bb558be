"""Lines of JSON as the fields of records."""

from __future__ import annotations

import json
from typing import Any

from ligermodels.convert.input_files import RepeatedField, parse_json

LINE_BYTES = 8 << 20
"""Most bytes of a line: tokenising 8 MiB takes about 1 GB of memory."""


def fields_of(line: bytes) -> dict[str, Any]:
    """The fields of a line of JSON, without null values; {} for a line that is no object.

    Raises ValueError for an invalid line.
    """
    return without_nulls(_parsed(line))


def _parsed(line: bytes) -> Any:
    if len(line) > LINE_BYTES:
        raise ValueError(
            f"has more than {LINE_BYTES:,} bytes; cut the text into several lines, or give it as a .txt file"
        )
    try:
        record = parse_json(line.removeprefix(b"\xef\xbb\xbf"), unique=True)
        if b"\\ud" in line.lower():
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair (\\ud...), which is no character") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    return record


def without_nulls(value: Any) -> dict[str, Any]:
    """An object without null values, because templates treat a null as present; {} for any other value."""
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else {}


def decoded(value: Any) -> Any:
    """A string decoded as JSON; any other value, and a string that is no JSON, unchanged.

    Raises RepeatedField, a ValueError, for an object with a field twice."""
    try:
        return parse_json(value, unique=True) if isinstance(value, str) else value
    except RepeatedField:
        raise
    except ValueError:
        return value
