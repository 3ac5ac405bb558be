"""Records, lines of JSON, as texts and chats: the formats of datasets, normalised for chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from itertools import dropwhile
from pathlib import Path
from typing import Any, TypeAlias

from ligermodels.convert.input_files import open_file, parse_json
from ligermodels.data.chat import Message, join_turns
from ligermodels.errors import InputError

Chat: TypeAlias = tuple[list[Message], dict[str, Any]]
"""The messages of a chat, and further variables of its template (`tools`)."""

LINE_BYTES = 8 << 20
"""Most bytes of a line: tokenising one of 8 MiB takes about 1 GB of memory."""

JSON_LINES = (".jsonl", ".ndjson", ".json")
"""Suffixes, in any case, of files with one JSON object per line."""

NO_TEXT = {
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip"), "is compressed: unpack it first"),
    **dict.fromkeys((".parquet", ".arrow"), "is binary: write it as JSON, one object a line, to a .jsonl file"),
}
"""Suffixes of files without random access, with the advice of the error."""

ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "developer": "system",
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "tool_response", "ipython"), "tool"),
}
"""Names of speakers, in any case, in OpenAI's and ShareGPT's formats -> roles of chat templates."""

CALLS = ("function_call", "tool_call")
"""Speakers whose content is a tool call, as JSON."""


class NothingToLearn(ValueError):
    """A valid line whose text is empty, or in whose chat the assistant says nothing."""


def has_json_lines(path: Path) -> bool:
    """Whether a file holds JSON lines, by its suffix. Raises InputError for compressed and binary files, by their
    suffix, for a JSON array instead of lines, and for what cannot be read."""
    suffix = path.suffix.lower()
    if suffix in NO_TEXT:
        raise InputError(f"{path}: {NO_TEXT[suffix]}")
    if suffix not in JSON_LINES:
        return False
    with open_file(path, InputError) as content:
        if content.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            raise InputError(
                f"{path}: is a JSON array, which cannot be read a line at a time: write one object a line, "
                f"as does jq -c '.[]' {path.name} > {path.stem}.lines.jsonl"
            )
    return True


def parse_line(line: bytes) -> str | Chat:
    """The text of a line of JSON, or its chat.

    Keys whose value is null count as absent. Consecutive turns of the user are joined by a blank line. A chat under
    `conversations` starts at its first turn of the system or the user, as in FastChat.

    Raises ValueError for an invalid line, and NothingToLearn (a ValueError) for a chat in which the assistant neither
    says a word nor calls a tool.
    """
    record = _known(_parsed(line))
    turns = record.get("messages", record.get("conversations"))
    if turns is not None:
        return _chat(turns, record.get("tools", []), from_sharegpt="messages" not in record)
    text = record.get("text")
    if not isinstance(text, str):
        raise ValueError('not an object with a string under "text", or a list under "messages" or "conversations"')
    return text


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
        raise ValueError("holds half of a surrogate pair (\\ud...), which is no character") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    return record


def _chat(turns: Any, tools: Any, *, from_sharegpt: bool) -> Chat:
    """The messages and tools of a chat; a ShareGPT chat starts at its first turn of the system or the user."""
    if not isinstance(turns, list):
        raise ValueError("a chat must be a list of turns")
    messages = [_message(turn, number) for number, turn in enumerate(turns, start=1)]
    if from_sharegpt:
        messages = list(dropwhile(lambda message: message["role"] not in ("system", "user"), messages))
    answers = (message for message in messages if message["role"] == "assistant")
    if not any(message["content"].strip() or message.get("tool_calls") for message in answers):
        raise NothingToLearn("the assistant does not say a word in the chat")
    tools = _decoded(tools) or []
    if not isinstance(tools, list):
        raise ValueError('"tools" must be a list')
    return _alternating(messages), {"tools": tools} if tools else {}


def _message(turn: Any, number: int) -> Message:
    """A turn with the keys of transformers ("role", "content") or ShareGPT ("from", "value"), as a message."""
    fields = _known(turn)
    role, content = fields.pop("from", None), fields.pop("value", None)
    role, content = fields.pop("role", role), _joined(fields.pop("content", content))
    function_call = fields.pop("function_call", None)  # OpenAI's format before tool_calls
    calls = _decoded(fields.pop("tool_calls", [])) or ([function_call] if function_call else [])
    if content is None and calls:
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f'turn {number} of the chat needs text under "role" and "content", or "from" and "value"')
    role = role.strip().lower()
    if role not in ROLES:
        raise ValueError(f"turn {number} of the chat is by {role!r}, who is none of {', '.join(ROLES)}")
    if role in CALLS and isinstance(call := _decoded(content), (dict, list)):
        calls, content = call if isinstance(call, list) else [call], ""
    if calls:
        fields["tool_calls"] = _calls(calls, number)
    return {"role": ROLES[role], "content": content, **fields}


def _joined(content: Any) -> Any:
    """The text of a content that is a list of text parts; another content as it is."""
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return content
    texts = [_known(part).get("text", "") for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else texts


def _calls(calls: Any, number: int) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"turn {number} of the chat: calls of tools must be a list of objects")
    return [_call(call, number) for call in calls]


def _call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A tool call as {"type": "function", "function": {"name", "arguments"}}. Arguments given as text (OpenAI) are
    decoded: templates write the JSON themselves."""
    call = _known(call)
    function = _known(call.get("function", call))
    if not isinstance(function.get("name"), str):
        raise ValueError(f"turn {number} of the chat calls a tool without a name")
    arguments = _decoded(function.get("arguments"))
    if isinstance(arguments, dict):
        function["arguments"] = arguments
    return {"type": "function", **(call if "function" in call else {}), "function": function}


def _alternating(messages: list[Message]) -> list[Message]:
    """Join consecutive turns of the user: most templates require turns to alternate."""
    found = messages[:1]
    for message in messages[1:]:
        last = found[-1]
        if message["role"] == last["role"] == "user" and message.get("name") == last.get("name"):
            found[-1] = join_turns(last, message)
        else:
            found.append(message)
    return found


def _known(value: Any) -> dict[str, Any]:
    """An object without its null values, which templates would treat as present; {} for anything else."""
    return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else {}


def _decoded(value: Any) -> Any:
    """A string decoded as JSON, or the value itself if it is not one."""
    if isinstance(value, str):
        with suppress(ValueError):
            return parse_json(value)
    return value
