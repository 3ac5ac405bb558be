"""The parts of a message that a template writes, and messages with other values in a part."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

PROBE = "\ufdd2"
"""A value that no text has: a Unicode noncharacter, like `rendering.START` and `rendering.END`."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of the reasoning of a turn, the first that is given wins."""

FIELDS = {
    "reasoning": REASONING,
    "content": ("content",),
    "calls": ("tool_calls",),
    "responses": ("tool_responses",),  # results that Gemma 4's templates take from the assistant's message
}
"""Part of a message -> the keys that hold it."""


def as_templates_expect(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as transformers gives it to templates: without keys that are null, which templates would write as
    "None", and with its reasoning under the keys that templates read."""
    present = {key: value for key, value in message.items() if value is not None}
    for key in REASONING:
        if key in present:
            return {"thinking": present[key], **present, "reasoning_content": present[key]}
    return present


def parts_of(message: Mapping[str, Any]) -> list[str]:
    """The parts of a message that are not empty; the content if all are empty."""
    return [part for part in FIELDS if is_filled(message, part)] or ["content"]


def is_filled(message: Mapping[str, Any], part: str) -> bool:
    """Whether a part of a message is not empty."""
    values = [message.get(key) for key in FIELDS[part]]
    return any(value.strip() if isinstance(value, str) else value for value in values)


def is_trained(message: Mapping[str, Any]) -> bool:
    """Whether to train on a turn of the assistant: not if it has `"train": false` or `"weight": 0`."""
    return bool(message.get("train", True)) and message.get("weight", 1) != 0


def without(message: Mapping[str, Any], parts: Collection[str]) -> Mapping[str, Any]:
    """The message without these parts; its content is empty instead, because templates expect one."""
    dropped = {key for part in parts for key in FIELDS[part]}
    kept = {key: value for key, value in message.items() if key not in dropped}
    return {**kept, "content": ""} if "content" in dropped else kept


def probed(message: Mapping[str, Any], part: str) -> tuple[Mapping[str, Any], int]:
    """The message with PROBE for the values of a part, and how many PROBEs a text has that shows them once.

    Names and ids of tool calls stay, because templates repeat them in the results.
    """
    if part == "calls":
        return with_arguments(message, _other_arguments), len(message["tool_calls"])
    keys = [key for key in FIELDS[part] if key in message] or ["content"]
    changed = {key: _other(message.get(key)) for key in keys}
    return {**message, **changed}, max(map(_count, changed.values()))


def outlined(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[tuple[int, str]]]:
    """The messages with a numbered marker for each part that is a text, and these parts: index of the message, name.

    The marker of part number k is PROBE, k in digits, PROBE.
    """
    outline, parts = list(messages), list[tuple[int, str]]()
    for i, message in enumerate(messages):
        for part in parts_of(message):
            keys = [key for key in FIELDS[part] if key in message] or ["content"]
            if all(isinstance(message.get(key, ""), str) for key in keys):
                outline[i] = {**outline[i], **dict.fromkeys(keys, f"{PROBE}{len(parts)}{PROBE}")}
                parts.append((i, part))
    return outline, parts


def text_of(message: Mapping[str, Any], part: str) -> str:
    """The text of a part that `outlined` has a marker for."""
    return next((message[key] for key in FIELDS[part] if key in message), "")


def with_arguments(message: Mapping[str, Any], convert: Callable[[Any], Any]) -> Mapping[str, Any]:
    """The message with `convert(arguments)` for the arguments of each tool call, with or without "function"."""
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        if isinstance(function, Mapping):
            function = {**function, "arguments": convert(function.get("arguments"))}
            call = {**call, "function": function} if "function" in call else function
        calls.append(call)
    return {**message, "tool_calls": calls}


def _other_arguments(arguments: Any) -> Any:
    return json.dumps({"x": PROBE}, ensure_ascii=False) if isinstance(arguments, str) else {"x": PROBE}


def _other(value: Any) -> Any:
    """`value` with PROBE for its texts; if it has no text, followed or replaced by PROBE."""
    changed = _other_texts(value)
    return changed if _count(changed) else value + PROBE if isinstance(value, str) else PROBE


def _other_texts(value: Any) -> Any:
    if isinstance(value, str):
        return PROBE if value.strip() else value
    if isinstance(value, list | tuple):
        return [_other_texts(item) for item in value]
    if isinstance(value, Mapping):
        return {key: item if key in ("type", "name") else _other_texts(item) for key, item in value.items()}
    return value


def _count(value: Any) -> int:
    return json.dumps(value, ensure_ascii=False, default=str).count(PROBE)
