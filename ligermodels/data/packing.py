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
    """Batches of `batch_size` sequences of `seq_len` tokens: documents end to end, without padding.

    A batch holds its sequences in one row: input_ids and labels (1, n), int64, and cu_seqlens, int32, the bounds of the
    pieces. A piece lies in one document and one sequence; the rest of a document that exceeds its sequence is the first
    piece of the next one. After the last document the next epoch starts, in another order.
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
        """
        Args:
            indices: which of the documents; by default all.
            seed: shuffles them, in each epoch differently; None keeps their order.
            epochs: None repeats without end. The last batch of the last epoch may be smaller.

        Raises InputError without documents, for a size below 1, and while iterating, at the end of an epoch, if no
        document has a token to train on.
        """
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
        """The position, for JSON."""
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
        """Continue from a `state_dict`. Raises InputError when it is of other data or another seed."""
        here = self.state_dict()
        for key in ("corpus", "documents", "seed"):
            if state[key] != here[key]:
                raise InputError(f"the data is not what the run started with: {key} was {state[key]}, is {here[key]}")
        self._documents.bad |= set(state["unusable"])
        self._start(state["epoch"], state["place"], state["used"])


class RankBatches:
    """The share of one of `size` ranks in the batches of `source`: of each `size` of them in turn the one at `rank`.

    All ranks read the same source, so together they have its batches, and are in the same state. At its end those for
    whom none is left get one without targets: all take as many steps.
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
        """That of the source, a `PackedBatches`."""
        found: dict[str, Any] = self._source.state_dict()
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """That of the source."""
        self._source.load_state_dict(state)


class Prefetcher:
    """The batches of `source`, made up to `count` ahead in another thread, each with the state after it."""

    def __init__(self, source: PackedBatches | RankBatches, count: int = 2) -> None:
        self._source, self._count, self._state = source, count, source.state_dict()
        self._thread = ThreadPoolExecutor(1, "batches")
        self._pending: deque[Future[tuple[Batch, dict[str, Any]]]] = deque()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        while len(self._pending) <= self._count:
            self._pending.append(self._thread.submit(lambda: (next(self._source), self._source.state_dict())))
        batch, self._state = self._pending[0].result()  # an error stays the first: raised again by the next call
        self._pending.popleft()
        return batch

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def state_dict(self) -> dict[str, Any]:
        """State of the source after the last batch taken from here."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state into the source. Raises InputError once a batch has been taken."""
        if self._pending:
            raise InputError("batches have been taken already: set the state before the first")
        self._source.load_state_dict(state)
        self._state = self._source.state_dict()
