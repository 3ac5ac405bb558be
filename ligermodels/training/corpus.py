"""Text and chats in files: found once, by their places on disk, then read and made tokens as they are needed."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import warnings
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ligermodels.chat import ChatTemplate, Message, encode_chat
from ligermodels.errors import CheckpointError, InputError
from ligermodels.layers import IGNORE_INDEX
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.fingerprint import of_file
from ligermodels.training.records import Chat, NothingToLearn, has_json_lines, parse_line

PIECE = 1 << 15
"""Bytes of a text file that are taken at once: a long text comes in pieces, cut at the ends of lines if it has any."""
AT_ONCE = 64
"""Documents that are made tokens in one go."""

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class _File:
    path: Path
    size: int
    has_lines: bool
    first: int
    """Index, in the corpus, of its first document."""
    starts: array[int]
    """Where its documents start, in bytes."""


class Corpus:
    """Where the documents in some files are: of JSON lines each that is not blank, of any other file the whole.

    Eight bytes a document are all that is held in memory. A text file comes in pieces of at most 2 * PIECE bytes, each
    of which has an index here, as a line has.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        """Look through the files. Raises InputError for one that cannot be read, is a text but not in UTF-8, and as
        `has_json_lines`."""
        self._files: list[_File] = []
        count = 0
        for path in map(Path, paths):
            try:
                has_lines = has_json_lines(path)
                size = path.stat().st_size
                starts = _line_starts(path) if has_lines else _piece_starts(path)
            except OSError as error:
                raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
            self._files.append(_File(path, size, has_lines, count, starts))
            count += len(starts)
        self._count = count

    def __len__(self) -> int:
        """How many lines and pieces there are."""
        return self._count

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Number and bytes of the files, and a digest of what they hold, wherever that is: the same when a run goes
        on. Raises InputError when a file cannot be read any more."""
        try:
            files = [of_file(file.path)["digest"] for file in self._files]
        except OSError as error:
            raise InputError(f"{error.filename}: cannot be read: {error.strerror or error}") from None
        digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
        return {"files": len(files), "bytes": sum(file.size for file in self._files), "digest": digest[:16]}

    def _find(self, index: int) -> tuple[_File, int]:
        file = self._files[bisect_right(self._files, index, key=lambda file: file.first) - 1]
        return file, index - file.first

    def read(self, index: int) -> tuple[bytes, bool, bool, bool]:
        """What is there: its bytes; whether it is a line; and whether it starts, and whether it ends a document."""
        file, place = self._find(index)
        with file.path.open("rb") as content:
            content.seek(file.starts[place])
            if file.has_lines:
                return content.readline(), True, True, True
            is_last = place + 1 == len(file.starts)
            end = file.size if is_last else file.starts[place + 1]
            return content.read(end - file.starts[place]), False, place == 0, is_last

    def name(self, index: int) -> str:
        """File and line of a document; of a piece, the line it starts in. The lines are counted: it takes a while."""
        file, place = self._find(index)
        lines, left = 1, file.starts[place]
        with file.path.open("rb") as content:
            while left and (chunk := content.read(min(left, 1 << 20))):
                lines += chunk.count(b"\n")
                left -= len(chunk)
        return f"{file.path}:{lines}"

    def split(self, fraction: float, seed: int) -> tuple[Indices, Indices]:
        """Indices of all documents but some, and of those some: a `fraction` of the lines and files, at least one.

        The pieces of a text are all on one side. With a fraction of 0 none are left out. Raises InputError for fewer
        than two lines and files in all.
        """
        if not fraction:
            return np.arange(len(self)), np.arange(0)
        units, count = np.empty(len(self), np.int64), 0
        for file in self._files:
            number = len(file.starts)
            units[file.first : file.first + number] = count + (np.arange(number) if file.has_lines else 0)
            count += number if file.has_lines else min(number, 1)
        if count < 2:
            raise InputError(
                f"the data has {count} document(s), of which none can be held out: give more, or --held-out 0"
            )
        size = min(max(1, round(fraction * count)), count - 1)
        held = np.isin(units, permutation(count, seed, "held out")[:size])
        return np.flatnonzero(~held), np.flatnonzero(held)


def permutation(count: int, seed: int, purpose: str | int) -> Indices:
    """The numbers below `count` in an order that `seed` and `purpose` decide, the same with every version of numpy."""
    digits = np.frombuffer(f"{seed} {purpose}".encode(), np.uint8)
    return np.random.RandomState(digits.astype(np.uint32)).permutation(count)


def _line_starts(path: Path) -> array[int]:
    starts, position = array("q"), 0
    with path.open("rb") as lines:
        for line in lines:
            if line.strip():
                starts.append(position)
            position += len(line)
    return starts


def _piece_starts(path: Path) -> array[int]:
    starts, position = array("q"), 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as content:
        while chunk := content.read(PIECE):
            if not starts:
                starts.append(0)
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=len(chunk) < PIECE)
            except UnicodeDecodeError as error:
                raise InputError(f"{path}: not UTF-8 text at byte {position - pending + error.start}") from None
            position += len(chunk)
            if len(chunk) == PIECE:
                line_end = chunk.rfind(b"\n") + 1
                starts.append(position - (len(chunk) - line_end if line_end else len(decoder.getstate()[0])))
    if decoder.getstate()[0]:
        raise InputError(f"{path}: not UTF-8 text at byte {position - len(decoder.getstate()[0])}")
    while len(starts) > 1 and starts[-1] >= position:
        starts.pop()
    return starts


# -- documents as tokens -----------------------------------------------------------------------------------------------


class Tokens(NamedTuple):
    """A document: token ids, and labels, which are the ids, or -100 where nothing is to be learned."""

    ids: list[int]
    labels: list[int]


class Documents:
    """The documents of a corpus as tokens. Those that are unusable are counted, named and, up to a limit, passed over.

    A line is an object with a `text`; or with a chat, under `messages` or `conversations`, a list of turns with `role`
    and `content` or, as in ShareGPT, `from` and `value`: see `parse_line`. Of a chat only what the assistant says is a
    label; the checkpoint's chat template writes it out, with the record's `tools`. Texts get the special tokens that
    the tokenizer adds, and an EOS, each once.

    `bad` are the indices of unusable documents, and `empty` of those with not one label: empty texts, and chats in
    which the assistant says nothing. These are no errors, and no limit counts them.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        template: Callable[[], ChatTemplate] | None = None,
        *,
        eos_token_id: int | None = None,
        max_bad_lines: int = 0,
        on_bad_line: Callable[[str], object] = warnings.warn,
    ) -> None:
        """
        Args:
            template: makes the chat template; called when the first chat is met.
            eos_token_id: put at the end of texts, but of those that end in it.
            max_bad_lines: how many unusable lines may be passed over; one met again counts once.
            on_bad_line: called with a message, which names file and line, for each, and for the first of the `empty`.
        """
        self.corpus, self.tokenizer, self.bad, self.empty = corpus, tokenizer, set[int](), set[int]()
        self._make_template, self._end = template, [] if eos_token_id is None else [eos_token_id]
        self._max_bad_lines, self._on_bad_line = max_bad_lines, on_bad_line

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template. Raises CheckpointError without one."""
        if self._make_template is None:
            raise CheckpointError("there are chats in the data, and no chat template for them")
        return self._make_template()

    def read(self, indices: Iterable[int]) -> list[Tokens | None]:
        """These documents, with None for those that are unusable or `empty`: of the others each has a label.

        Raises InputError for one unusable line more than allowed, and CheckpointError when there is a chat, but no chat
        template.
        """
        found: list[Tokens | None] = []
        texts: list[tuple[int, str, bool, bool]] = []
        for place, index in enumerate(map(int, indices)):
            content, is_line, starts, ends = self.corpus.read(index)
            found.append(None)
            with self._passing_over(index):
                record = _record(content, is_line)
                if isinstance(record, str):
                    texts.append((place, record, starts, ends))
                else:
                    found[place] = self._encode(*record)
        for whole in (True, False):  # Only the start of a text gets the special tokens of a start.
            chosen = [each for each in texts if each[2] == whole]
            encoded = self.tokenizer.encode_all([text for _, text, *_ in chosen], add_special_tokens=whole)
            for (place, _, _, ends), ids in zip(chosen, encoded, strict=True):
                if ends and ids[-1:] != self._end:
                    ids = ids + self._end
                found[place] = Tokens(ids, ids) if ids else None
        return found

    def records(self, indices: Iterable[int]) -> list[str | Chat | None]:
        """These documents before they are tokens: a text, a chat, or None for those that are unusable or `empty`.
        Raises InputError for one unusable line more than allowed."""
        found: list[str | Chat | None] = []
        for index in map(int, indices):
            content, is_line, *_ = self.corpus.read(index)
            found.append(None)
            with self._passing_over(index):
                found[-1] = _record(content, is_line)
        return found

    def count(self, indices: Sequence[int] | Indices, progress: Callable[[int, int], object] | None = None) -> int:
        """Tokens of these documents: all of them are read, and whatever is unusable or `empty` comes to light."""
        total, known = 0, len(self.empty)
        for start in range(0, len(indices), AT_ONCE):
            total += sum(len(each.ids) for each in self.read(indices[start : start + AT_ONCE]) if each)
            if progress is not None:
                progress(min(start + AT_ONCE, len(indices)), len(indices))
        if len(self.empty) > known:
            self._on_bad_line(f"{len(self.empty):,} documents in all hold nothing to learn; they are left out")
        return total

    def _encode(self, messages: list[Message], variables: dict[str, Any]) -> Tokens:
        ids, mask = encode_chat(messages, self.template, self.tokenizer, **variables)
        if not any(mask):
            raise NothingToLearn("no token is the assistant's")
        return Tokens(ids, [token if own else IGNORE_INDEX for token, own in zip(ids, mask, strict=True)])

    @contextmanager
    def _passing_over(self, index: int) -> Iterator[None]:
        """Counts document `index` when it turns out unusable, or `empty`."""
        try:
            yield
        except CheckpointError:  # No template: it is not the line that is unusable.
            raise
        except NothingToLearn as reason:
            if not self.empty:
                name = self.corpus.name(index)
                self._on_bad_line(f"{name}: nothing to learn: {reason}; left out and counted, as more such will be")
            self.empty.add(index)
        except ValueError as error:
            self.pass_over(index, str(error))

    def pass_over(self, index: int, reason: str) -> None:
        """Count a document as unusable, and say so. Raises InputError for one more than allowed."""
        if index in self.bad:
            return
        self.bad.add(index)
        name = self.corpus.name(index)
        if len(self.bad) > self._max_bad_lines:
            first = ", ".join(map(self.corpus.name, sorted(self.bad)[:10]))
            more = f"; {len(self.bad)} unusable lines, {self._max_bad_lines} allowed: {first}"
            raise InputError(f"{name}: {reason}{more if self._max_bad_lines else ''}")
        self._on_bad_line(f"{name}: {reason}; line passed over")


def _record(content: bytes, is_line: bool) -> str | Chat:
    """The text, or the chat, of a line or a piece. Raises ValueError as `parse_line`, NothingToLearn for no text."""
    record = parse_line(content) if is_line else content.decode()
    if not record:
        raise NothingToLearn("the text is empty")
    return record
