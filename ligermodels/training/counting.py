"""The number of steps of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ligermodels.data.documents import Documents
from ligermodels.data.orders import DocumentOrder, Indices
from ligermodels.errors import InputError
from ligermodels.training.console import Console
from ligermodels.training.inputs import packed
from ligermodels.training.recipe import TrainingRecipe


class Count(NamedTuple):
    """Number of documents in an epoch, of packed sequences, and of tokens in them."""

    documents: int
    sequences: int
    tokens: int


def num_documents(indices: Indices | DocumentOrder) -> int | None:
    """Number of documents of a split; None if they have not been counted."""
    return len(indices) if isinstance(indices, np.ndarray) else indices.num_documents


def count_steps(
    recipe: TrainingRecipe,
    documents: Documents,
    training: Indices | DocumentOrder,
    validation: Indices,
    console: Console,
) -> tuple[int, dict[str, Count]]:
    """Steps of the recipe, and counts of the splits that were read, "training" and "validation". The validation split
    is read in any case, so that errors in it show now.

    Args:
        recipe: the settings. With `steps` the training split is not read; with `epochs` all of it is.
        documents: the data.
        training: the documents of the training split.
        validation: the documents of the validation split.
        console: where messages and progress go.

    Raises:
        InputError: there is nothing to learn in a split, or more unusable lines than allowed.
    """
    counts = dict[str, Count]()
    with console.progress("reading text") as update:
        try:
            if len(validation):
                counts["validation"] = _count(recipe, documents, validation, None, update)
        except InputError as error:
            raise InputError(f"in the validation split: {error}") from None
        if recipe.steps:
            return recipe.steps, counts
        counts["training"] = epoch = _count(recipe, documents, training, recipe.seed, update)
    return max(1, math.ceil(recipe.epochs * epoch.sequences * recipe.row_tokens / recipe.batch_tokens)), counts


def _count(
    recipe: TrainingRecipe,
    documents: Documents,
    indices: Indices | DocumentOrder,
    seed: int | None,
    update: Callable[..., None],
) -> Count:
    """Number of documents, sequences and tokens in an epoch."""
    batches, sequences, tokens = packed(recipe, documents, indices, batch_size=1, seed=seed, epochs=1), 0, 0
    for sequences, batch in enumerate(batches, start=1):  # noqa: B007 - the number of the last one
        tokens += batch["labels"].numel()
        update(batches.documents_read, batches.num_documents or 0)
    return Count(batches.documents_read, sequences, tokens)
