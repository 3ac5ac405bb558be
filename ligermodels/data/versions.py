"""A chat, and other versions of it, as texts: shorter ones, and ones with other values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ligermodels.data import rendering
from ligermodels.data.parts import PROBE, outlined, probed, without
from ligermodels.data.rendering import END, START
from ligermodels.errors import InputError

if TYPE_CHECKING:
    from ligermodels.data.chat import ChatTemplate, Message

AT_ONCE = 1 << 22
"""Most characters of the versions of a chat that are rendered together."""


class Version(NamedTuple):
    """A version of a chat.

    length: number of messages; None for all.
    prompt: append a generation prompt.
    probed: index of a message, and the part of it that has PROBE as its value.
    dropped: index of a message, and the parts of it that are left out.
    answered: append a turn of the assistant with PROBE as its content.
    outlined: the texts of all messages are markers: see `parts.outlined`.
    asked: a turn of the user comes before the first message that is no system turn.
    """

    length: int | None = None
    prompt: bool = False
    probed: tuple[int, str] | None = None
    dropped: tuple[int, frozenset[str]] | None = None
    answered: bool = False
    outlined: bool = False
    asked: bool = False


@dataclass(frozen=True)
class Versions:
    """Renders versions of a chat, each once.

    Args:
        template: the chat template.
        messages: the messages, as the template expects them.
        variables: further variables of the template.
    """

    template: ChatTemplate
    messages: Sequence[Message]
    variables: Mapping[str, Any]
    answers: dict[Version, tuple[str, str]] = field(default_factory=dict)
    """Answers of `rendering.render_all`."""

    @cached_property
    def _size(self) -> int:
        """Characters of a version, approximately."""
        return len(json.dumps([self.messages, self.variables], ensure_ascii=False, default=str))

    def render_ahead(self, versions: Sequence[Version]) -> None:
        """Render versions in one exchange with the process that renders, if they have at most AT_ONCE characters."""
        needed = [version for version in dict.fromkeys(versions) if version not in self.answers]
        if needed and len(needed) * self._size <= AT_ONCE:
            answers = self.template.render_all_marked([self._chat(version) for version in needed], self.variables)
            self.answers.update(zip(needed, answers, strict=False))  # no answers if a version ended the process

    def _chat(self, version: Version) -> tuple[Sequence[Message], bool]:
        """The messages of a version, and whether a generation prompt follows them."""
        messages = list(self.messages[: version.length])
        if version.outlined:
            messages, _ = outlined(messages)
        if version.probed is not None:
            i, part = version.probed
            messages[i], _ = probed(messages[i], part)
        if version.dropped is not None:
            i, parts = version.dropped
            messages[i] = without(messages[i], parts)
        if version.answered:
            messages.append({"role": "assistant", "content": PROBE})
        if version.asked:
            first = next((i for i, message in enumerate(messages) if message.get("role") != "system"), len(messages))
            messages.insert(first, {"role": "user", "content": "?"})
        return messages, version.prompt

    def marked_text(self, version: Version) -> str:
        """The text of a version, with the marks of `{% generation %}`. Raises InputError if the template refuses it."""
        if version not in self.answers:
            (self.answers[version],) = self.template.render_all_marked([self._chat(version)], self.variables)
        return rendering.text_of_answer(self.template.name, self.answers[version])

    def text(self, version: Version) -> str:
        """The text of a version. Raises InputError if the template refuses it."""
        return without_marks(self.marked_text(version))[0]

    def try_text(self, version: Version) -> str | None:
        """The text of a version, or None if the template refuses it."""
        try:
            return self.text(version)
        except InputError:
            return None


def without_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """A text without the marks of `{% generation %}`, and the spans (start, end) between them."""
    parts, spans, size, start = [], [], 0, 0
    for piece in re.split(f"([{START}{END}])", marked):
        if piece == START:
            start = size
        elif piece == END:
            spans.append((start, size))
        else:
            parts.append(piece)
            size += len(piece)
    return "".join(parts), spans
