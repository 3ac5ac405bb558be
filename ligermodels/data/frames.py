"""Where a turn of the model starts and ends, in the template's text around its parts.

The chat is rendered up to a message, with and without a generation prompt. The ends of these texts tell where, in the
text between two parts, one turn ends and another one starts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ligermodels.data.leaves import common_end, common_start
from ligermodels.data.parts import PROBE
from ligermodels.data.versions import Version, Versions

TAIL = 1000
"""Most characters of the template's text at the end of a turn."""

FURTHER = 8
"""Pieces before a generation prompt that the text may lack."""


class Head(NamedTuple):
    """The rendered chat before a turn; `header`, its end, is the beginning of the turn."""

    text: str
    header: str


class Frame(NamedTuple):
    """The template's text of a turn around its parts.

    before: characters of the turn before its first part, without the header; None if unknown.
    header: the header in the text, "" if there is none.
    after: characters of the turn after its last part.
    """

    before: int | None
    header: str
    after: int


@dataclass(frozen=True)
class Frames:
    """Splits the text between the parts of a chat.

    Args:
        versions: the chat and its other versions.
        special: pattern of the special tokens.
        first: start of the first part in the text.
    """

    versions: Versions
    special: re.Pattern[str]
    first: int

    @cached_property
    def text(self) -> str:
        """The rendered chat."""
        return self.versions.text(Version())

    @cached_property
    def pieces(self) -> re.Pattern[str]:
        """Pieces of the template's text that are never divided."""
        return re.compile(rf"(?:{self.special.pattern})|<[^<>]*>|\w+|\s|.", re.DOTALL)

    def frame(self, before: Version, after: Version, low: int, start: int, end: int, high: int) -> Frame:
        """The frame of a turn.

        Args:
            before: the version of the chat that ends before the turn.
            after: the version that ends with the turn.
            low: the end of the last part before the turn.
            start: the start of the turn's first part.
            end: the end of its last part.
            high: the start of the next part.
        """
        self.versions.render_ahead([v._replace(prompt=prompt) for v in (before, after) for prompt in (False, True)])
        head = self._head(before)
        found = self._start(head, low, start)
        if found is None:
            return Frame(None, "", self._end(after, head.header, end, high) - end)
        beginning, header = found
        # With a prompt after it, the turn before may end otherwise than as the last one: its end is no header.
        of_turn_before = max(0, low - (beginning - len(header)))
        after_part = self._end(after, head.header[of_turn_before:], end, high) - end
        return Frame(start - beginning, header[of_turn_before:], after_part)

    def _texts(self, version: Version) -> tuple[Version, str | None, str | None]:
        """A version, its text, and its text with a generation prompt, None where the template refuses it.

        A template may refuse chats without a turn of the user, as chats that the assistant begins are at first: then it
        is the version with such a turn.
        """
        found: list[tuple[Version, str | None, str | None]] = []
        for each in (version, version._replace(asked=True)):
            found.append((each, self.versions.try_text(each), self.versions.try_text(each._replace(prompt=True))))
            if None not in found[-1]:
                return found[-1]
        return found[0]

    def _head(self, before: Version) -> Head:
        """The text before a turn that follows the version `before`; empty if the template refuses to render it."""
        before, text, prompted = self._texts(before)
        if text is None or prompted is None:
            return Head("", "")
        if text != prompted:
            return self._split(text, prompted)
        # The template writes a generation prompt always, or never.
        answered = self.versions.try_text(before._replace(answered=True)) or ""
        if standing := self._standing_prompt(text, answered):
            return Head(text, standing)
        beginning, _, ending = answered.partition(PROBE)
        head = self._split(text, beginning)
        # The last turn may end otherwise than a turn in the middle of a chat.
        is_last_ending = ending.endswith(text[len(head.text) - len(head.header) :])
        return head if is_last_ending and head.header.strip() else Head(text, "")

    def _split(self, before: str, head: str) -> Head:
        """`head`, with the text by which it is longer than `before` as its header."""
        start = common_start(before, head)
        for piece in self.pieces.finditer(head, max(0, start - TAIL)):
            if piece.end() > start:
                return Head(head, head[piece.start() :])
        return Head(head, "")

    def _standing_prompt(self, before: str, answered: str) -> str:
        """The generation prompt of a template that always writes one; "" for other templates.

        It ends the text after a turn of the assistant too, and starts with the token that starts the first message.
        """
        bos = self.versions.template.tokens.get("bos_token", "")
        first = self.special.search(self.text, len(bos) if self.text.startswith(bos) else 0, self.first)
        ending = before[len(before) - common_end(before, answered) :]
        start = ending.rfind(first[0]) if first else -1
        return ending[start:] if start >= 0 else ""

    def _start(self, head: Head, low: int, high: int) -> tuple[int, str] | None:
        """The start of a turn between `low` and `high`, and its header in the text; None if it cannot be located.

        The text may have only the beginning of the header, up to a tag: if a template prompts for reasoning, an earlier
        turn without reasoning starts with less than the prompt.
        """
        base, without_header = len(head.text) - len(head.header), list[tuple[int, int]]()
        for piece in reversed(list(self.pieces.finditer(head.text, max(0, base - TAIL)))):
            end = piece.end()
            if end <= base:
                without_header.append(self._find_end(head.text[:end], low, high, len(piece[0])))
            elif head.text[end : end + 1] in ("", "<", "["):
                length, start = self._find_end(head.text[:end], low, high, end - base)
                if length:
                    return start, head.text[base:end]
            if len(without_header) > FURTHER:
                break
        length, start = max(without_header, default=(0, 0))
        return (start, "") if length else None

    def _find_end(self, text: str, low: int, high: int, least: int) -> tuple[int, int]:
        """The place between `low` and `high` where the rendered chat is as at the end of `text`.

        Returns:
            The number of characters before the place that are the same, and the place; zeros if fewer than `least` are.
        """
        if low <= len(text) <= high and self.text.startswith(text):
            return len(text), len(text)
        mark, found = text[-least:], [(0, 0)]
        start = self.text.find(mark, max(0, low - len(mark)), high)
        while start >= 0:
            end = start + len(mark)
            found.append((common_end(self.text[:end], text), end))
            start = self.text.find(mark, start + 1, high)
        return max(found)

    def _end(self, after: Version, header: str, low: int, high: int) -> int:
        """The end of a turn between the end of its last part `low` and `high`.

        Args:
            after: the version that ends with the turn.
            header: the generation prompt. With it some templates end the turn as in the middle of a chat.
            low: the end of the last part of the turn.
            high: the start of the next part in the text.
        """
        _, last, prompted = self._texts(after)
        cut = prompted.removesuffix(header) if header and prompted is not None else None
        for text in (cut if cut != prompted else None, last):
            sizes = range(1, min(high - low, len(text or ""), TAIL) + 1)
            found = [size for size in sizes if text and text.endswith(self.text[low : low + size])]
            if text and found:
                size = max(found, key=lambda size: size + common_end(self.text[:low], text[:-size]))
                return low + len(self.text[low : low + size].rstrip())
        return low
