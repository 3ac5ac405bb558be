"""Records (lines of JSON) as texts and chats: the formats of datasets, normalised for chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from itertools import dropwhile
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from ligermodels.convert.input_files import open_file, parse_json
from ligermodels.data.chat import Message, join_turns
from ligermodels.errors import InputError

Chat: TypeAlias = tuple[list[Message], dict[str, Any]]
"""The messages of a chat, and further variables of its template (`tools`)."""

Json = TypeVar("Json")

LINE_BYTES = 8 << 20
"""Most bytes of a line: tokenising 8 MiB takes about 1 GB of memory."""

JSON_LINES = (".jsonl", ".ndjson", ".json")
"""Suffixes, in any case, of files with one JSON object per line."""

NO_TEXT = {
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip"), "is compressed: unpack it first"),
    **dict.fromkeys((".parquet", ".arrow"), "is binary: write it as JSON, one object per line, to a .jsonl file"),
}
"""Suffixes of files that cannot be read by line -> problem and advice, for messages."""

ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "developer": "system",
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "tool_response", "ipython"), "tool"),
}
"""Speakers in OpenAI's and ShareGPT's formats, in any case -> roles of chat templates."""

CALLS = ("function_call", "tool_call")
"""Speakers of turns that contain tool calls, as JSON."""


class NothingToLearn(ValueError):
    """The line is valid, but its text is empty, or the assistant says nothing in its chat."""


def has_json_lines(path: Path) -> bool:
    """Whether a file has lines of JSON, by its suffix: True for .jsonl, .ndjson and .json, False for plain text.

    Raises InputError for compressed and binary files (by suffix), for a JSON array instead of lines, and if the file
    cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix in NO_TEXT:
        raise InputError(f"{path}: {NO_TEXT[suffix]}")
    if suffix not in JSON_LINES:
        return False
    with open_file(path, InputError) as content:
        if content.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            raise InputError(
                f"{path}: is a JSON array, and cannot be read line by line: write one object per line, "
                f"for example with jq -c '.[]' {path.name} > {path.stem}.lines.jsonl"
            )
    return True


def parse_line(line: bytes) -> str | Chat:
    """Parse a line of JSON with a text or a chat.

    Keys with a null value count as absent. Consecutive turns of the user are joined by a blank line. A chat under
    `conversations` starts at its first turn of the system or the user, as in FastChat.

    Args:
        line: a JSON object with a string under `text`, or a list of turns under `messages` (OpenAI's format) or
            `conversations` (ShareGPT's), with or without `tools`.

    Returns:
        The text; or, for a chat, its messages and the template variables (`{"tools": [...]}` or `{}`).

    Raises:
        ValueError: the line is invalid.
        NothingToLearn: (a ValueError) the assistant neither says a word nor calls a tool in the chat.

    Examples:
        >>> parse_line(b'{"text": "Once upon a time"}')
        'Once upon a time'
        >>> parse_line(b'{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}')
        ([{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}], {})
    """
    record = _without_nulls(_parsed(line))
    turns = record.get("messages", record.get("conversations"))
    if turns is not None:
        return _chat(turns, record.get("tools", []), from_sharegpt="messages" not in record)
    message = 'not an object with a string under "text", or a list under "messages" or "conversations"'
    return _check_type(record.get("text"), str, message)


def _check_type(value: Any, json_type: type[Json], message: str) -> Json:
    """`value`. Raises ValueError with `message` unless it is a `json_type`."""
    if not isinstance(value, json_type):
        raise ValueError(message)
    return value


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


def _chat(turns: Any, tools: Any, *, from_sharegpt: bool) -> Chat:
    """The messages and tools of a chat; a ShareGPT chat starts at its first turn of the system or the user."""
    turns = _check_type(turns, list, "a chat must be a list of turns")
    messages = [_message(turn, number) for number, turn in enumerate(turns, start=1)]
    if from_sharegpt:
        messages = list(dropwhile(lambda message: message["role"] not in ("system", "user"), messages))
    answers = (message for message in messages if message["role"] == "assistant")
    if not any(message.get("tool_calls") or message["content"].strip() for message in answers):
        raise NothingToLearn("the assistant does not say a word in the chat")
    tools = _check_type(_decoded(tools) or [], list, '"tools" must be a list')
    return _alternating(messages), {"tools": tools} if tools else {}


def _message(turn: Any, number: int) -> Message:
    """A turn with the keys of transformers ("role", "content") or ShareGPT ("from", "value"), as a message."""
    fields = _without_nulls(turn)
    role, content = fields.pop("from", None), fields.pop("value", None)
    role, content = fields.pop("role", role), _joined(fields.pop("content", content))
    function_call = fields.pop("function_call", None)  # OpenAI's format before tool_calls
    calls = _decoded(fields.pop("tool_calls", [])) or ([function_call] if function_call else [])
    no_text = f'turn {number} of the chat needs text under "role" and "content", or "from" and "value"'
    role = _check_type(role, str, no_text).strip().lower()
    if content is not None or not calls:
        content = _check_type(content, str, no_text)
    if role not in ROLES:
        raise ValueError(f"turn {number} of the chat has an unknown role, {role!r}; use one of {', '.join(ROLES)}")
    if role in CALLS and isinstance(call := _decoded(content), (dict, list)):
        calls = call if isinstance(call, list) else [call]
        content = None if calls else ""
    if calls:
        fields["tool_calls"] = _calls(calls, number)
    return {"role": ROLES[role], **({} if content is None else {"content": content}), **fields}


def _joined(content: Any) -> Any:
    """The text of a list of text parts; any other content unchanged."""
    if not isinstance(content, list):
        return content
    parts = [_without_nulls(part) for part in content]
    if all(part.get("type") == "text" for part in parts):
        with suppress(TypeError):  # the text of a part is no str
            return "".join(part.get("text", "") for part in parts)
    return content


def _calls(calls: Any, number: int) -> list[dict[str, Any]]:
    message = f"turn {number} of the chat: tool calls must be a list of objects"
    return [_call(_check_type(call, dict, message), number) for call in _check_type(calls, list, message)]


def _call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A tool call as {"type": "function", "function": {"name", "arguments"}}. Arguments stay in their form, a dict or
    JSON in a string, until it is known which form the chat template takes."""
    call = _without_nulls(call)
    function = _without_nulls(call.get("function", call))
    _check_type(function.get("name"), str, f"turn {number} of the chat calls a tool without a name")
    return {"type": "function", **(call if "function" in call else {}), "function": function}


def _alternating(messages: list[Message]) -> list[Message]:
    """Join consecutive turns of the user: most templates require turns to alternate."""
    joined = messages[:1]
    for message in messages[1:]:
        last = joined[-1]
        if message["role"] == last["role"] == "user" and message.get("name") == last.get("name"):
            joined[-1] = join_turns(last, message)
        else:
            joined.append(message)
    return joined


def _without_nulls(value: Any) -> dict[str, Any]:
    """An object without null values, because templates treat a null as present; {} for any other value."""
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else {}


def _decoded(value: Any) -> Any:
    """A string decoded as JSON; any other value, and a string that is no JSON, unchanged."""
    if isinstance(value, str):
        with suppress(ValueError):
            return parse_json(value)
    return value
