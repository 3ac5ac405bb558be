"""Locating the assistant's turns in a rendered chat."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ligermodels.data import rendering
from ligermodels.errors import InputError

if TYPE_CHECKING:
    from ligermodels.data.chat import ChatTemplate, Message

PROBE = "\ufdd2"
"""A marker in rendered text: a Unicode noncharacter, like START and END."""

AT_ONCE = 1 << 22
"""Most characters of the versions of a chat that are rendered together."""


@dataclass(frozen=True)
class Turns:
    """Locates the assistant's turns in `text`, the rendered messages, by rendering other versions of the messages."""

    template: ChatTemplate
    messages: Sequence[Message]
    special: re.Pattern[str]
    variables: Mapping[str, Any]
    answers: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)
    """Answers of `rendering.render_all` for versions that are already rendered."""

    def render_ahead(self, assistant: Sequence[int], size: int) -> None:
        """Render together all versions that are needed to locate these turns, if they have at most AT_ONCE characters;
        a version has about `size` characters."""
        needed = [("whole", 0)]
        needed += [("without calls", i) for i, message in enumerate(self.messages) if message.get("tool_calls")]
        needed += [(version, i) for i in assistant for version in ("last", "prompt", "earlier", "probed")]
        if len(needed) * size <= AT_ONCE:
            answers = self.template.render_all_marked([self._version(*key) for key in needed], self.variables)
            self.answers.update(zip(needed, answers, strict=False))  # no answers if a version ended the process

    def _version(self, version: str, i: int) -> tuple[Sequence[Message], bool]:
        """Messages of a version of the chat, and whether a generation prompt follows them.

        "whole": all messages. "earlier": the messages before message i. "prompt": the same, and a generation prompt.
        "last": the same, and a turn of the assistant with PROBE as its content. "so far": the messages up to message i.
        "probed": all messages, message i with PROBE as its content. "without calls": all messages, message i without
        its tool calls.
        """
        if version == "whole":
            return self.messages, False
        earlier, message, later = self.messages[:i], self.messages[i], self.messages[i + 1 :]
        match version:
            case "earlier" | "prompt":
                return earlier, version == "prompt"
            case "last":
                return [*earlier, {"role": "assistant", "content": PROBE}], False
            case "probed":
                return [*earlier, {**message, "content": PROBE}, *later], False
            case "so far":
                return [*earlier, message], False
        without = {key: value for key, value in message.items() if key != "tool_calls"}
        return [*earlier, without, *later], False

    @cached_property
    def text(self) -> str:
        """The text of all messages. Raises InputError if the template refuses them."""
        return self._text("whole", 0)

    def check_calls(self) -> None:
        """Raise InputError if the template omits tool calls: the model would be trained on an empty turn."""
        for i, message in enumerate(self.messages):
            if message.get("tool_calls") and self._try("without calls", i) == self.text:
                raise InputError(f"{self.template.name}: does not write the tool calls in message {i}")

    def span(self, i: int) -> tuple[int, int]:
        """Start and end of turn i of the assistant in `text`. Raises InputError if it cannot be located."""
        # Rendered as the last turn, it shows the template's text before and after the content.
        head, probed, tail = (self._try("last", i) or "").partition(PROBE)
        content = self._content(i)
        start = self._start(i, content, [head, head.rstrip()] if probed else [])
        if start is not None and content is not None and not self.messages[i].get("tool_calls"):
            return start, self._end(content[1], tail)
        # The turn has more than its content (tool calls), or its content changes the surrounding text (reasoning).
        end = self._end_of_more(i, content[1] if content else start, tail) if start is not None else None
        if start is None or end is None:
            raise InputError(
                f"{self.template.name}: message {i}, of the assistant, cannot be located in the rendered chat"
            )
        return start, end

    def _start(self, i: int, content: tuple[int, int] | None, heads: list[str]) -> int | None:
        """The start of turn i: the end of its generation prompt, or the start of its content, or the end of a head."""
        prompt = self._try("prompt", i)
        has_prompt = prompt is not None and prompt != self._try("earlier", i)
        start = len(prompt) if prompt is not None and self.text.startswith(prompt) else None
        if content is not None:
            is_before = start is not None and start <= content[0]
            return start if is_before and (has_prompt or self.text[start : content[0]].isspace()) else content[0]
        return start if has_prompt else next((len(head) for head in heads if self.text.startswith(head)), None)

    def _end_of_more(self, i: int, start: int, tail: str) -> int | None:
        """The end, after `start`, of message i, or None if unknown. `tail` follows a last turn."""
        so_far = self._try("so far", i)
        if so_far is not None and self.text.startswith(so_far):
            tokens = list(self.special.finditer(so_far, start))
            if tokens and not so_far[tokens[-1].end() :].strip():
                return tokens[-1].end()
        token = self.special.match(tail.lstrip())
        mark = token[0] if token else tail.strip()
        end = self.text.find(mark, start) if mark else -1
        return end + len(mark) if end >= 0 else None

    def _content(self, i: int) -> tuple[int, int] | None:
        """The span of the content of message i: the part of the text that changes with the content."""
        probed = self._try("probed", i)
        before, probe, after = (probed or "").partition(PROBE)
        if not probe or PROBE in after or len(before) + len(after) > len(self.text):
            return None
        if not (self.text.startswith(before) and self.text.endswith(after)):
            return None
        return len(before), len(self.text) - len(after)

    def _end(self, content_end: int, tail: str) -> int:
        """The end of a turn, from the end of its content; `tail` follows the content of a last turn."""
        rest = tail.lstrip()
        if token := self.special.match(rest):
            after = len(self.text) - len(self.text[content_end:].lstrip())
            return after + len(token[0]) if self.text.startswith(token[0], after) else content_end
        mark = tail.rstrip()  # an end marker that is not a special token
        return content_end + len(mark) if self.text.startswith(mark, content_end) else content_end

    def _text(self, version: str, i: int) -> str:
        """The text of a version of the messages. Raises InputError if the template refuses it."""
        if (answer := self.answers.get((version, i))) is not None:
            return rendering.text_of(self.template.name, answer)
        return self.template.render_marked(*self._version(version, i), self.variables)

    def _try(self, version: str, i: int) -> str | None:
        """The text of a version of the messages, or None if the template refuses it."""
        try:
            return self._text(version, i)
        except InputError:
            return None
