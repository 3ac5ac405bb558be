"""The forms in which a chat template takes turns with tool calls.

OpenAI's API has arguments as JSON in a string, transformers' documentation has them as a dict. A template may take
both, encode what it gets as JSON (a string would be encoded twice), iterate over a dict, or concatenate strings. Where
there is no content, OpenAI's API has null; transformers leaves the key out; some templates test for none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from ligermodels.convert.input_files import parse_json
from ligermodels.data.parts import PROBE, with_arguments

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
        """The forms that a template takes.

        Args:
            render: renders a chat by the template, "" if the template refuses it.
        """
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
        if isinstance(arguments, str) and self.takes_dict and not self.takes_text:
            with suppress(ValueError):
                decoded = parse_json(arguments or "{}")
                return decoded if isinstance(decoded, dict) else arguments
        if isinstance(arguments, Mapping) and self.takes_text and not self.takes_dict:
            return json.dumps(arguments, ensure_ascii=False)
        return arguments


def _chat(arguments: Any, content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "?"}, {"role": "assistant", **content, "tool_calls": [call]}]
