"""Orders of the documents of an epoch. Reading may start at any place."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

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
    """Documents in a random order, over all of them.

    Args:
        indices: the documents.
    """

    def __init__(self, indices: Indices) -> None:
        self._indices, self.num_documents = indices, len(indices)

    @property
    def key(self) -> int:
        return self.num_documents

    def documents(self, seed: int | None, epoch: int, place: Place) -> Iterator[tuple[int, Place]]:
        """Indices of the documents, each with the place after it: the number of documents read.

        Args:
            seed: shuffles the documents, differently in each epoch; None keeps their order.
            epoch: number of the epoch, from 0.
            place: place to start at.
        """
        order = self._indices if seed is None else self._indices[permutation(len(self._indices), seed, epoch)]
        for number in range(place, len(order)):
            yield int(order[number]), number + 1


class First:
    """The first documents of each epoch of an order.

    Args:
        order: the order.
        count: most documents of an epoch.
    """

    num_documents: int | None = None

    def __init__(self, order: DocumentOrder, count: int) -> None:
        self._order, self._count = order, count

    @property
    def key(self) -> list[Any]:
        return [self._order.key, self._count]

    def documents(self, seed: int | None, epoch: int, place: Place) -> Iterator[tuple[int, Place]]:
        """Indices of the first documents, each with the place after it.

        Args:
            seed: shuffles the documents, differently in each epoch; None keeps their order.
            epoch: number of the epoch, from 0.
            place: 0, the beginning.

        Raises:
            ValueError: `place` is not the beginning.
        """
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
