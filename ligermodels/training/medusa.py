"""Medusa training: heads on a frozen model (stage 1), or heads and model together (stage 2)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ligermodels.data.batches import Batch
from ligermodels.errors import ConfigError
from ligermodels.models.causal_lm import CausalLM
from ligermodels.speculative.evaluation import evaluate_heads, evaluate_kl
from ligermodels.speculative.joint import JointMedusa, frozen_copy
from ligermodels.speculative.medusa import MedusaModel
from ligermodels.training.heads import HeadsEvaluation, head_metrics
from ligermodels.training.loop import Trainable
from ligermodels.training.medusa_recipe import MedusaRecipe
from ligermodels.training.run import Console, Outcome, run_job

WEIGHT_ARGUMENT = "heads_loss_weight"
"""Argument of `JointMedusa`'s forward for the recipe's heads_loss_weight."""


def train_heads(
    recipe: MedusaRecipe,
    out: str | os.PathLike[str],
    *,
    device: str = "cpu",
    attention: str = "auto",
    resume: bool = False,
    console: Console | None = None,
) -> Outcome:
    """Train Medusa heads by `recipe` and write them to `out`; in stage 2 the model too, as one Hugging Face checkpoint.

    Arguments and errors are those of `run_job`; the outcome's evaluation is a `HeadsEvaluation`.
    """
    MedusaRecipe.check_kind(recipe)
    return run_job(MedusaJob, recipe, out, device=device, attention=attention, resume=resume, console=console)


class MedusaJob:
    """A `Job`: see there. Raises ConfigError when the heads in `start_from` are not of the recipe's shape."""

    output_metrics = staticmethod(head_metrics)

    def __init__(self, recipe: MedusaRecipe, model: CausalLM, *, resuming: bool) -> None:
        self.recipe = recipe
        if recipe.start_from is None or resuming:
            self.model = MedusaModel.from_base(model, recipe.num_heads, recipe.num_layers, recipe.lm_head, recipe.decay)
        else:
            own = recipe.lm_head == "own"
            self.model = MedusaModel.from_pretrained(model, recipe.start_from, decay=recipe.decay, own_lm_heads=own)
            found = (self.model.shape.num_heads, self.model.shape.num_layers, self.model.lm_head)
            if found != (recipe.num_heads, recipe.num_layers, recipe.lm_head):
                raise ConfigError(f"start_from: num_heads, num_layers and lm_head there are {found}, not the recipe's")
        self.trainable: Trainable = self.model
        self.reference: CausalLM | None = None
        self.learning_rates: list[tuple[Iterator[nn.Parameter], float]]
        if recipe.stage == 1:
            self.learning_rates = [(self.model.head_parameters(), recipe.learning_rate)]
            return
        if recipe.distill or recipe.kl_to_reference:
            self.reference = frozen_copy(model, "cpu_offload" if recipe.reference == "cpu_offload" else "device")
        self.trainable = JointMedusa(self.model, self.reference if recipe.distill else None)
        heads_rate = recipe.learning_rate * recipe.head_lr_multiplier
        self.learning_rates = [(model.parameters(), recipe.learning_rate), (self.model.head_parameters(), heads_rate)]

    def loss_options(self, step: int, steps: int) -> Mapping[str, Any]:
        return {} if self.recipe.stage == 1 else {WEIGHT_ARGUMENT: self.recipe.heads_loss_weight_at(step, steps)}

    def evaluate(self, batches: Callable[[], Iterable[Batch]]) -> HeadsEvaluation:
        scores = evaluate_heads(self.model, batches())
        kl = evaluate_kl(self.model.base, self.reference, batches()) if self.reference is not None else None
        return HeadsEvaluation(scores, kl)

    def export(self, folder: Path) -> None:
        if self.recipe.stage == 2:
            self.model.export(folder, "full-hf", overwrite=True)
        else:
            self.model.save_pretrained(folder, overwrite=True)
