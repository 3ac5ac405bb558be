"""The interface between a run, which is the same for every kind of training, and the job: what is trained, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import nn

from ligermodels.data.batches import Batch
from ligermodels.models.causal_lm import CausalLM
from ligermodels.training.loop import OutputMetrics, Trainable, Value
from ligermodels.training.recipe import TrainingRecipe

R = TypeVar("R", bound=TrainingRecipe, contravariant=True)


class Evaluation(Protocol):
    """Results on the validation split."""

    def metrics(self) -> Mapping[str, Value]:
        """Values for metrics.jsonl, by name."""


class Job(Protocol):
    """What a run trains, evaluates and exports."""

    @property
    def model(self) -> nn.Module:
        """Its parameters that require gradients are saved in checkpoints."""

    @property
    def trainable(self) -> Trainable:
        """What the loop calls for the loss."""

    @property
    def learning_rates(self) -> Sequence[tuple[Iterable[nn.Parameter], float]]:
        """Parameters to train, with their peak learning rate."""

    def loss_options(self, step: int, steps: int) -> Mapping[str, Any]:
        """Further arguments of the loss in `step` of `steps`."""

    def output_metrics(self, out: Any) -> OutputMetrics:
        """What to log of an output of `trainable`."""

    def evaluate(self, batches: Callable[[], Iterable[Batch]]) -> Evaluation:
        """Evaluate on the validation split; each call of `batches` gives all of it, or of several ranks this one's
        share: the functions of `speculative.evaluation` sum over the ranks."""

    def export(self, folder: Path) -> None:
        """Write the result of the training."""


class JobFactory(Protocol[R]):
    """Makes the job of a recipe from its base model, which may be sharded. With `resuming`, a checkpoint overwrites the
    trained parameters afterwards, so nothing else need be loaded into them.

    One that changes the modules of the base model does so in an attribute `prepare(recipe, model)`, which is called
    while that is on the meta device, before it is sharded and loaded."""

    def __call__(self, recipe: R, model: CausalLM, *, resuming: bool) -> Job: ...
