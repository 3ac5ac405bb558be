"""Fine-tuning of a whole language model, and pre-training from a config."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ligermodels.archs.causal_lm import CausalLM
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

    Where the recipe's base is a config without weights, training starts from random ones.

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
        # Which parameters are trained is decided here, by requires_grad and learning rates; what is written, in
        # `export`. An adapter changes these two alone.
        self.model = model
        self.trainable: Trainable = model
        self.learning_rates: list[tuple[Iterator[nn.Parameter], float]] = [(model.parameters(), recipe.learning_rate)]

    def loss_options(self, step: int, steps: int) -> Mapping[str, Any]:
        return {}

    def output_metrics(self, out: Any) -> OutputMetrics:
        return OutputMetrics({} if out.aux_loss is None else {"aux_loss": out.aux_loss})

    def evaluate(self, batches: Callable[[], Iterable[Batch]]) -> LossEvaluation:
        return LossEvaluation(evaluate(self.model, batches()))

    def export(self, folder: Path) -> None:
        self.model.save_pretrained(folder, overwrite=True)
