"""Training of multi-token prediction: a head on a frozen model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ligermodels.convert import hub
from ligermodels.data.batches import Batch
from ligermodels.errors import ConfigError
from ligermodels.models.causal_lm import CausalLM
from ligermodels.speculative.evaluation import evaluate_heads
from ligermodels.speculative.mtp import MTPModel
from ligermodels.speculative.mtp_files import holds_head, stored_layers
from ligermodels.training.heads import HeadsEvaluation, head_metrics
from ligermodels.training.loop import Trainable
from ligermodels.training.mtp_recipe import NEW, MTPRecipe
from ligermodels.training.run import Console, Outcome, run_job


def train_mtp(
    recipe: MTPRecipe,
    out: str | os.PathLike[str],
    *,
    device: str = "cpu",
    attention: str = "auto",
    resume: bool = False,
    console: Console | None = None,
) -> Outcome:
    """Train a head of multi-token prediction by `recipe` and write it to `out`: alone, or in its model's checkpoint.

    Arguments and errors are those of `run_job`; the outcome's evaluation is a `HeadsEvaluation`.
    """
    MTPRecipe.check_kind(recipe)
    return run_job(MTPJob, recipe, out, device=device, attention=attention, resume=resume, console=console)


class MTPJob:
    """A `Job`: see there. Raises as `MTPModel.from_pretrained` for the head that the recipe starts from."""

    output_metrics = staticmethod(head_metrics)

    def __init__(self, recipe: MTPRecipe, model: CausalLM, *, resuming: bool) -> None:
        self.recipe, start = recipe, recipe.start_from
        options: dict[str, Any] = {"num_steps": recipe.num_steps, "decay": recipe.decay}
        if start is None:
            source = None if model.export_spec is None else model.export_spec.source
            start = NEW if source is None or not holds_head(model, source.folder) else str(source.folder)
        found = 0 if start == NEW else stored_layers(model, hub.resolve(start))
        if found and recipe.num_layers not in (None, found):
            raise ConfigError(f"num_layers: is {recipe.num_layers}, but the head to start from, {start}, has {found}")
        if start == NEW or resuming:
            options["num_layers"] = found or recipe.num_layers or 1
            with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
                torch.manual_seed(recipe.seed)
                self.model = MTPModel.from_base(model, **options)
        else:
            self.model = MTPModel.from_pretrained(model, start, **options)
        layers, steps = self.model.head.num_layers, self.model.num_heads
        if steps < layers:
            raise ConfigError(f"num_steps: {steps} steps do not reach all of the head's {layers} layers; give {layers}")
        if recipe.seq_len < steps + 2:
            raise ConfigError(f"seq_len: must be at least {steps + 2} for {steps} steps, got {recipe.seq_len}")
        self.trainable: Trainable = self.model
        self.learning_rates = [(self.model.head_parameters(), recipe.learning_rate)]

    def loss_options(self, step: int, steps: int) -> Mapping[str, Any]:
        return {}

    def evaluate(self, batches: Callable[[], Iterable[Batch]]) -> HeadsEvaluation:
        return HeadsEvaluation(evaluate_heads(self.model, batches()))

    def export(self, folder: Path) -> None:
        if self.recipe.write == "checkpoint":
            self.model.save_pretrained(folder, overwrite=True)
        else:
            self.model.save_head(folder, overwrite=True)
