"""Recipes for whole language models: fine-tuning, and pre-training from a config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ligermodels.training.recipe import TrainingRecipe


class FineTuningRecipe(TrainingRecipe):
    """Settings of a run that trains a whole language model. Raises as `TrainingRecipe`."""

    kind: ClassVar[str] = "train"
    trains_configs: ClassVar[bool] = True

    if TYPE_CHECKING:  # the constructor that type checkers derive would ask for every setting

        def __init__(self, **settings: Any) -> None: ...
