"""Fine-tuning of a whole language model or of LoRA on it, and pre-training from a config."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ligermodels.adapt.adapter import save_adapter, write_adapter
from ligermodels.adapt.lora import add_lora, lora_layers
from ligermodels.data.batches import Batch
from ligermodels.errors import CheckpointError, ConfigError, arguments_named
from ligermodels.layers.initialization import whole_parameters
from ligermodels.models.causal_lm import CausalLM
from ligermodels.speculative.evaluation import evaluate, perplexity
from ligermodels.training.base import Base
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.fine_tuning_recipe import FineTuningRecipe
from ligermodels.training.folder import CHECKPOINTS, RECIPE
from ligermodels.training.loop import OutputMetrics, Trainable
from ligermodels.training.run import Console, Outcome, run_job


def fine_tune(
    recipe: FineTuningRecipe,
    out: str | os.PathLike[str],
    *,
    device: str = "cpu",
    attention: str = "auto",
    resume: bool = False,
    console: Console | None = None,
) -> Outcome:
    """Train a language model by `recipe` and write it to `out` as a Hugging Face checkpoint.

    Where the recipe's base is a config without weights, training starts from random ones. With `lora_rank`, only LoRA
    is trained, and `out` gets an adapter in PEFT's format.

    Arguments and errors are those of `run_job`; the outcome's evaluation is a `LossEvaluation`.
    """
    FineTuningRecipe.check_kind(recipe)
    return run_job(FineTuningJob, recipe, out, device=device, attention=attention, resume=resume, console=console)


def export_adapter(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    base: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> int:
    """Write the LoRA of a checkpoint of a run as an adapter in PEFT's format; returns its step.

    No weights of the base model are read.

    Args:
        run: the folder of the run, which may be going on, or have been stopped or killed.
        out, overwrite: as of `save_adapter`.
        step: of the checkpoint, by default of the newest that is whole.
        base: the base model, a folder or a hub id, by default the one in the run's recipe.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or `out` cannot be written.
        ConfigError: the run did not train LoRA.
        HubError: as `hub.resolve` for the base.
    """
    folder = Path(run)
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    recipe = FineTuningRecipe.read(folder / RECIPE)
    if recipe.lora_rank is None:
        raise ConfigError(f"{folder / RECIPE}: lora_rank: is not set, so the run trains no adapter but the whole model")
    steps = checkpoints.steps()
    if not steps or step not in (None, *steps):
        wanted = "" if step is None else f" of step {step}"
        raise CheckpointError(f"{folder}: no checkpoint{wanted}; there are: {', '.join(map(str, steps)) or 'none'}")
    if step is None:
        found = checkpoints.newest()
        step = steps[-1] if found is None else found[0]
    recipe = recipe if base is None else recipe.changed({"base": base})
    prepare = partial(FineTuningJob.prepare, recipe)
    model = Base.find(recipe).load(recipe, device="meta", attention="auto", prepare=prepare)
    tensors = checkpoints.parameters(step, model)
    write_adapter(model, lora_layers(model), tensors, out, overwrite=overwrite)
    return step


@dataclass(frozen=True)
class LossEvaluation:
    """The mean loss per target on the validation split, in nats."""

    loss: float

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond a float."""
        return perplexity(self.loss)

    def metrics(self) -> dict[str, float]:
        return {"loss": self.loss, "perplexity": self.perplexity}


class FineTuningJob:
    """A `Job`: see there. The loss is the model's: cross entropy, and a router's auxiliary loss."""

    @staticmethod
    def prepare(recipe: FineTuningRecipe, model: CausalLM) -> None:
        """Add LoRA, if the recipe trains it."""
        if recipe.lora_rank is not None:
            with arguments_named(r="lora_rank", target_modules="lora_targets"):
                add_lora(
                    model,
                    recipe.lora_rank,
                    lora_alpha=recipe.lora_alpha or 2 * recipe.lora_rank,
                    lora_dropout=recipe.lora_dropout,
                    target_modules=recipe.lora_targets or "all-linear",
                )

    def __init__(self, recipe: FineTuningRecipe, model: CausalLM, *, resuming: bool) -> None:
        self.model = model
        if layers := lora_layers(model):
            torch.manual_seed(recipe.seed)  # of the first A, and of dropout
            for layer in layers.values():
                with whole_parameters(layer, layer.lora_parameters()):
                    layer.init_weights()
        self.trainable: Trainable = model
        self.learning_rates: list[tuple[Iterator[nn.Parameter], float]] = [(model.parameters(), recipe.learning_rate)]

    def loss_options(self, step: int, steps: int) -> Mapping[str, Any]:
        return {}

    def output_metrics(self, out: Any) -> OutputMetrics:
        return OutputMetrics({} if out.aux_loss is None else {"aux_loss": out.aux_loss})

    def evaluate(self, batches: Callable[[], Iterable[Batch]]) -> LossEvaluation:
        return LossEvaluation(evaluate(self.model, batches()))

    def export(self, folder: Path) -> None:
        if lora_layers(self.model):
            save_adapter(self.model, folder, overwrite=True)
        else:
            self.model.save_pretrained(folder, overwrite=True)
