"""Documents packed into sequences without padding, as resumable, prefetched batches."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, Literal, get_args

import numpy as np
import torch

from ligermodels.arguments import check_count
from ligermodels.data.batches import Batch
from ligermodels.data.corpus import NO_DOCUMENT
from ligermodels.data.documents import AT_ONCE, EMPTY, Documents, TokenDocuments
from ligermodels.data.orders import DocumentOrder, Indices, Place, Shuffled
from ligermodels.data.rows import Piece, Pool
from ligermodels.errors import InputError

ExcessLengthStrategy = Literal["truncate", "drop", "split", "raise"]
"""What happens to a whole document with more than `seq_len` tokens."""


class PackedBatches:
    """Iterator of batches of packed documents, without padding. Its state can be saved and loaded.

    A batch has its sequences in one row: `input_ids` and `labels`, int64 (1, n) with n <= batch_size * seq_len, and
    `cu_seqlens`, int32 (pieces + 1,), the bounds of the pieces, between which attention is blocked. A piece is part of
    one document and of one sequence.

    Whole documents (`Tokens.splits` is False: chats) are packed by best-fit decreasing, among the next documents with
    the tokens of some 16 sequences, and none is cut. Documents that may be split (texts) come in order, and fill the
    rest of each sequence: if a text does not fit, the next sequence starts with its remainder. The last sequences of an
    epoch may be shorter. A sequence without a target is left out.

    Args:
        documents: the documents.
        indices: indices of the documents to use, a list, array or tensor, or an order of them; None for all.
        seq_len: most tokens of a sequence, at least 2.
        batch_size: sequences per batch, at least 1.
        seed: shuffles the documents, differently in each epoch; None keeps their order.
        epochs: passes through the documents; None repeats them without end. The last batch may be smaller.
        excess_length_strategy: for a whole document with more than `seq_len` tokens: "truncate" keeps its first
            `seq_len` tokens, "drop" leaves it out, "split" cuts it into sequences (later sequences are trained on
            without the beginning), "raise" is an error. Such documents are counted in a message.
        max_sequences: most sequences of all batches; None for no limit.

    Raises:
        InputError: there are no documents, or a size is no whole number or too small. During iteration, after an epoch
            in which no document had a token to train on, or for a document that is too long, with "raise".

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
        indices: Indices | Sequence[int] | torch.Tensor | DocumentOrder | None = None,
        *,
        seq_len: int,
        batch_size: int,
        seed: int | None = None,
        epochs: int | None = None,
        excess_length_strategy: ExcessLengthStrategy = "truncate",
        max_sequences: int | None = None,
    ) -> None:
        self._seq_len = check_count("seq_len", seq_len, least=2)
        self._batch_size = check_count("batch_size", batch_size)
        if excess_length_strategy not in get_args(ExcessLengthStrategy):
            known = ", ".join(get_args(ExcessLengthStrategy))
            raise InputError(f"excess_length_strategy: must be one of {known}, got {excess_length_strategy!r}")
        self._documents, self._seed, self._epochs = documents, seed, epochs
        indices = range(len(documents)) if indices is None else indices
        self._order: DocumentOrder
        if isinstance(indices, np.ndarray | Sequence | torch.Tensor):
            self._order = Shuffled(np.asarray(indices, np.int64))
        else:
            self._order = indices
        if self._order.num_documents == 0:
            raise InputError(NO_DOCUMENT)
        self._excess = excess_length_strategy
        self._left = sys.maxsize if max_sequences is None else max_sequences
        self.documents_read = 0
        """Number of documents that have been read, over all epochs, since the start or the last `load_state_dict`."""
        self._start(0, 0)

    def _start(self, epoch: int, place: Place) -> None:
        self._epoch, self._place, self._num_rows = epoch, place, 0
        self._pool = self._new_pool()
        self._upcoming = self._order.documents(self._seed, epoch, place)
        self._next = deque[tuple[int, Place]]()
        """Documents taken from `_upcoming`, each with the place after it."""
        self._units = deque[tuple[Indices, Place]]()
        """Groups of documents to read together, the next group first, each with the place after it."""

    def _new_pool(self) -> Pool:
        return Pool(self._seq_len)

    @property
    def num_documents(self) -> int | None:
        """Number of documents of an epoch; None if they are not counted."""
        return self._order.num_documents

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        pieces: list[Piece] = []
        for _ in range(min(self._batch_size, self._left)):
            pieces += self._row()
            self._left -= 1
        if not pieces:
            raise StopIteration
        return self._batch(pieces)

    def _batch(self, pieces: list[Piece]) -> Batch:
        """The batch with these pieces."""
        sources = dict.fromkeys(piece.document for piece in pieces)
        ids, labels = (np.concatenate(parts)[None] for parts in zip(*((p.ids, p.labels) for p in pieces), strict=True))
        bounds = np.cumsum([0, *(len(piece.ids) for piece in pieces)], dtype=np.int32)
        return Batch(
            {
                "input_ids": torch.from_numpy(ids).long(),
                "labels": torch.from_numpy(labels).long(),
                "cu_seqlens": torch.from_numpy(bounds),
            },
            where=lambda: ", ".join(map(self._documents.name, sources)),
        )

    def _row(self) -> list[Piece]:
        """The pieces of the next sequence; none after the last epoch."""
        while self._epochs is None or self._epoch < self._epochs:
            while not self._pool.is_full and self._announce():
                some, place = self._units[0]
                for piece in self._read(some):
                    self._pool.add(piece)
                self._units.popleft()
                self._place, self.documents_read = place, self.documents_read + len(some)
            if not self._pool:
                self._end_epoch()
                continue
            row = self._pool.take_row()
            if any(piece.has_target for piece in row):
                self._num_rows += 1
                return row
        return []

    def _announce(self) -> bool:
        """Divide the next documents into groups, so that some can be encoded ahead of their use; False at the end."""
        while len(self._units) <= self._documents.units_ahead:
            self._next.extend(islice(self._upcoming, AT_ONCE - len(self._next)))
            if not self._next:
                break
            count = self._documents.at_once([index for index, _ in self._next])
            some = [self._next.popleft() for _ in range(count)]
            self._units.append((np.array([index for index, _ in some]), some[-1][1]))
            self._documents.ahead(self._units[-1][0])
        return bool(self._units)

    @property
    def _advice(self) -> str:
        return (
            f"give files with texts, or with chats in which the assistant speaks within the first seq_len "
            f"({self._seq_len:,}) tokens"
        )

    def _end_epoch(self) -> None:
        self._documents.notes.say_totals()
        if not self._num_rows:
            count = f"{self.num_documents:,} documents" if self.num_documents else "documents"
            bad = len(self._documents.bad)
            unusable = f" ({bad:,} are unusable: see the messages about them)" if bad else ""
            raise InputError(f"there is nothing to learn in any of the {count}{unusable}: {self._advice}")
        self._start(self._epoch + 1, 0)

    def _read(self, indices: Iterable[int]) -> Iterator[Piece]:
        """The pieces of these documents to add to the pool."""
        indices = list(map(int, indices))
        for index, tokens in zip(indices, self._documents.read(indices), strict=True):
            if tokens is None:
                continue
            ids, labels = np.asarray(tokens.ids, np.int32), np.asarray(tokens.labels, np.int32)
            document = Piece(index, 0, ids, labels, tokens.splits)
            if not document.has_target:
                self._note(EMPTY, index, "nothing to learn: no token is predicted from the tokens before it")
            elif document.splits or len(ids) <= self._seq_len:
                yield document
            else:
                yield from self._shorter(document)

    def _shorter(self, whole: Piece) -> list[Piece]:
        """The pieces that remain of a whole document with more than `seq_len` tokens."""
        index, size = whole.document, len(whole.ids)
        problem = f"more than seq_len ({self._seq_len:,}) tokens"
        if self._excess == "raise":
            name = self._documents.name(index)
            raise InputError(f"{name}: has {size:,} tokens, {problem}, and excess_length_strategy is 'raise'")
        pieces, rest = list[Piece](), whole
        while len(rest.ids):
            piece, rest = rest.cut(self._seq_len)
            pieces.append(piece)
        kept = {"truncate": pieces[:1], "drop": [], "split": pieces}[self._excess]
        kept = [piece for piece in kept if piece.has_target]
        done = {"truncate": "truncated", "drop": "left out", "split": "split"}[self._excess]
        lost = size - sum(len(piece.ids) for piece in kept)
        self._note(f"have {problem}: {done}", index, f"has {size:,} tokens, {problem}: {done}", lost)
        return kept

    def _note(self, reason: str, index: int, message: str, tokens: int = 0) -> None:
        self._documents.notes.add(reason, index, lambda: f"{self._documents.name(index)}: {message}", tokens)

    def state_dict(self) -> dict[str, Any]:
        """The position in the documents, for JSON."""
        return {
            "corpus": self._documents.fingerprint,
            "documents": self._order.key,
            "seed": self._seed,
            "seq_len": self._seq_len,
            "excess_length_strategy": self._excess,
            "epoch": self._epoch,
            "place": self._place,
            "rows": self._num_rows,
            "pool": self._pool.positions(),
            "unusable": sorted(self._documents.bad),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. Raises InputError if its data, seed or settings differ."""
        own = self.state_dict()
        if missing := own.keys() - state.keys():
            raise InputError(f"data: the state is of another version, without {min(missing)!r}; start over")
        for key in ("corpus", "documents", "seed", "seq_len", "excess_length_strategy"):
            if state[key] != own[key]:
                raise InputError(f"data: differs from the start of the run: {key} was {state[key]}, is {own[key]}")
        self._documents.bad |= set(state["unusable"])
        self._start(state["epoch"], state["place"])
        self._num_rows = state["rows"]
        waiting = list(dict.fromkeys(index for index, _ in state["pool"]))
        pieces: dict[tuple[int, int], Piece] = {}
        while waiting:
            count = self._documents.at_once(waiting)
            pieces |= {(piece.document, piece.start): piece for piece in self._read(waiting[:count])}
            waiting = waiting[count:]
        for index, start in state["pool"]:
            self._pool.add(pieces[index, start] if (index, start) in pieces else pieces[index, 0].cut(start)[1])


def counted(batches: PackedBatches, update: Callable[[int, int], object]) -> Iterator[Batch]:
    """The batches. `update`, which moves a progress bar, is called with the documents read, and all documents."""
    for batch in batches:
        update(batches.documents_read, batches.num_documents or 0)
        yield batch


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
        return group[0].without_targets()

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
        pin_memory: put the batches into page-locked memory, for copies to a GPU; in the other thread too.
    """

    def __init__(self, source: PackedBatches | RankBatches, count: int = 2, *, pin_memory: bool = False) -> None:
        self._source, self._count, self._state = source, count, source.state_dict()
        self._pin_memory = pin_memory
        self._thread = ThreadPoolExecutor(1, "batches")
        self._pending: deque[Future[tuple[Batch, dict[str, Any]]]] = deque()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        while len(self._pending) <= self._count:
            self._pending.append(self._thread.submit(self._prepare))
        batch, self._state = self._pending[0].result()  # an error stays in the queue: the next call raises it again
        self._pending.popleft()
        return batch

    def _prepare(self) -> tuple[Batch, dict[str, Any]]:
        batch = next(self._source)
        return batch.pinned() if self._pin_memory else batch, self._source.state_dict()

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
