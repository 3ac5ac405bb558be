"""Which parts of a rendered chat the model wrote.

A template may render a turn of the assistant in several pieces, put tool results between them, drop the reasoning of
earlier turns, or write other text around the last turn. So nothing is searched for in the text. Instead the chat is
rendered again:

- with other values in one part of one message: the part is where the two texts differ;
- up to a message, with and without a generation prompt: this splits the template's text between two parts.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

from ligermodels.data.parts import PROBE, is_filled, is_trained, parts_of, probed
from ligermodels.data.versions import Version, Versions, without_marks
from ligermodels.errors import InputError

TAIL = 1000
"""Most characters of the template's text at the end of a turn."""

FURTHER = 8
"""Pieces before a generation prompt that the text may lack."""


class Leaf(NamedTuple):
    """The span [start, end) of the text, in characters, that shows a part of a message."""

    start: int
    end: int
    message: int
    part: str


class Span(NamedTuple):
    """A span [start, end) of the text, in characters, that the model wrote in a turn."""

    start: int
    end: int
    message: int


class Head(NamedTuple):
    """The rendered chat before a turn; `header`, its end, is the beginning of the turn."""

    text: str
    header: str


@dataclass(frozen=True)
class Turns:
    """Finds the spans of a rendered chat that the model wrote.

    Args:
        versions: the chat and its other versions.
        special: pattern of the special tokens.
    """

    versions: Versions
    special: re.Pattern[str]

    @cached_property
    def text(self) -> str:
        """The rendered chat. Raises InputError if the template refuses it."""
        return self.versions.text(Version())

    @cached_property
    def _pieces(self) -> re.Pattern[str]:
        """Pieces of the template's text that are never divided."""
        return re.compile(rf"(?:{self.special.pattern})|<[^<>]*>|\w+|\s|.", re.DOTALL)

    # -- parts of messages ---------------------------------------------------------------------------------------------

    def check_written(self) -> None:
        """Raise InputError if the template omits tool calls; warn once if it omits another part.

        Many templates omit the reasoning of earlier turns: that is no reason to warn.
        """
        messages, template = self.versions.messages, self.versions.template
        last = max((i for i, message in enumerate(messages) if message.get("role") == "assistant"), default=-1)
        for i, message in enumerate(messages):
            for part in parts_of(message):
                other, (_, count) = self.versions.try_text(Version(probed=(i, part))), probed(message, part)
                if part == "calls" and other is not None and other.count(PROBE) < count:
                    raise InputError(f"{template.name}: does not write the tool calls in message {i}")
                what, is_earlier = (message.get("role"), part), part == "reasoning" and i < last
                if other == self.text and not is_earlier and is_filled(message, part) and what not in template.omitted:
                    template.omitted.add(what)
                    warnings.warn(
                        f"{template.name}: does not write the {part} of the {what[0]} (message {i}): the model is "
                        "trained without it",
                        stacklevel=2,
                    )

    def _leaf(self, i: int, part: str) -> Leaf | None:
        """The place of a part of message i; None if the template does not write the part, or writes it twice."""
        other = self.versions.try_text(Version(probed=(i, part)))
        if other is None or other == self.text or other.count(PROBE) > probed(self.versions.messages[i], part)[1]:
            return None
        start = common_start(self.text, other)
        return Leaf(start, len(self.text) - common_end(self.text[start:], other[start:]), i, part)

    def _is_own(self, leaf: Leaf) -> bool:
        """Whether the model wrote the part."""
        return self.versions.messages[leaf.message].get("role") == "assistant" and leaf.part != "responses"

    @cached_property
    def _leaves(self) -> list[Leaf]:
        """The parts of all messages in the order of the text.

        Raises InputError if a turn of the assistant is not in the text, or overlaps another one.
        """
        messages = self.versions.messages
        found = (self._leaf(i, part) for i, message in enumerate(messages) for part in parts_of(message))
        leaves = sorted(leaf for leaf in found if leaf is not None)
        own = [leaf for leaf in leaves if self._is_own(leaf)]
        lost = {i for i, message in enumerate(messages) if message.get("role") == "assistant"}
        lost -= {leaf.message for leaf in own}
        lost |= {later.message for leaf, later in pairwise(own) if later.start < leaf.end}
        if lost:
            raise self._lost(min(lost))
        # If a part changes the text around other messages, its place is unknown; it only narrows the search anyway.
        return [a for a in leaves if self._is_own(a) or not any(a.start < b.end and b.start < a.end for b in own)]

    def _lost(self, i: int) -> InputError:
        name = self.versions.template.name
        return InputError(f"{name}: message {i}, of the assistant, cannot be located in the rendered chat")

    # -- spans to train on ---------------------------------------------------------------------------------------------

    def trained_spans(self) -> list[tuple[int, int]]:
        """The spans (start, end) of the turns to train on. Raises InputError if a turn cannot be located."""
        return [(span.start, span.end) for span in self.spans() if is_trained(self.versions.messages[span.message])]

    def marked_spans(self) -> list[tuple[int, int]]:
        """The spans (start, end) that the template marks, without turns that are not to be trained on."""
        _, marked = without_marks(self.versions.marked_text(Version()))
        if all(map(is_trained, self.versions.messages)):
            return marked
        left_out = [span for span in self.spans() if not is_trained(self.versions.messages[span.message])]
        return [a for a in marked if not any(a[0] < b.end and b.start < a[1] for b in left_out)]

    # -- what the model wrote ------------------------------------------------------------------------------------------

    def spans(self) -> list[Span]:
        """The spans that the model wrote, with the tokens that end its turns, in the order of the text.

        Raises InputError if the template refuses the chat, or a turn of the assistant cannot be located.
        """
        runs = [list(run) for _, run in groupby(self._leaves, key=lambda leaf: (self._is_own(leaf), leaf.message))]
        spans, low, header = list[Span](), 0, ""
        for k, run in enumerate(runs):
            if self._is_own(run[0]):
                high = runs[k + 1][0].start if k + 1 < len(runs) else len(self.text)
                before, after = self._around(run, runs[:k], runs[k + 1 :])
                head = self._head(before)
                start, written = self._start(head, low, run[0])
                header = written or header
                end = self._end(after, head.header, run[-1].end, high)
                spans += self._without_headers(run, start, end, header)
                low = end
            low = max(low, run[-1].end)
        return spans

    def _around(self, run: list[Leaf], earlier: list[list[Leaf]], later: list[list[Leaf]]) -> tuple[Version, Version]:
        """The versions of the chat that end before, and after, a run of parts of one message.

        Tool results may come between two parts of the message that calls the tools.
        """
        i = run[0].message
        results = [
            leaf.message + 1 for leaves in earlier for leaf in leaves if leaf.message >= i and self._is_result(leaf)
        ]
        rest = frozenset(leaf.part for leaves in later for leaf in leaves if leaf.message == i)
        before = Version(max(results), dropped=(i, rest | {leaf.part for leaf in run})) if results else Version(i)
        return before, Version(max([i + 1, *results]), dropped=(i, rest) if rest else None)

    def _is_result(self, leaf: Leaf) -> bool:
        role = self.versions.messages[leaf.message].get("role")
        return leaf.part == "responses" or role not in ("system", "developer", "user", "assistant")

    def _head(self, before: Version) -> Head:
        """The text before a turn that follows the version `before`; empty if the template refuses to render it."""
        text, prompted = self.versions.try_text(before), self.versions.try_text(before._replace(prompt=True))
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
        for piece in self._pieces.finditer(head, max(0, start - TAIL)):
            if piece.end() > start:
                return Head(head, head[piece.start() :])
        return Head(head, "")

    def _standing_prompt(self, before: str, answered: str) -> str:
        """The generation prompt of a template that always writes one; "" for other templates.

        It ends the text after a turn of the assistant too, and starts with the token that starts the first message.
        """
        bos = self.versions.template.tokens.get("bos_token", "")
        first = self.special.search(self.text, len(bos) if self.text.startswith(bos) else 0, self._leaves[0].start)
        ending = before[len(before) - common_end(before, answered) :]
        start = ending.rfind(first[0]) if first else -1
        return ending[start:] if start >= 0 else ""

    def _start(self, head: Head, low: int, first: Leaf) -> tuple[int, str]:
        """The start of a turn between `low` and its first part, and its header in the text.

        The text may have only the beginning of the header, up to a tag: if a template prompts for reasoning, an earlier
        turn without reasoning starts with less than the prompt. Raises InputError if the start of tool calls cannot be
        located.
        """
        base, further = len(head.text) - len(head.header), 0
        for piece in reversed(list(self._pieces.finditer(head.text, max(0, base - TAIL)))):
            end = piece.end()
            if end > base and head.text[end : end + 1] not in ("", "<", "["):
                continue
            start = self._find_end(head.text[:end], low, first.start, max(end - base, len(piece[0])))
            if start is not None:
                return start, head.text[base:end]
            further += end <= base
            if further > FURTHER:
                break
        if first.part == "calls":
            raise self._lost(first.message)
        return first.start, ""

    def _find_end(self, text: str, low: int, high: int, least: int) -> int | None:
        """The position between `low` and `high` that `text` ends at, by its last characters, `least` or more."""
        if low <= len(text) <= high and self.text.startswith(text):
            return len(text)
        mark, found = text[-least:], list[tuple[int, int]]()
        start = self.text.find(mark, max(0, low - len(mark)), high)
        while start >= 0:
            end = start + len(mark)
            found.append((common_end(self.text[:end], text), end))
            start = self.text.find(mark, start + 1, high)
        return max(found)[1] if found else None

    def _end(self, after: Version, header: str, low: int, high: int) -> int:
        """The end of a turn between the end of its last part `low` and `high`.

        Args:
            after: the version that ends with the turn.
            header: the generation prompt. With it some templates end the turn as in the middle of a chat.
            low: the end of the last part of the turn.
            high: the start of the next part in the text.
        """
        prompted = self.versions.try_text(after._replace(prompt=True)) if header else None
        cut = prompted.removesuffix(header) if prompted is not None else None
        for text in (cut if cut != prompted else None, self.versions.try_text(after)):
            found = (
                [
                    (size + common_end(self.text[:low], text[:-size]), low + size)
                    for size in range(1, min(high - low, len(text), TAIL) + 1)
                    if text.endswith(self.text[low : low + size])
                ]
                if text is not None
                else []
            )
            if found:
                return low + len(self.text[low : max(found)[1]].rstrip())
        return low

    def _without_headers(self, run: list[Leaf], start: int, end: int, header: str) -> list[Span]:
        """The span of a run of parts, divided where the template ends the turn and starts another one with `header`.

        The other turn is left out if it is empty.
        """
        last = [piece[0] for piece in self._pieces.finditer(self.text, run[-1].end, end)][-1:]
        spans = list[Span]()
        for leaf, following in zip(run, [*run[1:], None], strict=True):
            stop = following.start if following else end
            again = self.text.find(last[0] + header, leaf.end, stop) if last and header.strip() else -1
            if again >= 0:
                spans.append(Span(start, again + len(last[0]), leaf.message))
                start = again + len(last[0]) + len(header) if following else end
        return [*spans, Span(start, end, run[0].message)] if start < end or not spans else spans


def common_start(a: str, b: str) -> int:
    """Number of characters that two texts have in common at their starts."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def common_end(a: str, b: str) -> int:
    """Number of characters that two texts have in common at their ends."""
    return common_start(a[::-1], b[::-1])
