"""Changes to the modules of a run's base model, before it is sharded over ranks and loaded."""

from __future__ import annotations

from typing import Any

import torch

from ligermodels.adapt.float8 import float8
from ligermodels.adapt.quantize import quantize
from ligermodels.errors import arguments_named
from ligermodels.models.causal_lm import CausalLM
from ligermodels.ops import Float8Recipe
from ligermodels.training.job import Prepare
from ligermodels.training.recipe import R


def prepare_model(recipe: R, prepare_base: Prepare[R] | None, model: CausalLM) -> None:
    """Change the modules of the base model by `prepare_base`, if given, and to float8 if the recipe says so."""
    if prepare_base is not None:
        prepare_base(recipe, model)
    if recipe.float8:
        gradients = {"e5m2": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}[recipe.float8_gradients]
        with arguments_named(exclude="float8_exclude"):
            float8(model, Float8Recipe(gradient_dtype=gradients), exclude=recipe.float8_exclude)


def quantize_base(recipe: Any, model: CausalLM) -> None:
    """Quantise the weights of the base model by the settings `quantize` and `quantize_exclude` of a recipe."""
    if recipe.quantize is not None:
        with arguments_named(exclude="quantize_exclude"):
            quantize(model, recipe.quantize, exclude=recipe.quantize_exclude)
