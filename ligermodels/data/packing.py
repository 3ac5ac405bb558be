"""Documents packed into sequences without padding, as resumable, prefetched batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import torch

from ligermodels.data.batches import Batch
from ligermodels.data.corpus import Indices, permutation
from ligermodels.data.documents import AT_ONCE, Documents, TokenDocuments, Tokens
from ligermodels.errors import InputError
from ligermodels.layers import IGNORE_INDEX


class PackedBatches:
    """Iterator of batches of packed documents, without padding. Its state can be saved and loaded.

    A batch has its sequences in one row: `input_ids` and `labels`, int64 (1, n) with n <= batch_size * seq_len, and
    `cu_seqlens`, int32 (pieces + 1,), the bounds of the pieces, between which attention is blocked. A piece is part of
    one document and of one sequence: if a document does not fit into its sequence, the next sequence starts with its
    remainder.

    Args:
        documents: the documents.
        indices: the documents to use, int64; None for all.
        seq_len: tokens per sequence, at least 1.
        batch_size: sequences per batch, at least 1.
        seed: shuffles the documents, differently in each epoch; None keeps their order.
        epochs: passes through the documents; None repeats them without end. The last batch may be smaller.

    Raises:
        InputError: there are no documents, or a size is below 1. During iteration, after an epoch in which no document
            had a token to train on.

    Examples:
        >>> documents = TokenDocuments([[5, 6, 7], [8, 9, 5], [6]])
        >>> batches = PackedBatches(documents, seq_len=4, batch_size=1, epochs=1)
        >>> batch = next(batches)
        >>> batch["input_ids"], batch["cu_seqlens"]
        (tensor([[5, 6, 7, 8]]), tensor([0, 3, 4], dtype=torch.int32))
    """

    def __init__(
        self,
        documents: Documents | TokenDocuments,
        indices: Indices | None = None,
        *,
        seq_len: int,
        batch_size: int,
        seed: int | None = None,
        epochs: int | None = None,
    ) -> None:
        if min(seq_len, batch_size) < 1:
            raise InputError(f"must be at least 1: {seq_len=}, {batch_size=}")
        self._documents, self._seed, self._epochs = documents, seed, epochs
        self._indices = np.arange(len(documents)) if indices is None else indices
        if not len(self._indices):
            raise InputError("there is no document in the data: give files with text")
        self._seq_len, self._batch_size = seq_len, batch_size
        self._start(0, 0, 0)

    def _start(self, epoch: int, place: int, used: int) -> None:
        self._epoch, self._place, self._used = epoch, place, used
        self._order = self._indices
        if self._seed is not None:
            self._order = self._indices[permutation(len(self._indices), self._seed, epoch)]
        self._ready: list[Tokens | None] = []
        self._tokens_in_epoch = place or used

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        ids: list[int] = []
        labels: list[int] = []
        bounds, sources = [0], []
        while len(ids) < self._batch_size * self._seq_len and (document := self._document()) is not None:
            room = self._seq_len - len(ids) % self._seq_len
            piece = slice(self._used, self._used + room)
            ids += document.ids[piece]
            labels += document.labels[piece]
            bounds.append(len(ids))
            sources.append(int(self._order[self._place]))
            self._used += room
            self._tokens_in_epoch += room
            if self._used >= len(document.ids):
                self._next()
        if not ids:
            raise StopIteration
        return Batch(
            {
                "input_ids": torch.tensor([ids]),
                "labels": torch.tensor([labels]),
                "cu_seqlens": torch.tensor(bounds, dtype=torch.int32),
            },
            where=lambda: ", ".join(map(self._documents.name, dict.fromkeys(sources))),
        )

    def _document(self) -> Tokens | None:
        """The current document; None after the last epoch."""
        while self._epoch != self._epochs:
            if self._place == len(self._order):
                if not self._tokens_in_epoch:
                    raise InputError(
                        f"there is nothing to learn in any of the {len(self._order):,} documents: give files with "
                        "texts, or with chats in which the assistant speaks"
                    )
                self._start(self._epoch + 1, 0, 0)
                continue
            if not self._ready:
                some = self._order[self._place : self._place + AT_ONCE]
                self._ready = self._documents.read(some[: self._documents.at_once(some)])[::-1]
            document = self._ready[-1]
            if document is not None and document.ids:
                return document
            self._next()
        return None

    def _next(self) -> None:
        self._ready.pop()
        self._place, self._used = self._place + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The position in the documents, for JSON."""
        return {
            "corpus": self._documents.fingerprint,
            "documents": len(self._indices),
            "seed": self._seed,
            "epoch": self._epoch,
            "place": self._place,
            "used": self._used,
            "unusable": sorted(self._documents.bad),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. Raises InputError if its data or seed differ."""
        own = self.state_dict()
        for key in ("corpus", "documents", "seed"):
            if state[key] != own[key]:
                raise InputError(f"data: differs from the start of the run: {key} was {state[key]}, is {own[key]}")
        self._documents.bad |= set(state["unusable"])
        self._start(state["epoch"], state["place"], state["used"])


class RankBatches:
    """The batches of one data-parallel rank: batch number rank, rank + size, rank + 2 * size ... of `source`.

    All ranks read the same source and so have the same state. If the last group has fewer than `size` batches, the
    other ranks get a batch without targets, so all ranks take the same number of steps.

    Args:
        source: the batches of all ranks.
        rank: this rank, from 0.
        size: number of ranks.
    """

    def __init__(self, source: Iterator[Batch], rank: int, size: int) -> None:
        self._source: Any = source
        self._rank, self._size = rank, size

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        group = list(islice(self._source, self._size))
        if not group:
            raise StopIteration
        if self._rank < len(group):
            return group[self._rank]
        return Batch({**group[0], "labels": torch.full_like(group[0]["labels"], IGNORE_INDEX)}, where=group[0].where)

    def state_dict(self) -> dict[str, Any]:
        """State of the source, a `PackedBatches`."""
        state: dict[str, Any] = self._source.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the source."""
        self._source.load_state_dict(state)


class Prefetcher:
    """The batches of `source`, prepared in another thread, with the state after each batch.

    Args:
        source: the batches.
        count: batches to prepare ahead.
    """

    def __init__(self, source: PackedBatches | RankBatches, count: int = 2) -> None:
        self._source, self._count, self._state = source, count, source.state_dict()
        self._thread = ThreadPoolExecutor(1, "batches")
        self._pending: deque[Future[tuple[Batch, dict[str, Any]]]] = deque()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        while len(self._pending) <= self._count:
            self._pending.append(self._thread.submit(lambda: (next(self._source), self._source.state_dict())))
        batch, self._state = self._pending[0].result()  # an error stays in the queue: the next call raises it again
        self._pending.popleft()
        return batch

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def state_dict(self) -> dict[str, Any]:
        """State of the source after the last returned batch."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state into the source. Raises InputError after the first batch."""
        if self._pending:
            raise InputError("batches have been taken already: set the state before the first")
        self._source.load_state_dict(state)
        self._state = self._source.state_dict()
