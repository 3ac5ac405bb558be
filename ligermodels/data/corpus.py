"""An index of the records in files, which stay on disk, and its split into training and validation."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ligermodels.convert.input_files import as_path, open_file
from ligermodels.data.fingerprint import of_file
from ligermodels.data.records import LINE_BYTES, has_json_lines
from ligermodels.errors import InputError

PIECE = 1 << 15
"""Bytes per piece of a text file: long texts are read in pieces, cut at line ends if there are any."""

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
    """The documents in files, by index: each line of a file of JSON lines, each piece of any other file.

    Memory holds eight bytes per document, its offset. A piece has at most 2 * `piece` bytes.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]], *, piece: int | None = None) -> None:
        """Scan the files. Raises InputError for one that cannot be read or is not UTF-8, and as `has_json_lines`.

        piece: PIECE by default.
        """
        self._files: list[_File] = []
        count = 0
        for path in (as_path(each, InputError, "the name of a data file") for each in paths):
            has_lines = has_json_lines(path)
            with open_file(path, InputError) as content:
                try:
                    size = os.fstat(content.fileno()).st_size
                    starts = _line_starts(content) if has_lines else _piece_starts(content, path, piece or PIECE)
                except OSError as error:
                    raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
            self._files.append(_File(path, size, has_lines, count, starts))
            count += len(starts)
        self._count = count

    def __len__(self) -> int:
        """Number of lines and pieces."""
        return self._count

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Number and bytes of the files, and a digest of their content, not of their paths. Raises InputError when a
        file cannot be read any more."""
        files = [of_file(file.path, InputError)["digest"] for file in self._files]
        digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
        return {"files": len(files), "bytes": sum(file.size for file in self._files), "digest": digest[:16]}

    def _find(self, index: int) -> tuple[_File, int]:
        file = self._files[bisect_right(self._files, index, key=lambda file: file.first) - 1]
        return file, index - file.first

    def size(self, index: int) -> int:
        """Its bytes on disk, about."""
        file, place = self._find(index)
        return (file.size if place + 1 == len(file.starts) else file.starts[place + 1]) - file.starts[place]

    def read(self, index: int) -> tuple[bytes, bool, bool, bool]:
        """Its bytes, whether it is a line of JSON, whether it starts a document, and whether it ends one. Of a line
        longer than `records.LINE_BYTES`, which `parse_line` refuses, only the start.

        Raises InputError when its file cannot be read any more."""
        file, place = self._find(index)
        with open_file(file.path, InputError) as content:
            content.seek(file.starts[place])
            if file.has_lines:
                return content.readline(LINE_BYTES + 1), True, True, True
            is_last = place + 1 == len(file.starts)
            end = file.size if is_last else file.starts[place + 1]
            return content.read(end - file.starts[place]), False, place == 0, is_last

    def is_line(self, index: int) -> bool:
        """Whether it is a line of a file of JSON lines, and no piece of a text."""
        return self._find(index)[0].has_lines

    def name(self, index: int) -> str:
        """FILE:LINE where document `index` starts. Counts lines, so it reads the file up to there."""
        file, place = self._find(index)
        lines, left = 1, file.starts[place]
        with open_file(file.path, InputError) as content:
            while left and (chunk := content.read(min(left, 1 << 20))):
                lines += chunk.count(b"\n")
                left -= len(chunk)
        return f"{file.path}:{lines}"

    def _cut_tail(self, fraction: float) -> int | None:
        """Make a piece of the only file, a text, start where about a `fraction` of it is left: at a line, or else at a
        character. The index of that piece; None for a text that cannot be cut."""
        (file,) = self._files
        target = int((1 - fraction) * file.size)
        start = max(0, target - PIECE)
        with open_file(file.path, InputError) as content:
            content.seek(start)
            before, after = content.read(target - start), content.read(PIECE)
        next_line, same_line = target + after.find(b"\n") + 1, start + before.rfind(b"\n") + 1
        if target < next_line < file.size:
            cut = next_line
        elif start < same_line:
            cut = same_line
        else:
            cut = target + next((i for i, byte in enumerate(after) if byte & 0xC0 != 0x80), 0)
        if not 0 < cut < file.size:
            return None
        place = bisect_left(file.starts, cut)
        if file.starts[place : place + 1] != array("q", [cut]):
            file.starts.insert(place, cut)
            self._count += 1
        return place

    def split(self, fraction: float, seed: int) -> tuple[Indices, Indices]:
        """Indices for training and for validation; the latter are a `fraction` of the lines and files, at least one.

        All pieces of a file are on the same side, except that of a single text file the tail, from the start of a line
        on if possible, is for validation. With a fraction of 0 validation is empty. Raises InputError for data that
        cannot be split.
        """
        if not fraction:
            return np.arange(len(self)), np.arange(0)
        units, count = np.empty(len(self), np.int64), 0
        for file in self._files:
            number = len(file.starts)
            units[file.first : file.first + number] = count + (np.arange(number) if file.has_lines else 0)
            count += number if file.has_lines else min(number, 1)
        if count == len(self._files) == 1 and not self._files[0].has_lines and (tail := self._cut_tail(fraction)):
            return np.arange(tail), np.arange(tail, len(self))
        if count < 2:
            raise InputError(
                f"the data has {count} document(s), too few to split off some for validation: give more, or "
                "--validation-fraction 0"
            )
        size = min(max(1, round(fraction * count)), count - 1)
        chosen = np.isin(units, permutation(count, seed, "held out")[:size])  # the words decide the split: keep them
        return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def permutation(count: int, seed: int, purpose: str | int) -> Indices:
    """A permutation of range(count), decided by `seed` and `purpose`, the same with every version of numpy."""
    digits = np.frombuffer(f"{seed} {purpose}".encode(), np.uint8)
    return np.random.RandomState(digits.astype(np.uint32)).permutation(count)


def _line_starts(content: BinaryIO) -> array[int]:
    starts, start, position, is_blank = array("q"), 0, 0, True
    while part := content.readline(1 << 20):  # A line may be longer than memory.
        is_blank = is_blank and part.isspace()
        position += len(part)
        if part.endswith(b"\n"):
            if not is_blank:
                starts.append(start)
            start, is_blank = position, True
    if start < position and not is_blank:
        starts.append(start)
    return starts


def _piece_starts(content: BinaryIO, path: Path, piece: int) -> array[int]:
    starts, position = array("q"), 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    while chunk := content.read(piece):
        if not starts:
            starts.append(0)
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(chunk, final=len(chunk) < piece)
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not UTF-8 text at byte {position - pending + error.start}") from None
        position += len(chunk)
        if len(chunk) == piece:
            line_end = chunk.rfind(b"\n") + 1
            starts.append(position - (len(chunk) - line_end if line_end else len(decoder.getstate()[0])))
    if decoder.getstate()[0]:
        raise InputError(f"{path}: not UTF-8 text at byte {position - len(decoder.getstate()[0])}")
    while len(starts) > 1 and starts[-1] >= position:
        starts.pop()
    return starts
