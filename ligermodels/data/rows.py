"""Rows of packed documents: whole documents by best-fit decreasing; then texts, split to fill the rows."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ligermodels.layers import IGNORE_INDEX

ROWS_AHEAD = 16
"""Rows whose tokens wait in a pool. More rows fit only slightly better, and take more memory and more time at start."""


class Piece(NamedTuple):
    """Consecutive tokens of a document.

    document: index of the document.
    start: position of the first token in the document.
    ids: token ids, int32.
    labels: the ids, -100 for tokens that are not trained on, int32.
    splits: whether the piece may be split over rows.
    example: the `Example` that the tokens consist of, for objectives on whole completions; the `Prompt`, for objectives
        that sample completions; None for a document.
    """

    document: int
    start: int
    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    splits: bool
    example: Any = None

    @property
    def has_target(self) -> bool:
        """Whether a token is predicted from the tokens before it."""
        return bool((self.labels[1:] != IGNORE_INDEX).any())

    def cut(self, size: int) -> tuple[Piece, Piece]:
        """The first `size` tokens, and the tokens after them."""
        head = self._replace(ids=self.ids[:size], labels=self.labels[:size])
        return head, self._replace(start=self.start + size, ids=self.ids[size:], labels=self.labels[size:])


def best_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into rows: each item, the largest first, into the row with the least room that it fits into.

    Args:
        sizes: sizes of the items, from 1 to `capacity`.
        capacity: size of a row.

    Returns:
        Positions in `sizes` of the items of each row, the fullest row first.

    Examples:
        >>> best_fit_decreasing([4, 5, 3, 2], 8)
        [[1, 2], [0, 3]]
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # sorted (room, row)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        found = bisect_left(rooms, (sizes[item], 0))
        if found == len(rooms):
            rows.append([])
            room, row = capacity, len(rows) - 1
        else:
            room, row = rooms.pop(found)
        rows[row].append(item)
        insort(rooms, (room - sizes[item], row))
    return [rows[row] for _, row in rooms]


class Pool:
    """Pieces of documents that wait for a row.

    Args:
        seq_len: most tokens of a row.
    """

    def __init__(self, seq_len: int) -> None:
        self.seq_len, self.num_tokens = seq_len, 0
        self._whole: list[Piece] = []
        self._texts: deque[Piece] = deque()

    def __len__(self) -> int:
        """Number of pieces."""
        return len(self._whole) + len(self._texts)

    @property
    def is_full(self) -> bool:
        """Whether there are enough tokens to choose from for the next row."""
        return self.num_tokens >= ROWS_AHEAD * self.seq_len

    def add(self, piece: Piece) -> None:
        """Add a piece; one that may not be split has at most `seq_len` tokens."""
        self.num_tokens += len(piece.ids)
        (self._texts if piece.splits else self._whole).append(piece)

    def take_row(self) -> list[Piece]:
        """Remove the next row from the pool: the fullest row of whole pieces, filled with the oldest texts."""
        rows = best_fit_decreasing([len(piece.ids) for piece in self._whole], self.seq_len)
        chosen = dict.fromkeys(rows[0] if rows else [])  # in order, and found at once
        row = [self._whole[item] for item in chosen]
        self._whole = [piece for item, piece in enumerate(self._whole) if item not in chosen]
        room = self.seq_len - sum(len(piece.ids) for piece in row)
        while room and self._texts:
            piece, rest = self._texts.popleft().cut(room)
            if len(rest.ids):
                self._texts.appendleft(rest)
            row.append(piece)
            room -= len(piece.ids)
        self.num_tokens -= self.seq_len - room
        return row

    def positions(self) -> list[tuple[int, int]]:
        """(document, start) of each piece, in the order of `add`, so that it can be found again."""
        return [(piece.document, piece.start) for piece in (*self._whole, *self._texts)]


class Queue(Pool):
    """Pieces in their order, each in a row of its own."""

    @property
    def is_full(self) -> bool:
        return bool(self)

    def take_row(self) -> list[Piece]:
        """Remove the oldest piece."""
        return [self._whole.pop(0)]
