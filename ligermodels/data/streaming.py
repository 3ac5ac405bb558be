"""Files that are read from start to end, without an index: training starts at once, and memory does not grow with them.

A document's index is its position, in bytes, in all files together, so any document can be read again.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

import numpy as np

from ligermodels.convert.input_files import open_file
from ligermodels.data.corpus import PIECE, Corpus, File, line_starts, piece_starts
from ligermodels.data.files import data_files
from ligermodels.data.orders import Indices, Place, permutation
from ligermodels.data.records import LINE_BYTES
from ligermodels.errors import InputError

FIRST = 10_000
"""The validation split is taken from this many documents, the first ones."""
OF_FILE = 64
"""First lines of a file that tell whether it has chats."""


class StreamedCorpus(Corpus):
    """The documents in files, as `Corpus`, but without an index of them. Creating it reads only
    files that have to be converted.

    Args:
        paths: files as in `Corpus`.
        piece: bytes of a piece of a text file, which may have up to 2 * piece. Default: PIECE (32 KiB).
        say: called with a message before a file is converted or a dataset is downloaded. Default: no messages.

    Raises:
        InputError: a file cannot be read, or is of no known kind.
    """

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        *,
        piece: int | None = None,
        say: Callable[[str], object] = lambda message: None,
    ) -> None:
        self._files, self._piece, position = [], piece or PIECE, 0
        for data in data_files(paths, say):
            with open_file(data.path, InputError) as content:
                size = os.fstat(content.fileno()).st_size
            self._files.append(File(data, size, position, array("q")))
            position += size

    def __len__(self) -> int:
        raise InputError("the documents of streamed data are not counted")

    def starts(self, file: int, offset: int = 0) -> Iterator[int]:
        """Indices of the documents of a file, from the document that starts at byte `offset`."""
        one = self._files[file]
        with open_file(one.path, InputError) as content:
            content.seek(offset)
            if one.has_lines:
                starts = line_starts(content, offset)
            else:
                starts = piece_starts(content, one.path, self._piece, offset)
            yield from (one.first + start for start in starts)

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
        """FILE:LINE of the start of a document. Reads the file up to it, to count lines."""
        file, offset = self._find(index)
        return self._name(file, offset)

    def split(self, fraction: float, seed: int) -> tuple[Indices, Indices]:
        """Raises InputError: the documents are not counted. See `validation`."""
        raise InputError("streamed data is not counted, and so not split by a fraction of all documents")

    def validation(self, fraction: float, seed: int) -> Indices:
        """The validation split: a fraction of the FIRST documents, at least one; lines, and pieces of texts.

        Args:
            fraction: fraction for validation; 0 for none.
            seed: selects the documents.

        Returns:
            Sorted indices. `Windowed` leaves them out of training.

        Raises:
            InputError: there are fewer than two documents.
        """
        first = np.fromiter(islice(chain.from_iterable(map(self.starts, range(self.num_files))), FIRST), np.int64)
        if not fraction:
            return first[:0]
        if len(first) < 2:
            raise InputError(
                f"the data has {len(first)} document(s), too few to split off some for validation: give more, or "
                "--validation-fraction 0"
            )
        count = min(max(1, round(fraction * len(first))), len(first) - 1)
        return np.sort(first[permutation(len(first), seed, "held out")[:count]])


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
