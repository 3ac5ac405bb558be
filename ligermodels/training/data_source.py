"""How the records of a run become documents and batches, by the form of its data."""

from __future__ import annotations

from typing import Any, NamedTuple

from ligermodels.data.documents import Documents
from ligermodels.data.examples import ExampleBatches, Examples
from ligermodels.data.packing import PackedBatches
from ligermodels.training.recipe import TrainingRecipe


class DataSource(NamedTuple):
    """Classes that read and batch the data, and their options.

    documents, options: class of the documents, and options beside those of `Documents`.
    batches, batch_options: class of the batches, and options beside those of `PackedBatches`.
    """

    documents: type[Documents] = Documents
    options: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    batches: type[PackedBatches] = PackedBatches
    batch_options: dict[str, Any] = {}  # noqa: RUF012


def data_source(recipe: TrainingRecipe) -> DataSource:
    """How the records of `recipe` are read and batched."""
    form = recipe.data_form
    if form.name == "documents":
        return DataSource()
    options = {
        "form": form.name,
        "seq_len": recipe.seq_len,
        "excess_length_strategy": recipe.excess_length_strategy,
        "mismatched": form.mismatched,
    }
    return DataSource(Examples, options, ExampleBatches, {"prompt_targets": form.prompt_targets})
