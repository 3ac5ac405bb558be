"""Orders of the documents of an epoch, and mixtures of several sources. Reading may start at any place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ligermodels.arguments import check_number
from ligermodels.errors import ConfigError, InputError

if TYPE_CHECKING:
    from ligermodels.data.corpus import Corpus

Indices = NDArray[np.int64]

Place = Any
"""A place in an order, as JSON types: the documents before it have been read."""


class DocumentOrder(Protocol):
    """The documents of each epoch, in order."""

    num_documents: int | None
    """Documents of an epoch; None if they have not been counted."""

    @property
    def key(self) -> Any:
        """Settings of the order, as JSON types; a resumed run needs the same."""

    def documents(self, seed: int | None, epoch: int, place: Place) -> Iterator[tuple[int, Place]]:
        """Indices of the documents, each with the place after it.

        Args:
            seed: shuffles the documents, differently in each epoch; None keeps their order.
            epoch: number of the epoch, from 0.
            place: place to start at; 0 is the beginning.
        """


class Shuffled:
    """The documents of `indices` in a random order, over all of them. A place is the number of documents read."""

    def __init__(self, indices: Indices) -> None:
        self._indices = indices
        self.num_documents: int | None = len(indices)

    @property
    def key(self) -> int:
        return len(self._indices)

    def documents(self, seed: int | None, epoch: int, place: Place) -> Iterator[tuple[int, Place]]:
        order = self._indices if seed is None else self._indices[permutation(len(self._indices), seed, epoch)]
        for number in range(place, len(order)):
            yield int(order[number]), number + 1


class First:
    """The first `count` documents of each epoch of an order. They are read from the beginning, place 0, alone."""

    num_documents: int | None = None

    def __init__(self, order: DocumentOrder, count: int) -> None:
        self._order, self._count = order, count

    @property
    def key(self) -> list[Any]:
        return [self._order.key, self._count]

    def documents(self, seed: int | None, epoch: int, place: Place) -> Iterator[tuple[int, Place]]:
        if place:
            raise ValueError("the first documents are read from the beginning")
        return islice(self._order.documents(seed, epoch, 0), self._count)


def permutation(count: int, seed: int | str, purpose: str | int) -> Indices:
    """A random permutation of range(count), the same in every version of numpy.

    Args:
        count: length of the permutation.
        seed: seed of the run.
        purpose: a text or number that makes permutations with the same seed independent.
    """
    digits = np.frombuffer(f"{seed} {purpose}".encode(), np.uint8)
    return np.random.RandomState(digits.astype(np.uint32)).permutation(count)


class Share(NamedTuple):
    """A source in an epoch: number of its documents in the epoch and in all, and its fraction of the epoch's bytes."""

    documents: int
    available: int
    bytes: float


class Mixture:
    """The documents of each epoch of a mixture, a `DocumentOrder` by the seed and the number of the epoch alone.

    Weights are shares of documents. An epoch is as long as it can be without a document twice: the source with the
    fewest documents for its weight gives all of its documents, and the others give as many as their weights ask for.
    The next epoch goes on with further documents of each source, so that all documents of a source are used equally
    often.

    Args:
        sources: documents of each source, int64.
        weights: positive weight of each source; they need not add up to 1.

    Raises:
        InputError: there is not one weight for each source, or a weight is not a positive number.
        ConfigError: a source has no document.

    Examples:
        >>> mixture = Mixture([np.arange(0, 300), np.arange(300, 1000)], [3, 1])
        >>> epoch = mixture.epoch(0, seed=0)
        >>> len(epoch), int((epoch < 300).sum()), int((epoch >= 300).sum())
        (400, 300, 100)
    """

    def __init__(self, sources: Sequence[Indices], weights: Sequence[float]) -> None:
        if len(sources) != len(weights) or not len(sources):
            raise InputError(f"weights: give one for each source; got {len(weights)} for {len(sources)} sources")
        for number, weight in enumerate(weights):
            check_number(f"weights[{number}]", weight, positive=True)
        if empty := [number for number, source in enumerate(sources, 1) if not len(source)]:
            raise ConfigError(f"data_weights: source {empty[0]} of data has no document to train on; leave it out")
        self._sources = list(sources)
        size = min(len(source) / weight for source, weight in zip(sources, weights, strict=True))
        wanted = (int(size * weight + 1e-6) for weight in weights)
        self._counts = [min(max(1, count), len(source)) for count, source in zip(wanted, sources, strict=True)]
        self.num_documents: int | None = sum(self._counts)
        """Number of documents in an epoch."""

    @classmethod
    def of(cls, corpus: Corpus, indices: Indices, weights: Sequence[float]) -> Mixture:
        """The mixture of the sources of a corpus.

        Args:
            corpus: the files; each name that was given is a source.
            indices: the documents to use, sorted, int64.
            weights: weight of each source.
        """
        return cls([indices[np.isin(indices, source)] for source in corpus.sources()], weights)

    @property
    def key(self) -> list[list[int]]:
        """Number of documents of each source in an epoch, and in all; a resumed run needs the same."""
        return [[count, len(source)] for count, source in zip(self._counts, self._sources, strict=True)]

    def documents(self, seed: int | None, epoch: int, place: Place) -> Iterator[tuple[int, Place]]:
        """See `DocumentOrder`; a place is the number of documents read, and without `seed` (at any `epoch` and `place`)
        all documents of all sources come in order."""
        order = np.sort(np.concatenate(self._sources)) if seed is None else self.epoch(epoch, seed=seed)
        for number in range(place, len(order)):
            yield int(order[number]), number + 1

    def epoch(self, number: int, *, seed: int) -> Indices:
        """The documents of epoch `number`, from 0, in an order by the seed of the run."""
        parts = [
            _take(source, number * count, count, f"{seed} {position}")
            for position, (source, count) in enumerate(zip(self._sources, self._counts, strict=True))
        ]
        chosen = np.concatenate(parts)
        return chosen[permutation(len(chosen), seed, number)]

    def shares(self, corpus: Corpus) -> list[Share]:
        """The share of each source. Bytes are the mean bytes of its documents, times their number in an epoch."""
        sizes = corpus.sizes()
        parts = [count * float(sizes[source].mean()) for source, count in zip(self._sources, self._counts, strict=True)]
        return [
            Share(count, len(source), part / sum(parts))
            for source, count, part in zip(self._sources, self._counts, parts, strict=True)
        ]


def _take(source: Indices, start: int, count: int, seed: str) -> Indices:
    """`count` documents from position `start` of an endless sequence of permutations of a source."""
    first, last = start // len(source), (start + count - 1) // len(source)
    passes = [source[permutation(len(source), seed, f"pass {number}")] for number in range(first, last + 1)]
    begin = start - first * len(source)
    return np.concatenate(passes)[begin : begin + count]
