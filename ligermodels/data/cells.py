"""Turns of chats in the cells of tables of text, which hold no lists."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ligermodels.convert.input_files import RepeatedField, parse_json
from ligermodels.data.lines import decoded
from ligermodels.data.records import ROLES

OF_TURNS = (
    *("messages", "conversations", "prompt", "completion"),
    *("chosen", "rejected", "rejected_response", "rejected_messages"),
)
"""Columns that may hold turns."""

_FIRST_KEY = re.compile(r"""\s*\[\s*\{\s*(["'])(?:role|from|content|value)\1\s*:""")
_SPEAKER = re.compile(r"""(["'])(?:role|from)\1\s*:\s*(["'])(\w+)\2""")


def value_of(column: str, cell: str) -> Any:
    """The value of a cell: its text, or the turns of a chat that it has as JSON or as Python writes a list (pandas).

    Raises ValueError for a list of turns that is cut, is written in another way, or has a field twice.
    """
    if column not in OF_TURNS or not cell.lstrip().startswith(("[", "{")):
        return cell
    checks: dict[Callable[[str], Any], Callable[[str], object]] = {
        parse_json: decoded,
        ast.literal_eval: _check_literal,
    }  # later: texts may have a field twice
    for parse in checks:
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            found = parse(cell)
            break
    else:
        if _FIRST_KEY.match(cell) and any(found[3].lower() in ROLES for found in _SPEAKER.finditer(cell)):
            raise ValueError(
                f'"{column}" begins as a list of turns, and is neither JSON nor a list as Python writes it. The to_csv '
                "of pandas and of the package datasets writes arrays without commas: use to_json or to_parquet"
            )
        return cell
    if not _are_turns(found, column):
        return cell
    try:
        checks[parse](cell)
    except RepeatedField as error:
        raise ValueError(f'"{column}": {error}') from None
    return found


def _check_literal(cell: str) -> None:
    """Raise RepeatedField for a dict in Python's syntax that has a key twice."""
    dicts = [node for node in ast.walk(ast.parse(cell.strip(), mode="eval")) if isinstance(node, ast.Dict)]
    for keys in ([key.value for key in each.keys if isinstance(key, ast.Constant)] for each in dicts):
        if twice := [key for i, key in enumerate(keys) if key in keys[:i]]:
            raise RepeatedField(f"an object has the field {twice[0]!r} twice")


def _are_turns(value: Any, column: str) -> bool:
    """Whether a value is a list of turns, or in a column of answers one turn."""
    turns = value if isinstance(value, list) else [value] if column.startswith(("chosen", "rejected")) else []
    return bool(turns) and all(map(_is_turn, turns))


def _is_turn(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    speaker = value.get("role", value.get("from"))
    known = isinstance(speaker, str) and speaker.strip().lower() in ROLES
    return known and any(name in value for name in ("content", "value", "tool_calls", "function_call"))
