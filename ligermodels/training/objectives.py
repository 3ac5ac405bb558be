"""Objectives of `train`: for each the model with its loss, the evaluation, and the work before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ligermodels.adapt.lora import lora_disabled, lora_layers
from ligermodels.arguments import QuantizedFormat
from ligermodels.data.batches import Batch
from ligermodels.data.packing import Prefetcher
from ligermodels.errors import ConfigError
from ligermodels.evaluation import evaluate, perplexity
from ligermodels.models.causal_lm import CausalLM
from ligermodels.parallel.ranks import data_share
from ligermodels.speculative.joint import frozen_copy
from ligermodels.training.base import Base
from ligermodels.training.custom_loss import TOKEN_FIELDS, TokenLossModel, check_given, load_loss, with_loss
from ligermodels.training.distillation import DistillationModel, load_teacher
from ligermodels.training.fine_tuning_recipe import FineTuningRecipe
from ligermodels.training.folder import RECIPE
from ligermodels.training.job import BatchSource, Evaluation
from ligermodels.training.objective_evaluation import evaluate_objective
from ligermodels.training.objective_losses import PREFERENCE, PreferenceObjective
from ligermodels.training.objective_recipe import OBJECTIVES as SETTINGS_OF
from ligermodels.training.policy import PolicyModel, check_loss, loss_options
from ligermodels.training.preference import PreferenceModel, check_settings
from ligermodels.training.prepare_base import prepare_sampling
from ligermodels.training.reports import OutputMetrics
from ligermodels.training.rewards import Rewards
from ligermodels.training.rollouts import Rollouts, Sampler, evaluate_rewards
from ligermodels.training.sampling_model import SamplingModel
from ligermodels.training.step import Trainable


@dataclass(frozen=True)
class Objective:
    """The parts of a `Job` that an objective decides; see there."""

    trainable: Trainable
    evaluate: Callable[[Callable[[], Iterable[Batch]]], Evaluation]
    output_metrics: Callable[[Any], OutputMetrics]
    reference: CausalLM | None = None
    batches: Callable[[Prefetcher], BatchSource] = lambda prefetcher: prefetcher


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


def check_objective(recipe: FineTuningRecipe, resumed: Path | None = None) -> None:
    """Check the settings of an objective, before its model is loaded.

    Args:
        recipe: the settings.
        resumed: folder of the run to resume. If there is one in it, settings that a user's loss does not take, which
            earlier versions accepted, are no error. Default: a new run.

    Raises:
        InputError: a setting is out of range, or has no effect.
        ConfigError: there is no such loss, or the objective does not support a setting of the run.
    """
    if recipe.objective == "distill":
        _check_plan(recipe, "tensor", "context")
    elif recipe.objective in PREFERENCE:
        objective, form = _preference_objective(recipe), recipe.data_form
        if recipe.loss is None:
            check_settings(objective, recipe.objective_options, pairs=form.name == "pairs", kl=form.mismatched)
        elif resumed is None or not (resumed / RECIPE).is_file():
            # By its loss type, kto may need no completions of other records.
            of_data = ("loss_type",) if SETTINGS_OF[recipe.objective].data.mismatched else ()
            check_given(recipe.loss, [name for name in recipe.objective_options if name not in of_data])
    elif recipe.objective == "grpo":
        _check_plan(recipe, "tensor", "context", "expert")
        Rewards(recipe.reward)
        check_loss(dict(recipe))
    elif recipe.loss is not None:
        load_loss(recipe.loss, TOKEN_FIELDS)


def _check_plan(recipe: FineTuningRecipe, *unsupported: str) -> None:
    """Raise ConfigError if one of these degrees of parallelism is above 1."""
    for name in unsupported:
        if getattr(recipe.parallel, name) > 1:
            raise ConfigError(
                f"parallel.{name}: is not supported with the objective {recipe.objective}; use shard or replicate"
            )


def uses_reference(recipe: FineTuningRecipe) -> bool:
    """Whether the objective needs the log-probabilities of the reference."""
    return recipe.objective in PREFERENCE and PREFERENCE[recipe.objective].uses_reference


def _preference_objective(recipe: FineTuningRecipe) -> PreferenceObjective:
    """The objective on preference data, with the user's loss if there is one."""
    objective = PREFERENCE[recipe.objective]
    return (
        objective if recipe.loss is None else with_loss(objective, recipe.loss, SETTINGS_OF[recipe.objective].settings)
    )


def _sft(recipe: FineTuningRecipe, model: CausalLM) -> Objective:
    """Cross entropy of the next token, and the auxiliary loss of a router; or the user's loss of each token."""
    if recipe.loss is not None:
        return _of_model(TokenLossModel(model, recipe.loss))
    return Objective(model, lambda batches: LossEvaluation(evaluate(model, batches())), _router_metrics)


def _preference(recipe: FineTuningRecipe, model: CausalLM) -> Objective:
    objective = _preference_objective(recipe)
    trainable = PreferenceModel(model, objective, recipe.objective_options, pairs=recipe.data_form.name == "pairs")
    return _of_model(trainable)


def _distill(recipe: FineTuningRecipe, model: CausalLM) -> Objective:
    options = recipe.objective_options
    tokenizer = Base.find(recipe, on_meta=model.device.type == "meta").tokenizer
    teacher = load_teacher(options.pop("teacher"), tokenizer, model)
    return replace(_of_model(DistillationModel(model, teacher, **options)), reference=teacher)


def _grpo(recipe: FineTuningRecipe, model: CausalLM) -> Objective:
    settings, (rank, size) = dict(recipe), data_share(recipe.parallel)
    rewards, kind = Rewards(recipe.reward, recipe.reward_weights), recipe.sampling_quantize

    def sampler_of(kind: QuantizedFormat | None) -> Sampler:
        """Samples from the current weights, rounded to this format if it is given."""
        sampling = SamplingModel(model, partial(prepare_sampling, recipe, kind), quantizes=kind is not None)
        return Sampler(sampling, rewards, {**settings, "sampling_quantize": kind}, recipe.seed, rank, size)

    sampler, plain_sampler = sampler_of(kind), sampler_of(None)

    def policy_of(model: CausalLM) -> PolicyModel:
        loss, weight_max = loss_options(settings), recipe.importance_sampling_clip_max
        return PolicyModel(model, recipe.temperature or 1.0, weight_max, sampler.metric_names, loss)

    trainable, copy = policy_of(model), None
    rollouts: dict[str, Any] = {"settings": settings, "micro_batches": recipe.micro_batches(size)[1]}
    if recipe.beta and lora_layers(model) and not model.modules_to_save:
        rollouts["as_reference"] = partial(lora_disabled, model)
    elif recipe.beta:
        copy = frozen_copy(model)
        rollouts["reference"] = policy_of(copy)
    return replace(
        _of_model(trainable),
        evaluate=lambda batches: evaluate_rewards(plain_sampler, batches()),
        batches=lambda prefetcher: Rollouts(prefetcher, sampler, trainable, **rollouts),
        reference=copy,
    )


def _of_model(trainable: Any) -> Objective:
    """The objective of a model that returns an `ObjectiveOutput`."""
    return Objective(
        trainable,
        evaluate=lambda batches: evaluate_objective(trainable, batches),
        output_metrics=lambda out: replace(_router_metrics(out.routers), means=out.metrics),
    )


OBJECTIVES: dict[str, Callable[[FineTuningRecipe, CausalLM], Objective]] = {
    "sft": _sft,
    "distill": _distill,
    "grpo": _grpo,
    **dict.fromkeys(PREFERENCE, _preference),
}
"""Objective -> function that makes it."""


def _router_metrics(out: Any) -> OutputMetrics:
    """The metrics of the routers of a mixture of experts: `out` has the fields of `RouterResults`."""
    losses = {"aux_loss": out.aux_loss, "router_z_loss": out.router_z_loss}
    known = {name: loss for name, loss in losses.items() if loss is not None}
    return OutputMetrics(known, tokens_per_expert=out.tokens_per_expert)
