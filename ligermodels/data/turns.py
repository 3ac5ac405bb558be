"""Which parts of a rendered chat the model wrote.

A template may render a turn of the assistant in several pieces, put tool results between them, drop the reasoning of
earlier turns, or write other text around the last turn. So the text is compared with other versions of the chat: they
show where the parts of messages are (`leaves`), and how the text between two parts is divided (`frames`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from ligermodels.data.frames import Frame, Frames
from ligermodels.data.leaves import Leaf, find_leaves
from ligermodels.data.parts import is_trained, parts_of
from ligermodels.data.versions import Version, Versions, without_marks
from ligermodels.errors import InputError

KNOWN = 4096
"""Most frames that are remembered per template."""


class Span(NamedTuple):
    """A span [start, end) of the text, in characters, that the model wrote in a turn."""

    start: int
    end: int
    message: int


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

    def trained_spans(self) -> list[tuple[int, int]]:
        """The spans (start, end) to train on: what the template marks, or else what the model wrote.

        Raises InputError if the template refuses the chat or omits its tool calls, or a turn cannot be located.
        """
        leaves = find_leaves(self.versions)
        left_out = {i for i, message in enumerate(self.versions.messages) if not is_trained(message)}
        if not self.versions.template.marks_turns:
            return [(span.start, span.end) for span in self._spans(leaves) if span.message not in left_out]
        _, marked = without_marks(self.versions.marked_text(Version()))
        masked = [span for span in self._spans(leaves) if span.message in left_out] if left_out else []
        return [(start, end) for start, end in marked if not any(start < a.end and a.start < end for a in masked)]

    def _spans(self, found: list[Leaf]) -> list[Span]:
        """The spans that the model wrote, with the tokens that end its turns, in the order of the text.

        Raises InputError if a turn of the assistant cannot be located.
        """
        leaves = self._separate(found)
        runs = [list(run) for _, run in groupby(leaves, key=lambda leaf: (self._is_own(leaf), leaf.message))]
        frames = Frames(self.versions, self.special, leaves[0].start if leaves else 0)
        spans, low, header = list[Span](), 0, ""
        for k, run in enumerate(runs):
            if self._is_own(run[0]):
                frame = self._frame(frames, runs, k, low)
                if frame.before is None and run[0].part == "calls":
                    raise self._lost(run[0].message)
                header = frame.header or header
                start, end = run[0].start - (frame.before or 0), run[-1].end + frame.after
                mark = "".join(frames.pieces.findall(self.text, run[-1].end, end)[-1:])
                spans += self._without_headers(run, start, end, mark, header)
                low = spans[-1].end
            low = max(low, run[-1].end)
        return spans

    def _separate(self, found: list[Leaf]) -> list[Leaf]:
        """The parts without other messages' parts that overlap parts of the assistant's messages.

        If a part changes the text around other messages, its place is unknown, and it is not needed: it would only
        narrow the search. Raises InputError if a turn of the assistant is not in the text, or overlaps another one.
        """
        own = [leaf for leaf in found if self._is_own(leaf)]
        lost = {i for i, message in enumerate(self.versions.messages) if message.get("role") == "assistant"}
        lost -= {leaf.message for leaf in own}
        lost |= {later.message for leaf, later in pairwise(own) if later.start < leaf.end}
        if lost:
            raise self._lost(min(lost))
        return [a for a in found if self._is_own(a) or not any(a.start < b.end and b.start < a.end for b in own)]

    def _is_own(self, leaf: Leaf) -> bool:
        """Whether the model wrote the part."""
        return self.versions.messages[leaf.message].get("role") == "assistant" and leaf.part != "responses"

    def _lost(self, i: int) -> InputError:
        name, parts = self.versions.template.name, parts_of(self.versions.messages[i])
        reason = ": it has reasoning alone, which the template does not write there" if parts == ["reasoning"] else ""
        return InputError(f"{name}: message {i}, of the assistant, cannot be located in the rendered chat{reason}")

    def _frame(self, frames: Frames, runs: list[list[Leaf]], k: int, low: int) -> Frame:
        """The frame of run k of the parts, whose text starts after `low`.

        The same text of the template, between parts of the same kind, is divided in the same way: it is remembered.
        """
        run, previous = runs[k], runs[k - 1][-1] if k else None
        following = runs[k + 1][0] if k + 1 < len(runs) else None
        start, end, high = run[0].start, run[-1].end, following.start if following else len(self.text)
        before, after = self._around(runs, k)
        around = self.text[previous.end if previous else 0 : start], self.text[end:high]
        kinds = tuple(map(self._kind, (previous, run[0], run[-1], following)))
        known, key = self.versions.template.frames, (*around, kinds, before.dropped is None, self._settings)
        if key in known:
            return known[key]
        frame = frames.frame(before, after, low, start, end, high)
        if frame.before is not None:
            if len(known) >= KNOWN:
                known.clear()
            known[key] = frame
        return frame

    def _kind(self, leaf: Leaf | None) -> Any:
        return None if leaf is None else (self.versions.messages[leaf.message].get("role"), leaf.part)

    @cached_property
    def _settings(self) -> tuple[str, str]:
        """The variables that may change the template's text around turns, as JSON; the pattern of special tokens."""
        values = {key: key in ("tools", "documents") or value for key, value in self.versions.variables.items()}
        return json.dumps(values, sort_keys=True, default=str), self.special.pattern

    def _around(self, runs: list[list[Leaf]], k: int) -> tuple[Version, Version]:
        """The versions of the chat that end before, and after, run k of the parts.

        Tool results may come between two parts of the message that calls the tools.
        """
        i, now = runs[k][0].message, {leaf.part for leaf in runs[k]}
        results = [run[-1].message + 1 for run in runs[:k] if run[-1].message >= i and self._is_result(run[-1])]
        later = frozenset(leaf.part for run in runs[k + 1 :] for leaf in run if leaf.message == i)
        before = Version(max(results), dropped=(i, later | now)) if results else Version(i)
        return before, Version(max([i + 1, *results]), dropped=(i, later) if later else None)

    def _is_result(self, leaf: Leaf) -> bool:
        role = self.versions.messages[leaf.message].get("role")
        return leaf.part == "responses" or role not in ("system", "developer", "user", "assistant")

    def _without_headers(self, run: list[Leaf], start: int, end: int, mark: str, header: str) -> list[Span]:
        """The span of a run of parts, divided where the template ends the turn and starts another one.

        The other turn is left out if it is empty.
        """
        spans = list[Span]()
        for leaf, following in zip(run, [*run[1:], None], strict=True):
            again = self.text.find(mark + header, leaf.end, following.start if following else end)
            if again >= 0 and header.strip():
                spans.append(Span(start, again + len(mark), leaf.message))
                start = again + len(mark + header) if following else end
        return [*spans, Span(start, end, run[0].message)] if start < end or not spans else spans
