"""Messages at the start of a run: its data and its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from ligermodels.layers.quantized import quantized_weights
from ligermodels.training.counting import Count
from ligermodels.training.recipe import TrainingRecipe


def data_messages(
    recipe: TrainingRecipe, steps: int, num_training: int | None, num_validation: int, counts: Mapping[str, Count]
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
    sequences = f"sequences of {recipe.row_tokens:,} tokens"
    for split, documents in sizes.items():
        count = counts.get(split)
        packed = "" if count is None else f", {count.tokens:,} tokens in {count.sequences:,} {sequences}"
        taken = f"; {steps:,} steps of {recipe.batch_tokens // recipe.row_tokens:,} sequences"
        ending = {"training": taken if count else f"{taken} of {recipe.row_tokens:,} tokens", "validation": ""}[split]
        documents = documents if count is None else count.documents  # an epoch of a mixture has a part of them
        yield f"{split}: {'streamed' if documents is None else f'{documents:,}'} documents{packed}{ending}"


def trained_parameters(model: nn.Module) -> str:
    """The line about trained parameters, such as "training 1,024 of 4,096 parameters (25.00%)". A weight that is
    quantised counts the elements that it had before."""
    quantized = quantized_weights(model).values()
    codes = {id(parameter) for layer in quantized for parameter in layer.parameters()}
    total = sum(layer.in_features * layer.out_features for layer in quantized)
    total += sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in codes)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return f"training {trained:,} of {total:,} parameters ({trained / max(1, total):.2%})"
