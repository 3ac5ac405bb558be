"""Files that are read from start to end, without an index: training starts at once, and memory does not grow with them.

A document's index is its position, in bytes, in all files together, so any document can be read again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import BinaryIO

import numpy as np

from ligermodels.convert.input_files import open_file
from ligermodels.data.corpus import Corpus, check_fraction, held_out, piece_starts
from ligermodels.data.files import DataFile
from ligermodels.data.lines import LINE_BYTES
from ligermodels.data.orders import Indices, Place, permutation
from ligermodels.errors import InputError

FIRST = 10_000
"""The validation split is taken from this many documents, the first ones."""
OF_FILE = 64
"""First lines of a file that tell whether it has chats."""


class StreamedCorpus(Corpus):
    """The documents in files, with the arguments of `Corpus`, without an index. Creating it reads only files that have
    to be converted."""

    def _indexed(self, data: DataFile, content: BinaryIO, size: int) -> tuple[array[int], int]:
        return array("q"), size

    def __len__(self) -> int:
        raise InputError("the documents of streamed data are not counted")

    def starts(self, file: int, offset: int = 0) -> Iterator[int]:
        """Indices of the documents of a file, from the document that starts at byte `offset`."""
        one = self._files[file]
        with open_file(one.path, InputError) as content:
            content.seek(offset)
            yield from (one.first + start for start in self._starts_in(one.data, content, offset))

    @property
    def num_files(self) -> int:
        """Number of files."""
        return len(self._files)

    def base(self, file: int) -> int:
        """Index of the first byte of a file."""
        return self._files[file].first

    def size(self, index: int) -> int:
        """Bytes of a document."""
        return len(self.read(index)[0])

    def read(self, index: int) -> tuple[bytes, bool, bool, bool]:
        """As in `Corpus`."""
        file, offset = self._find(index)
        with open_file(file.path, InputError) as content:
            content.seek(offset)
            if file.has_lines:
                return content.readline(LINE_BYTES + 1), True, True, True
            _, *after = islice(piece_starts(content, file.path, self._piece, offset), 2)
            end = after[0] if after else file.size
            content.seek(offset)
            return content.read(end - offset), False, offset == 0, not after

    def files_of_lines(self) -> list[Sequence[int]]:
        """Indices of the first documents of each JSON file."""
        files = [number for number, file in enumerate(self._files) if file.has_lines]
        return [list(islice(self.starts(number), OF_FILE)) for number in files]

    def name(self, index: int) -> str:
        """FILE:LINE of the start of a document: see `Corpus.name`."""
        file, offset = self._find(index)
        return self._name(file, offset)

    def split(self, fraction: float, seed: int) -> tuple[Indices, Indices]:
        """Raises InputError: the documents are not counted. See `validation`."""
        raise InputError("streamed data is not counted, and so not split by a fraction of all documents")

    def validation(self, fraction: float, seed: int) -> Indices:
        """The validation split: a fraction of the FIRST documents, at least one; lines, and pieces of texts.

        Args:
            fraction: fraction for validation, below 1; 0 for none.
            seed: selects the documents.

        Returns:
            Sorted indices. `Windowed` leaves them out of training.

        Raises:
            InputError: there are fewer than two documents, or the fraction is out of range.
        """
        if not check_fraction(fraction):
            return np.arange(0)
        first = np.fromiter(islice(chain.from_iterable(map(self.starts, range(self.num_files))), FIRST), np.int64)
        return np.sort(first[held_out(len(first), fraction, seed)])


class Windowed:
    """The documents of streamed files in their order, shuffled within windows of the next documents.

    The files come in a random order too. Memory holds the positions of one window.

    Args:
        corpus: the files.
        left_out: sorted indices of documents that do not belong to the order.
        window: documents that are shuffled together.
    """

    num_documents: int | None = None

    def __init__(self, corpus: StreamedCorpus, left_out: Indices, window: int) -> None:
        self._corpus, self._left_out, self._window = corpus, left_out, window

    @property
    def key(self) -> dict[str, int]:
        return {"left_out": len(self._left_out), "window": self._window}

    def documents(self, seed: int | None, epoch: int, place: Place) -> Iterator[tuple[int, Place]]:
        """See `DocumentOrder`. With a `seed` the files of an `epoch` are shuffled too. A `place` is a list: the number
        of the window; the file, in the epoch's order, and the byte at the window's start; and the number of documents
        read from the window."""
        number, file, offset, done = place or (0, 0, 0, 0)
        count = self._corpus.num_files
        files = range(count) if seed is None else permutation(count, seed, f"files {epoch}").tolist()
        documents = self._starts(files, file, offset)
        following = next(documents, None)
        while following is not None:
            start, window = following[1:], list[int]()
            while following is not None and len(window) < self._window:
                window.append(following[0])
                following = next(documents, None)
            if seed is not None:
                window = [window[i] for i in permutation(len(window), seed, f"window {epoch} {number}")]
            for i in range(done, len(window)):
                yield window[i], [number, *start, i + 1]
            number, done = number + 1, 0

    def _starts(self, files: Sequence[int], first: int, offset: int) -> Iterator[tuple[int, int, int]]:
        """Index of each document, with the number of its file in `files` and its byte in the file."""
        for number in range(first, len(files)):
            base = self._corpus.base(files[number])
            for index in self._corpus.starts(files[number], offset if number == first else 0):
                found = np.searchsorted(self._left_out, index)
                if found == len(self._left_out) or self._left_out[found] != index:
                    yield index, number, index - base
