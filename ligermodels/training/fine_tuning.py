"""Fine-tuning of a whole language model or of LoRA on it, and pre-training from a config."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ligermodels.archs.adapter import save_adapter
from ligermodels.archs.causal_lm import CausalLM
from ligermodels.archs.lora import add_lora, lora_layers
from ligermodels.data.batches import Batch
from ligermodels.speculative.evaluation import evaluate
from ligermodels.training.fine_tuning_recipe import FineTuningRecipe
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
    return run_job(FineTuningJob, recipe, out, device=device, attention=attention, resume=resume, console=console)


@dataclass(frozen=True)
class LossEvaluation:
    """The mean loss per target on the validation split, in nats."""

    loss: float

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond a float."""
        return math.inf if self.loss > 700 else math.exp(self.loss)

    def metrics(self) -> dict[str, float]:
        return {"loss": self.loss, "perplexity": self.perplexity}


class FineTuningJob:
    """A `Job`: see there. The loss is the model's: cross entropy, and a router's auxiliary loss."""

    def __init__(self, recipe: FineTuningRecipe, model: CausalLM, *, resuming: bool) -> None:
        self.model = model
        if recipe.lora_rank is not None:
            torch.manual_seed(recipe.seed)  # of the first A, and of dropout
            add_lora(
                model,
                recipe.lora_rank,
                lora_alpha=recipe.lora_alpha or 2 * recipe.lora_rank,
                lora_dropout=recipe.lora_dropout,
                target_modules=recipe.lora_targets or "all-linear",
            )
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
