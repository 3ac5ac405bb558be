"""Objectives of `train`: what is called for the loss, how it is evaluated, and what precedes training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ligermodels.data.batches import Batch
from ligermodels.evaluation import evaluate, perplexity
from ligermodels.models.causal_lm import CausalLM
from ligermodels.training.console import Console
from ligermodels.training.fine_tuning_recipe import FineTuningRecipe
from ligermodels.training.job import Evaluation
from ligermodels.training.objective_losses import PREFERENCE
from ligermodels.training.preference import PreferenceModel, check_settings, evaluate_preferences
from ligermodels.training.reference import add_reference
from ligermodels.training.reports import OutputMetrics
from ligermodels.training.run_plan import RunPlan
from ligermodels.training.step import Trainable


@dataclass(frozen=True)
class Objective:
    """The parts of a `Job` that an objective decides; see there."""

    trainable: Trainable
    evaluate: Callable[[Callable[[], Iterable[Batch]]], Evaluation]
    output_metrics: Callable[[Any], OutputMetrics]
    before_training: Callable[[RunPlan, Console], object] = lambda plan, console: None


@dataclass(frozen=True)
class LossEvaluation:
    """The mean loss per target on the validation split, in nats."""

    loss: float

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite if that is beyond a float."""
        return perplexity(self.loss)

    def metrics(self) -> dict[str, float]:
        return {"loss": self.loss, "perplexity": self.perplexity}


def objective_of(recipe: FineTuningRecipe, model: CausalLM) -> Objective:
    """The objective of a recipe, for `model`.

    Raises:
        InputError: a setting of the objective is out of range, or has no effect.
    """
    return OBJECTIVES[recipe.objective](recipe, model)


def check_objective(recipe: FineTuningRecipe) -> None:
    """Raise InputError if a setting of the objective is out of range, or has no effect."""
    if recipe.objective in PREFERENCE:
        form = recipe.data_form
        objective, settings = PREFERENCE[recipe.objective], recipe.objective_options
        check_settings(objective, settings, pairs=form.name == "pairs", kl=form.mismatched)


def _sft(recipe: FineTuningRecipe, model: CausalLM) -> Objective:
    """Cross entropy of the next token, and the auxiliary loss of a router."""
    return Objective(model, lambda batches: LossEvaluation(evaluate(model, batches())), _aux_loss)


def _preference(recipe: FineTuningRecipe, model: CausalLM) -> Objective:
    objective, is_pairs = PREFERENCE[recipe.objective], recipe.data_form.name == "pairs"
    trainable = PreferenceModel(model, objective, recipe.objective_options, pairs=is_pairs)

    def before_training(plan: RunPlan, console: Console) -> None:
        if objective.uses_reference:
            add_reference(plan, model, console)

    return Objective(
        trainable,
        evaluate=lambda batches: evaluate_preferences(trainable, batches),
        output_metrics=lambda out: OutputMetrics(_aux_loss(out).losses, means=out.metrics),
        before_training=before_training,
    )


OBJECTIVES: dict[str, Callable[[FineTuningRecipe, CausalLM], Objective]] = {
    "sft": _sft,
    **dict.fromkeys(PREFERENCE, _preference),
}
"""Objective -> function that makes it."""


def _aux_loss(out: Any) -> OutputMetrics:
    return OutputMetrics({} if out.aux_loss is None else {"aux_loss": out.aux_loss})
