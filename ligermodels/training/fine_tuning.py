"""Fine-tuning of a whole language model or of LoRA on it, and pre-training from a config."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ligermodels.adapt.adapter import save_adapter, write_adapter
from ligermodels.adapt.lora import initialize_lora, lora_layers
from ligermodels.arguments import ExpertFormat
from ligermodels.errors import CheckpointError, CheckpointWarning, ConfigError, HubError, InputError, warn_caller
from ligermodels.models.causal_lm import CausalLM
from ligermodels.training.base import Base
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.console import Console, Outcome
from ligermodels.training.fine_tuning_recipe import FineTuningRecipe
from ligermodels.training.folder import CHECKPOINTS, RECIPE
from ligermodels.training.inputs import documents_of
from ligermodels.training.job import Job, RunOptions
from ligermodels.training.objectives import check_objective, objective_of, uses_reference
from ligermodels.training.prepare_base import prepare_lora
from ligermodels.training.reference import add_reference
from ligermodels.training.rewards import check_reward_fields
from ligermodels.training.run import JobKind
from ligermodels.training.run_plan import RunPlan
from ligermodels.training.run_state import end_with_turns

if TYPE_CHECKING:
    from typing_extensions import Unpack


def fine_tune(recipe: FineTuningRecipe, out: str | os.PathLike[str], **options: Unpack[RunOptions]) -> Outcome:
    """Train a language model by `recipe`. If its base is a config without weights, training starts from random weights.

    Args:
        recipe: the settings. With `lora_rank` the model is frozen and LoRA is trained.
        out: folder to write to: a Hugging Face checkpoint, or with `lora_rank` an adapter in PEFT's format.
        options: `device`, `attention`, `resume`, `overwrite`, `console` and `callbacks`: see `RunOptions`.

    Returns:
        The last step and the final evaluation, a `LossEvaluation`, or another with the metrics of the objective.

    Raises:
        ConfigError, InputError, CheckpointError, TrainingError, KeyboardInterrupt: see `run_job`.

    Examples:
        >>> recipe = FineTuningRecipe(base="Qwen/Qwen2.5-0.5B-Instruct", data="chats.jsonl", learning_rate=1e-5)
        >>> outcome = fine_tune(recipe, "tuned/", device="cuda")
        >>> outcome.evaluation.perplexity  # on the validation split
    """
    FineTuningRecipe.check_kind(recipe)
    check_objective(recipe, Path(out) if options.get("resume") else None)
    return KIND.train(recipe, out, **options)


def export_adapter(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    base: str | os.PathLike[str] | None = None,
    expert_format: ExpertFormat = "target_parameters",
    overwrite: bool = False,
) -> int:
    """Write the LoRA parameters of a checkpoint of a run as an adapter in PEFT's format, with the files that the run
    writes beside it. No weights of the base model are read.

    CheckpointWarning if the data of the run cannot be read, which says whether a turn of a chat ends a text.

    Args:
        run: folder of the run, which may still train, or have been stopped or killed.
        out: folder to write the adapter to.
        step: step of the checkpoint; None for the newest checkpoint that is complete.
        base: the base model, a folder or a hub id; None for the base in the run's recipe.
        expert_format: see `save_adapter`.
        overwrite: replace what is in `out`.

    Returns:
        The step of the checkpoint.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or `out` cannot be written.
        ConfigError: the run did not train LoRA.
        HubError: the base cannot be fetched from the hub.
    """
    folder = Path(run)
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    recipe = FineTuningRecipe.read(folder / RECIPE)
    if recipe.lora_rank is None:
        raise ConfigError(f"{folder / RECIPE}: lora_rank: is not set, so the run trains no adapter but the whole model")
    steps = checkpoints.steps()
    if not steps or step not in (None, *steps):
        name = "" if step is None else f" of step {step}"
        raise CheckpointError(f"{folder}: no checkpoint{name}; there are: {', '.join(map(str, steps)) or 'none'}")
    if step is None:
        newest = checkpoints.newest()
        step = steps[-1] if newest is None else newest[0]
    recipe = recipe if base is None else recipe.changed({"base": base})
    files = Base.find(recipe)
    load = partial(files.load, recipe, attention="auto", prepare=partial(prepare_lora, recipe))
    model = load(device="meta")
    _end_turns(recipe, files, model)
    tensors = checkpoints.parameters(step, model)
    if buffers := {mapping.target for mapping in model.modules_to_save} & dict(model.named_buffers()).keys():
        base_tensors = dict(load(device="cpu").named_buffers())  # a run does not train them
        tensors = {**tensors, **{name: base_tensors[name] for name in buffers}}
    options: dict[str, Any] = {"expert_format": expert_format, "overwrite": overwrite}
    write_adapter(model, lora_layers(model), tensors, out, modules=model.modules_to_save, **options)
    return step


def _end_turns(recipe: FineTuningRecipe, base: Base, model: CausalLM) -> None:
    """`end_with_turns` as in the run, for which the first lines of the data are read."""
    try:
        documents = documents_of(recipe.model_copy(update={"streaming": True}), base, lambda message: None)
        end_with_turns(recipe, model, documents, lambda message: None)
    except (CheckpointError, HubError, InputError) as error:
        warn_caller(
            f"generation_config.json: is as the base model's: whether the run has chats, whose turns then end a text, "
            f"is unknown: {error}",
            CheckpointWarning,
        )


def _before_training(plan: RunPlan, model: CausalLM, console: Console) -> None:
    recipe = cast(FineTuningRecipe, plan.recipe)
    if uses_reference(recipe):
        add_reference(plan, model, console)
    check_reward_fields(plan)


def _job(recipe: FineTuningRecipe, model: CausalLM, *, resuming: bool) -> Job:
    """See `JobFactory`. The loss is the loss of the recipe's objective."""
    layers = lora_layers(model)
    if layers:
        torch.manual_seed(recipe.seed)  # of the A matrices and of dropout
        initialize_lora(model)

    def save(folder: Path) -> None:
        if layers:
            save_adapter(model, folder, overwrite=True)
        else:
            model.save_pretrained(folder, overwrite=True)

    objective = objective_of(recipe, model)
    return Job(
        model=model,
        trainable=objective.trainable,
        learning_rates=[(model.parameters(), recipe.learning_rate)],
        output_metrics=objective.output_metrics,
        router_bias_update_rate=recipe.router_bias_update_rate,
        evaluate=objective.evaluate,
        export=save,
        reference=objective.reference,
        batches=objective.batches,
    )


KIND = JobKind(FineTuningRecipe, _job, prepare_lora, _before_training)
