"""An index of the records in files, without their content, and its split into training and validation."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import warnings
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ligermodels.arguments import check_number
from ligermodels.convert.input_files import open_file, shown
from ligermodels.data.files import DataFile, data_files
from ligermodels.data.fingerprint import of_file
from ligermodels.data.lines import LINE_BYTES
from ligermodels.data.orders import Indices, permutation
from ligermodels.errors import InputError, short

NO_DOCUMENT = "there is no document in the data: give files with text"

PIECE = 1 << 15
"""Bytes per piece of a text file: long texts are read in pieces, cut at line ends if possible."""


COUNTED_AGAIN = 1 << 14
"""Bytes whose lines are counted again for each name, so that a file of many documents has few known line numbers."""


@dataclass(frozen=True)
class File:
    """A file of documents."""

    data: DataFile
    size: int
    first: int
    """Index in the corpus of the first document."""
    starts: array[int]
    """Byte offsets of the documents."""
    lines: list[tuple[int, int]] = field(default_factory=lambda: [(0, 1)])
    """Byte offsets whose line number is known, ascending, each with the number."""

    @property
    def path(self) -> Path:
        """The file to read."""
        return self.data.path

    @property
    def has_lines(self) -> bool:
        """Whether the documents are lines of JSON."""
        return self.data.has_lines


class Corpus:
    """The documents in files, by index: the lines of JSON files, and pieces of text files.

    Creating it scans the files. Memory holds eight bytes per document, its offset.

    Args:
        paths: files, folders, globs and datasets of the hub, of the kinds in `data_files`.
        piece: bytes of a piece of a text file, which may have up to 2 * piece. Default: PIECE (32 KiB).
        say: called with a message before a file is converted or a dataset is downloaded. Default: no messages.

    Raises:
        InputError: a file cannot be read, is not UTF-8, or is of no known kind. A file without documents is a warning.

    Examples:
        >>> corpus = Corpus(["chats.jsonl", "book.txt"])
        >>> training, validation = corpus.split(0.1, seed=0)
        >>> len(training) + len(validation) == len(corpus)
        True
    """

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        *,
        piece: int | None = None,
        say: Callable[[str], object] = lambda message: None,
    ) -> None:
        self._files: list[File] = []
        self._piece, self._count = piece or PIECE, 0
        files = data_files(paths, say)
        _warn_of_copies(files)
        for data in files:
            with open_file(data.path, InputError) as content:
                try:
                    size = os.fstat(content.fileno()).st_size
                    positions, count = self._indexed(data, content, size)
                except OSError as error:
                    raise InputError(f"{data.path}: cannot be read: {error.strerror or error}") from None
            if not count:
                warnings.warn(f"{data.name}: holds no document", stacklevel=2)
            self._files.append(File(data, size, self._count, positions))
            self._count += count

    def _indexed(self, data: DataFile, content: BinaryIO, size: int) -> tuple[array[int], int]:
        """The positions of the documents in an open file of `size` bytes, and the number of their indices."""
        positions = array("q", self._starts_in(data, content))
        return positions, len(positions)

    def _starts_in(self, data: DataFile, content: BinaryIO, start: int = 0) -> Iterator[int]:
        """Positions of the documents in an open file, which is at `start`, the start of a document."""
        if data.has_lines:
            return line_starts(content, start)
        return piece_starts(content, data.path, self._piece, start)

    def __len__(self) -> int:
        """Number of documents."""
        return self._count

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Number and bytes of the files, and a digest of their content, independent of their paths.

        Raises InputError if a file cannot be read any more.
        """
        files = [of_file(file.path, InputError)["digest"] for file in self._files]
        digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
        return {"files": len(files), "bytes": sum(file.size for file in self._files), "digest": digest[:16]}

    def versions(self) -> list[Any]:
        """The files' content, time of the last change, and bounds of documents, for the key of a cache."""
        return [
            {
                **of_file(file.path, InputError),
                "name": "",
                "changed": os.stat(file.path).st_mtime_ns,
                "lines": file.has_lines,
                "documents": hashlib.sha256(file.starts.tobytes()).hexdigest(),
            }
            for file in self._files
        ]

    def has_file(self, path: Path) -> bool:
        """Whether the documents are of the file `path`, which may not exist, or of a conversion of it."""
        return path.exists() and any(file.data.original.samefile(path) for file in self._files)

    def _find(self, index: int) -> tuple[File, int]:
        """The file of a document, and the document's number in it. Raises InputError if there is no such document."""
        if not 0 <= index < self._count:
            raise InputError(f"index: there is no document {index:,}; indices are from 0 to {self._count - 1:,}")
        file = self._files[bisect_right(self._files, index, key=lambda file: file.first) - 1]
        return file, index - file.first

    def size(self, index: int) -> int:
        """Bytes of a document on disk, approximately: blank lines after it are included."""
        file, number = self._find(index)
        return (file.size if number + 1 == len(file.starts) else file.starts[number + 1]) - file.starts[number]

    def read(self, index: int) -> tuple[bytes, bool, bool, bool]:
        """Content (bytes) of a document, and whether it is a line of JSON, starts a text, and ends a text.

        A line longer than `lines.LINE_BYTES` is cut to LINE_BYTES + 1, and `parse_line` refuses it. Raises InputError
        if the file cannot be read any more.
        """
        file, number = self._find(index)
        with open_file(file.path, InputError) as content:
            content.seek(file.starts[number])
            if file.has_lines:
                return content.readline(LINE_BYTES + 1), True, True, True
            is_last = number + 1 == len(file.starts)
            end = file.size if is_last else file.starts[number + 1]
            return content.read(end - file.starts[number]), False, number == 0, is_last

    def sizes(self) -> Indices:
        """Bytes of each document, as `size` gives them."""
        sizes = [np.diff(np.append(np.array(file.starts, np.int64), file.size)) for file in self._files]
        return np.concatenate(sizes) if sizes else np.arange(0)

    def sources(self) -> list[Indices]:
        """Indices of the documents of each of the names that the corpus was made from."""
        count = 1 + max((file.data.source for file in self._files), default=-1)
        parts: list[list[Indices]] = [[np.arange(0)] for _ in range(count)]
        for file in self._files:
            parts[file.data.source].append(np.arange(file.first, file.first + len(file.starts)))
        return [np.concatenate(part) for part in parts]

    def files_of_lines(self) -> Sequence[Sequence[int]]:
        """Indices of the documents of each JSON file."""
        return [range(file.first, file.first + len(file.starts)) for file in self._files if file.has_lines]

    def is_line(self, index: int) -> bool:
        """Whether a document is a line of a JSON file; if not, it is a piece of a text file."""
        return self._find(index)[0].has_lines

    def name(self, index: int) -> str:
        """FILE:LINE, or "FILE: row N", of the start of a document. Reads the file up to it, to count lines, from the
        nearest document before it that has been named."""
        file, number = self._find(index)
        return self._name(file, file.starts[number])

    @staticmethod
    def _name(file: File, place: int) -> str:
        """FILE:LINE, or "FILE: row N", of the byte `place`."""
        start, line = file.lines[bisect_right(file.lines, place, key=lambda known: known[0]) - 1]
        left = place - start
        with open_file(file.path, InputError) as content:
            content.seek(start)
            while left and (chunk := content.read(min(left, 1 << 20))):
                line += chunk.count(b"\n")
                left -= len(chunk)
        if place - start > COUNTED_AGAIN:
            insort(file.lines, (place, line))
        return file.data.place(line)

    def _cut_tail(self, fraction: float) -> int | None:
        """Start a piece about a `fraction` before the end of the only file, a text: at a line, or else at a character.

        Returns the index of the piece, or None if the text cannot be cut.
        """
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
        number = bisect_left(file.starts, cut)
        if file.starts[number : number + 1] != array("q", [cut]):
            file.starts.insert(number, cut)
            self._count += 1
        return number

    def split(self, fraction: float, seed: int) -> tuple[Indices, Indices]:
        """Split the documents into training and validation.

        All pieces of a text file are in the same split. A single text file is cut in two, at the start of a line if
        possible, and its end is the validation split.

        Args:
            fraction: fraction of the lines and text files for validation, below 1, at least one; 0 for no validation.
            seed: selects the lines and files.

        Returns:
            Sorted indices for training, and for validation.

        Raises:
            InputError: there are fewer than two lines and files, or the fraction is out of range.
        """
        if not check_fraction(fraction):
            return np.arange(len(self)), np.arange(0)
        units, count = np.empty(len(self), np.int64), 0
        for file in self._files:
            number = len(file.starts)
            units[file.first : file.first + number] = count + (np.arange(number) if file.has_lines else 0)
            count += number if file.has_lines else min(number, 1)
        if count == len(self._files) == 1 and not self._files[0].has_lines and (tail := self._cut_tail(fraction)):
            return np.arange(tail), np.arange(tail, len(self))
        chosen = np.isin(units, held_out(count, fraction, seed))
        return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def _warn_of_copies(files: Iterable[DataFile]) -> None:
    """Warn of files that are given more than once, such as by themselves and by their folder."""
    for name, count in Counter(os.path.realpath(file.original) for file in files).items():
        if count > 1:
            warnings.warn(
                f"{shown(Path(name))}: is given {count} times: the same document may be in the training and in the "
                "validation split. Give it once; data_weights set the share of a file",
                stacklevel=3,
            )


def check_fraction(fraction: float) -> float:
    """Returns `fraction`. Raises InputError unless it is at least 0 and below 1, as a number of documents is not."""
    if check_number("fraction", fraction) >= 1:
        raise InputError(f"fraction: must be below 1, got {short(fraction)}; give the share of the documents")
    return fraction


def held_out(count: int, fraction: float, seed: int) -> Indices:
    """The numbers of a random fraction of `count` documents, at least one and not all, for validation.

    Args:
        count: number of documents.
        fraction: above 0.
        seed: selects the documents.

    Raises:
        InputError: there are fewer than two documents.
    """
    if not count:
        raise InputError(NO_DOCUMENT)
    if count < 2:
        raise InputError(
            f"the data has {count} document, too few to split off some for validation: give more, or "
            "--validation-fraction 0"
        )
    size = min(max(1, round(fraction * count)), count - 1)
    return permutation(count, seed, "held out")[:size]  # another text would change the split


def line_starts(content: BinaryIO, start: int = 0) -> Iterator[int]:
    """Positions of the lines that are not blank. `start` is the position of `content`, the start of a line."""
    position, is_blank = start, True
    while part := content.readline(1 << 20):  # A line may be longer than memory.
        is_blank = is_blank and part.isspace()
        position += len(part)
        if part.endswith(b"\n"):
            if not is_blank:
                yield start
            start, is_blank = position, True
    if start < position and not is_blank:
        yield start


def piece_starts(content: BinaryIO, path: Path, piece: int, start: int = 0) -> Iterator[int]:
    """Positions of the pieces of a text: after the last line end of each `piece` bytes, or else between characters, but
    not between \\r and \\n.

    Args:
        content: the file, at `start`.
        path: its path, for messages.
        piece: bytes of a piece.
        start: the first piece; the start of a piece.

    Raises:
        InputError: the file is not UTF-8.
    """
    decoder, position = codecs.getincrementaldecoder("utf-8")(), start
    following: int | None = start  # a start at `position`: a piece, unless the text ends there
    while chunk := content.read(piece - position % piece):
        if following is not None:
            yield following
        is_lead, is_last = position % piece > 0, len(chunk) < piece - position % piece
        pending, following = len(decoder.getstate()[0]), None
        try:
            decoder.decode(chunk, final=is_last)
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not UTF-8 text at byte {position - pending + error.start}") from None
        position += len(chunk)
        if is_lead or is_last:
            continue
        line_end = chunk.rfind(b"\n") + 1
        before = max(len(decoder.getstate()[0]), chunk.endswith(b"\r"))
        cut = position - (len(chunk) - line_end if line_end else before)
        if cut < position:
            yield cut
        else:
            following = cut
    if decoder.getstate()[0]:
        raise InputError(f"{path}: not UTF-8 text at byte {position - len(decoder.getstate()[0])}")
