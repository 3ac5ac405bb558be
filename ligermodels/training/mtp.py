"""Training of multi-token prediction: a head on a frozen model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ligermodels.convert import hub
from ligermodels.errors import ConfigError
from ligermodels.models.causal_lm import CausalLM
from ligermodels.speculative.mtp import MTPModel
from ligermodels.speculative.mtp_files import configured_layers, holds_head, stored_layers
from ligermodels.training.console import Outcome
from ligermodels.training.heads import config_without_weights, frozen_base_job, initialized_by
from ligermodels.training.job import Job, RunOptions
from ligermodels.training.mtp_recipe import NEW, MTPRecipe
from ligermodels.training.run import JobKind

if TYPE_CHECKING:
    from typing_extensions import Unpack


def train_mtp(recipe: MTPRecipe, out: str | os.PathLike[str], **options: Unpack[RunOptions]) -> Outcome:
    """Train a head of multi-token prediction by `recipe`, on a frozen model.

    Args:
        recipe: the settings.
        out: folder to write to: the head alone, or the model's checkpoint with the head in it.
        options: `device`, `attention`, `resume`, `overwrite`, `console` and `callbacks`: see `RunOptions`.

    Returns:
        The last step and the final evaluation, a `HeadsEvaluation`.

    Raises:
        ConfigError, InputError, CheckpointError, TrainingError, KeyboardInterrupt: see `run_job`. Also the errors of
            `MTPModel.from_pretrained` for the head that the recipe starts from.

    Examples:
        >>> recipe = MTPRecipe(base="Qwen/Qwen3.5-9B", data="chats.jsonl", steps=2000)
        >>> outcome = train_mtp(recipe, "mtp-head/", device="cuda")
        >>> outcome.evaluation.scores.accuracy(1)  # of each step, on the validation split
    """
    return KIND.train(recipe, out, **options)


def _job(recipe: MTPRecipe, model: CausalLM, *, resuming: bool) -> Job:
    """See `JobFactory`. ConfigError if the head to start from does not fit the recipe."""
    mtp = _head_on(model, recipe, resuming=resuming)
    layers, steps = mtp.head.num_layers, mtp.num_heads
    if steps < layers:
        raise ConfigError(f"num_steps: {steps} steps do not reach all of the head's {layers} layers; give {layers}")
    if recipe.seq_len < steps + 2:
        raise ConfigError(f"seq_len: must be at least {steps + 2} for {steps} steps, got {recipe.seq_len}")
    save = mtp.save_pretrained if recipe.write == "checkpoint" else mtp.save_head
    return frozen_base_job(mtp, recipe.learning_rate, save)


def _head_on(model: CausalLM, recipe: MTPRecipe, *, resuming: bool) -> MTPModel:
    """A new head on `model`, or the head that the recipe starts from: by default the model's own, if it has one."""
    start = recipe.start_from
    if start is None:
        source = None if model.export_spec is None else model.export_spec.source
        start = NEW if source is None or not holds_head(model, source.folder) else str(source.folder)
    num_layers = 0
    if start != NEW:
        stored = config_without_weights(start, model)
        num_layers = stored_layers(model, hub.resolve(start)) if stored is None else configured_layers(model, stored)
    if num_layers and recipe.num_layers not in (None, num_layers):
        raise ConfigError(f"num_layers: is {recipe.num_layers}, but the head to start from, {start}, has {num_layers}")
    options: dict[str, Any] = {"num_steps": recipe.num_steps, "decay": recipe.decay}
    if start != NEW and not resuming:
        return MTPModel.from_pretrained(model, start, **options)
    with initialized_by(recipe.seed, model):
        return MTPModel.from_base(model, num_layers=num_layers or recipe.num_layers or 1, **options)


KIND = JobKind(MTPRecipe, _job)
