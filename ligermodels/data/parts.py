"""The parts of a message that a template writes, messages with other values in a part, and forms of tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ligermodels.convert.input_files import RepeatedField
from ligermodels.data.lines import decoded
from ligermodels.errors import InputError

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
    "None", and with its reasoning under the keys that templates read. A turn of reasoning alone has an empty content,
    because templates expect one."""
    present = {key: value for key, value in message.items() if value is not None}
    for key in REASONING:
        if key in present:
            if not present.get("tool_calls"):  # `CallForm` has their content
                present = {"content": "", **present}
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
        other = with_arguments(message, lambda arguments: AS_TEXT if isinstance(arguments, str) else AS_DICT)
        return other, len(message["tool_calls"])
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


def _other(value: Any) -> Any:
    """`value` with PROBE for its texts; if it has no text, followed or replaced by PROBE."""
    changed = _other_texts(value)
    return changed if _count(changed) else value + PROBE if isinstance(value, str) else PROBE


def _other_texts(value: Any) -> Any:
    match value:
        case str():
            return PROBE if value.strip() else value
        case list() | tuple():
            return [_other_texts(item) for item in value]
        case Mapping():
            return {key: item if key in ("type", "name") else _other_texts(item) for key, item in value.items()}
        case _:
            return value


def _count(value: Any) -> int:
    return json.dumps(value, ensure_ascii=False, default=str).count(PROBE)


AS_DICT, AS_TEXT = {"x": PROBE}, f'{{"x": "{PROBE}"}}'
"""Arguments of a call in the two forms."""

CONTENTS: tuple[dict[str, Any], ...] = ({}, {"content": None}, {"content": ""})
"""Forms of a turn without content, the first that a template takes is used."""


class CallForm(NamedTuple):
    """How a template takes turns with tool calls.

    content: the key and the value of a content that is not given.
    takes_text: arguments as JSON in a string are written as they are.
    takes_dict: arguments in a dict are written.
    """

    content: Mapping[str, Any]
    takes_text: bool
    takes_dict: bool

    @classmethod
    def of(cls, render: Callable[[list[Mapping[str, Any]]], str]) -> CallForm:
        """The forms that a template takes. `render` renders a chat by it, "" if the template refuses the chat."""
        texts = {
            (as_text, i): render(_chat(AS_TEXT if as_text else AS_DICT, content))
            for as_text in (True, False)
            for i, content in enumerate(CONTENTS)
        }
        taken = {key for key, text in texts.items() if (AS_TEXT if key[0] else PROBE) in text}
        content = min((i for _, i in taken), default=0)
        return cls(CONTENTS[content], any(as_text for as_text, _ in taken), any(not as_text for as_text, _ in taken))

    def apply(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message with tool calls, in a form that the template takes; as it is, if the template takes none."""
        return with_arguments({**self.content, **message}, self._convert)

    def _convert(self, arguments: Any) -> Any:
        arguments = "{}" if arguments in (None, "") else arguments  # a call without arguments
        if isinstance(arguments, str) and self.takes_dict and not self.takes_text:
            try:
                value = decoded(arguments)
            except RepeatedField as error:
                raise InputError(f"the arguments of a tool call: {error}") from None
            return value if isinstance(value, dict) else arguments
        if isinstance(arguments, Mapping) and self.takes_text and not self.takes_dict:
            return json.dumps(arguments, ensure_ascii=False)
        return arguments


def _chat(arguments: Any, content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "?"}, {"role": "assistant", **content, "tool_calls": [call]}]
