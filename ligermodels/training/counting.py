"""The number of steps of a run, and messages about its data and its parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from torch import nn

from ligermodels.data.documents import Documents
from ligermodels.data.orders import DocumentOrder, Indices
from ligermodels.data.survey import Epoch, count_epoch
from ligermodels.errors import InputError
from ligermodels.layers.quantized import quantized_weights
from ligermodels.training.console import Console
from ligermodels.training.inputs import epoch_of
from ligermodels.training.recipe import TrainingRecipe


def num_documents(indices: Indices | DocumentOrder) -> int | None:
    """Number of documents of a split; None if they have not been counted."""
    return len(indices) if isinstance(indices, np.ndarray) else indices.num_documents


def count_steps(
    recipe: TrainingRecipe,
    documents: Documents,
    training: Indices | DocumentOrder,
    validation: Indices,
    console: Console,
) -> tuple[int, dict[str, Epoch]]:
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
    counts = dict[str, Epoch]()
    with console.progress("reading text") as update:
        try:
            if len(validation):
                counts["validation"] = count_epoch(epoch_of(recipe, documents, validation, shuffled=False), update)
        except InputError as error:
            raise InputError(f"in the validation split: {error}") from None
        if recipe.steps:
            return recipe.steps, counts
        counts["training"] = epoch = count_epoch(epoch_of(recipe, documents, training), update)
    batches = max(1, math.ceil(recipe.epochs * epoch.sequences * recipe.row_tokens / recipe.batch_tokens))
    return batches * recipe.data_form.batch_steps, counts


def data_messages(
    recipe: TrainingRecipe, steps: int, num_training: int | None, num_validation: int, counts: Mapping[str, Epoch]
) -> Iterator[str]:
    """Lines about the training and the validation split.

    Args:
        recipe: the settings.
        steps: number of optimizer steps.
        num_training: documents of the training split; None if they are not counted.
        num_validation: documents of the validation split.
        counts: "training" and "validation" -> counts of the splits that have been tokenised.
    """
    sizes = {"training": num_training, "validation": num_validation}
    rows, size, samples = recipe.batch_tokens // recipe.row_tokens, f"of {recipe.row_tokens:,} tokens", ""
    if recipe.data_form.samples:
        size, samples = "of a prompt", f", with {recipe.data_form.row_sequences} completions each"
    for split, documents in sizes.items():
        count = counts.get(split)
        packed = "" if count is None else f", {count.tokens:,} tokens in {count.sequences:,} sequences {size}"
        taken = f"; {steps:,} steps of {rows:,} sequences{samples if count else f' {size}{samples}'}"
        ending = taken if split == "training" else ""
        documents = documents if count is None else count.documents  # an epoch of a mixture has a part of them
        yield f"{split}: {'streamed' if documents is None else f'{documents:,}'} documents{packed}{ending}"
    epoch = counts.get("training")
    if epoch is not None and epoch.sequences < rows:
        yield (
            f"batch_tokens: a step takes {rows:,} sequences, and an epoch has {epoch.sequences:,}, so a step repeats "
            f"them; with {recipe.epochs:g} epochs, steps = {steps:,}. Give fewer batch_tokens for steps without repeats"
        )
    patience, every = recipe.early_stopping_patience, recipe.evaluate_every
    if patience is not None and every is not None and (evaluations := (steps - 1) // every) <= patience:
        yield (
            f"early_stopping_patience: {patience:,} evaluations after the best one cannot come before the last step: "
            f"evaluate_every {every:,} gives {evaluations:,} in {steps:,} steps. Give a smaller evaluate_every, or "
            "more steps"
        )


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """Numbers of all parameters and of those that are trained. A weight that is quantised counts the elements that it
    had before."""
    quantized = quantized_weights(model).values()
    codes = {id(parameter) for layer in quantized for parameter in layer.parameters()}
    total = sum(layer.in_features * layer.out_features for layer in quantized)
    total += sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in codes)
    return total, sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def trained_parameters(model: nn.Module) -> str:
    """The line about trained parameters, such as "training 1,024 of 4,096 parameters (25.00%)"."""
    total, trained = parameter_counts(model)
    return f"training {trained:,} of {total:,} parameters ({trained / max(1, total):.2%})"
