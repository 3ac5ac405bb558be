"""Training of DFlash and DSpark: a draft head that proposes blocks, on a frozen model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from ligermodels.errors import ConfigError, InputError
from ligermodels.models.causal_lm import CausalLM
from ligermodels.speculative.dspark import DFlashModel, DSparkModel
from ligermodels.training.callback import Callback
from ligermodels.training.console import Console, Outcome
from ligermodels.training.dspark_recipe import DFLASH, DSPARK, TRAINING, BlockRecipe, DFlashRecipe, DSparkRecipe
from ligermodels.training.heads import draft_metrics, frozen_base_job
from ligermodels.training.job import Job
from ligermodels.training.preparation import quantize_base
from ligermodels.training.run import run_job

MODELS: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
    DFlashRecipe.kind: (DFlashModel, DFLASH, TRAINING),
    DSparkRecipe.kind: (DSparkModel, DSPARK, (*TRAINING, "confidence_weight")),
}
"""Kind of recipe -> its model, the settings of a new head, and the settings of `BlockTraining`."""


def train_dflash(
    recipe: DFlashRecipe,
    out: str | os.PathLike[str],
    *,
    device: str = "cpu",
    attention: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Train a DFlash head by `recipe`, on a frozen model.

    Args:
        recipe: the settings.
        out: folder to write to: the head, in speculators' form.
        device: device of the model, such as "cpu" or "cuda".
        attention: attention backend of the model, or "auto".
        resume: continue from the newest checkpoint in `out`, if there is one.
        overwrite: replace what is in `out`: an earlier run, or another model. Default: False, that is an error.
        console: where messages and progress go; None: nowhere.
        callbacks: called after steps, evaluations and checkpoints: see `Callback`.

    Returns:
        The last step and the final evaluation, a `HeadsEvaluation`.

    Raises:
        ConfigError, InputError, CheckpointError, TrainingError, KeyboardInterrupt: see `run_job`. Also the errors of
            `DFlashModel.from_pretrained` for the head in `start_from`.

    Examples:
        >>> recipe = DFlashRecipe(base="Qwen/Qwen3-8B", data="chats.jsonl", steps=2000)
        >>> outcome = train_dflash(recipe, "head/", device="cuda")
        >>> outcome.evaluation.metrics()["greedy_tau"]  # on the validation split
    """
    DFlashRecipe.check_kind(recipe)
    options: dict[str, Any] = {"device": device, "attention": attention, "resume": resume, "overwrite": overwrite}
    return run_job(block_job, recipe, out, prepare_base=quantize_base, console=console, callbacks=callbacks, **options)


def train_dspark(
    recipe: DSparkRecipe,
    out: str | os.PathLike[str],
    *,
    device: str = "cpu",
    attention: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Train a DSpark head by `recipe`, on a frozen model.

    Args:
        recipe: the settings.
        out: folder to write to: the head, in speculators' form.
        device: device of the model, such as "cpu" or "cuda".
        attention: attention backend of the model, or "auto".
        resume: continue from the newest checkpoint in `out`, if there is one.
        overwrite: replace what is in `out`: an earlier run, or another model. Default: False, that is an error.
        console: where messages and progress go; None: nowhere.
        callbacks: called after steps, evaluations and checkpoints: see `Callback`.

    Returns:
        The last step and the final evaluation, a `HeadsEvaluation`.

    Raises:
        ConfigError, InputError, CheckpointError, TrainingError, KeyboardInterrupt: see `run_job`. Also the errors of
            `DSparkModel.from_pretrained` for the head in `start_from`.

    Examples:
        >>> recipe = DSparkRecipe(base="Qwen/Qwen3-8B", data="chats.jsonl", steps=2000)
        >>> outcome = train_dspark(recipe, "head/", device="cuda")
        >>> outcome.evaluation.metrics()["tau"]  # on the validation split
    """
    DSparkRecipe.check_kind(recipe)
    options: dict[str, Any] = {"device": device, "attention": attention, "resume": resume, "overwrite": overwrite}
    return run_job(block_job, recipe, out, prepare_base=quantize_base, console=console, callbacks=callbacks, **options)


def block_job(recipe: BlockRecipe, model: CausalLM, *, resuming: bool) -> Job:
    """The `Job` of a recipe.

    Args:
        recipe: the settings.
        model: the base model, which may be sharded.
        resuming: not used: a head in `start_from` is read in any case, as it has the sizes.

    Raises:
        ConfigError: the settings do not fit the model.
    """
    model_class, shape, how = MODELS[recipe.kind]
    training = {name: getattr(recipe, name) for name in how} | {"seed": recipe.seed}
    if recipe.start_from is not None:
        head = model_class.from_pretrained(model, recipe.start_from, **training)
    else:
        options = {name: getattr(recipe, name) for name in shape} | {"boundaries": recipe.boundaries or None}
        with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(recipe.seed)
            try:
                head = model_class.from_base(model, **options, **training)
            except InputError as error:
                raise ConfigError(str(error)) from None
    return frozen_base_job(head, recipe.learning_rate, head.save_pretrained, draft_metrics)
