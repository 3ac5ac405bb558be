"""A survey of data: which tokens of its documents are trained on, and counts over all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ligermodels.data.batches import Batch
from ligermodels.data.corpus import Indices
from ligermodels.data.documents import Documents
from ligermodels.data.encoding import Tokens
from ligermodels.data.packing import PackedBatches, counted
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.layers import IGNORE_INDEX

PERCENTILES = ("0", "10", "50", "90", "99", "100")
"""Percentiles of the lengths of documents; 0 is the shortest, 100 the longest."""


class Epoch(NamedTuple):
    """Counts of an epoch.

    documents: documents that were read, unusable ones included.
    sequences: packed sequences.
    tokens: tokens in these sequences.
    targets: tokens that are predicted from the tokens before them, and trained on.
    """

    documents: int
    sequences: int
    tokens: int
    targets: int


def trained_tokens(batch: Batch) -> Tensor:
    """Whether each token of a batch in one row is predicted and counts in the loss, bool (n,)."""
    trained = batch["labels"][0] != IGNORE_INDEX
    trained[batch["cu_seqlens"][:-1].long()] = False  # nothing predicts the first token of a document
    return trained


def count_epoch(sequences: PackedBatches, update: Callable[[int, int], object] = lambda done, total: None) -> Epoch:
    """Read the sequences of one epoch, one per batch. `update` is called with the documents read, and all documents."""
    count = tokens = targets = 0
    for count, batch in enumerate(counted(sequences, update), start=1):  # noqa: B007 - the number of the last one
        tokens += batch["labels"].numel()
        targets += int(trained_tokens(batch).sum())
    return Epoch(sequences.documents_read, count, tokens, targets)


class Span(NamedTuple):
    """Consecutive tokens as text, and whether they are trained on."""

    text: str
    is_trained: bool


@dataclass(frozen=True)
class Survey:
    """Counts over the documents of some data.

    documents: number of documents that can be used.
    tokens, trained_tokens: number of their tokens, and of those with a label, before any is cut.
    lengths: percentile of PERCENTILES -> tokens of a document; of preference data, of a prompt with a completion.
    sequences: number of packed sequences of an epoch.
    used_tokens: number of tokens in the sequences.
    targets: number of tokens in the sequences that are predicted from the tokens before them, and trained on.
    """

    documents: int
    tokens: int
    trained_tokens: int
    lengths: dict[str, int]
    sequences: int
    used_tokens: int
    targets: int


def survey(
    documents: Documents,
    indices: Indices,
    sequences: PackedBatches,
    update: Callable[[int, int], object] = lambda done, total: None,
) -> Survey:
    """Read all documents, once alone and once in sequences.

    Args:
        documents: the documents.
        indices: the documents to use, int64.
        sequences: the sequences of one epoch, as training gets them, one per batch.
        update: called with the number of documents that have been read alone, and of all.

    Raises:
        InputError: there is nothing to learn in any document.
    """
    lengths: list[int] = []
    place = trained = usable = 0
    while place < len(indices):
        some = indices[place : place + documents.at_once(indices[place:])]
        place += len(some)
        update(place, len(indices))
        for sequences_of_document in documents.sequences(some):
            usable += bool(sequences_of_document)
            for _, tokens in sequences_of_document:
                lengths.append(len(tokens.ids))
                trained += sum(label != IGNORE_INDEX for label in tokens.labels)
    epoch = count_epoch(sequences)
    percentiles = np.percentile(lengths, list(map(int, PERCENTILES)), method="nearest") if lengths else ()
    return Survey(
        documents=usable,
        tokens=sum(lengths),
        trained_tokens=trained,
        lengths=dict(zip(PERCENTILES, map(int, percentiles), strict=False)),
        sequences=epoch.sequences,
        used_tokens=epoch.tokens,
        targets=epoch.targets,
    )


def spans(tokens: Tokens, tokenizer: Tokenizer) -> list[Span]:
    """The text of a document, special tokens included, in spans of tokens that are trained on or not.

    The texts are exact where a span ends with a whole character.
    """
    found, end = [], 0
    for is_trained, run in groupby(tokens.labels, lambda label: label != IGNORE_INDEX):
        start, end = end, end + len(list(run))
        found.append(Span(_text_of(tokens.ids, start, end, tokenizer), is_trained))
    return found


def _text_of(ids: Sequence[int], start: int, end: int, tokenizer: Tokenizer) -> str:
    """The text of tokens `start` to `end`, as the continuation of the tokens before them."""
    before, text = (tokenizer.decode(ids[:stop], skip_special_tokens=False) for stop in (start, end))
    return text.removeprefix(before) if text.startswith(before) else tokenizer.decode(ids[start:end])
