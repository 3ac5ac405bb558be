"""Documents as an endless row of batches, read from disk as they are needed, that can go on from any place."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol, cast

import torch

from ligermodels.errors import InputError
from ligermodels.training.corpus import AT_ONCE, Documents, Indices, Tokens, permutation
from ligermodels.training.data import Batch


class Resumable(Protocol):
    """Batches with a state, which is that after the last batch they gave."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Stream:
    """Batches of `rows` rows of `length` tokens, filled to the last token: a document that finds no room goes on in the
    next row, without its context, and where the documents end they start again, in another order.
    """

    def __init__(
        self,
        documents: Documents,
        indices: Indices,
        *,
        length: int,
        rows: int,
        seed: int | None = None,
        epochs: int | None = None,
    ) -> None:
        """
        Args:
            indices: which of the documents.
            seed: decides their order, which is another in each epoch; None leaves it as it is.
            epochs: how often to go through them; None is without end. After the last a batch may be smaller.

        Raises InputError for no documents, or a size below 1; and later, at the end of an epoch, when there was nothing
        to learn in any of them: not one label.
        """
        if min(length, rows) < 1:
            raise InputError(f"must be at least 1: {length=}, {rows=}")
        if not len(indices):
            raise InputError("there is no document in the data: give files with text")
        self._documents, self._indices, self._seed, self._epochs = documents, indices, seed, epochs
        self._length, self._rows = length, rows
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
        while len(ids) < self._rows * self._length and (document := self._document()) is not None:
            room = self._length - len(ids) % self._length
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
            where=lambda: ", ".join(map(self._documents.corpus.name, dict.fromkeys(sources))),
        )

    def _document(self) -> Tokens | None:
        """The document that is to be taken from; None at the end of the last epoch."""
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
                self._ready = self._documents.read(self._order[self._place : self._place + AT_ONCE])[::-1]
            document = self._ready[-1]
            if document is not None and document.ids:
                return document
            self._next()
        return None

    def _next(self) -> None:
        self._ready.pop()
        self._place, self._used = self._place + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Where it stands: plain numbers, for JSON."""
        return {
            "corpus": self._documents.corpus.fingerprint,
            "documents": len(self._indices),
            "seed": self._seed,
            "epoch": self._epoch,
            "place": self._place,
            "used": self._used,
            "unusable": sorted(self._documents.bad),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`. Raises InputError when that is of other data, or of another order."""
        here = self.state_dict()
        for key in ("corpus", "documents", "seed"):
            if state[key] != here[key]:
                raise InputError(f"the data is not what the run began with: {key} was {state[key]}, is {here[key]}")
        self._documents.bad |= set(state["unusable"])
        self._start(state["epoch"], state["place"], state["used"])


class Ahead:
    """The batches of `source`, made in another thread up to `count` ahead, with the state that belongs to each."""

    def __init__(self, source: Resumable, count: int = 2) -> None:
        self._source, self._count, self._state = source, count, source.state_dict()
        self._queue: queue.Queue[Any] | None = None
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._queue is None:
            self._queue = queue.Queue(self._count)
            threading.Thread(target=self._fill, args=(self._queue,), daemon=True, name="batches").start()
        batch, state, error = self._queue.get()
        if error is not None:
            self._queue.put((batch, state, error))  # For whoever asks again.
            raise error
        self._state = state
        return cast(Batch, batch)

    def _fill(self, into: queue.Queue[Any]) -> None:
        error: BaseException | None = None
        item: tuple[Batch | None, dict[str, Any] | None, BaseException | None]
        while error is None and not self._closed.is_set():
            try:
                item = next(self._source), self._source.state_dict(), None
            except BaseException as found:  # StopIteration among others: it is for the one who waits.
                item, error = (None, None, found), found
            while not self._closed.is_set():
                with suppress(queue.Full):
                    into.put(item, timeout=0.2)
                    break

    def close(self) -> None:
        """No more batches are wanted: the thread ends."""
        self._closed.set()

    def state_dict(self) -> dict[str, Any]:
        """That of the source, after the last batch taken from here."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As the source's; only before the first batch. Raises InputError after it."""
        if self._queue is not None:
            raise InputError("batches have been taken already: set the state before the first")
        self._source.load_state_dict(state)
        self._state = self._source.state_dict()
