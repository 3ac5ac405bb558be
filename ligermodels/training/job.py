"""The interface between a run, which is the same for every kind of training, and its job: the model and its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict, TypeVar

import torch
from torch import nn

from ligermodels.adapt.float8 import float8
from ligermodels.adapt.quantize import quantize
from ligermodels.data.batches import Batch
from ligermodels.data.packing import Prefetcher
from ligermodels.errors import arguments_named
from ligermodels.models.causal_lm import CausalLM
from ligermodels.ops import Float8Recipe
from ligermodels.training.callback import Callback
from ligermodels.training.recipe import TrainingRecipe
from ligermodels.training.reports import OutputMetrics, Value
from ligermodels.training.step import Trainable

if TYPE_CHECKING:
    from ligermodels.training.console import Console
    from ligermodels.training.run_plan import RunPlan

R = TypeVar("R", bound=TrainingRecipe, contravariant=True)


class BatchSource(Protocol):
    """Micro-batches of this rank, without end. Their state can be saved between steps, and loaded before the first."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Evaluation(Protocol):
    """Results on the validation split."""

    def metrics(self) -> Mapping[str, Value]:
        """Values for metrics.jsonl, by name."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model to train, evaluate and export.

    model: its parameters that require gradients are saved in checkpoints.
    trainable: called by the loop for the loss; usually the model itself.
    learning_rates: iterators of parameters to train, such as `model.parameters()`, each with its peak learning rate.
        They are read after the model has been sharded.
    evaluate: evaluates on the validation split. Each call of its argument returns all batches of the split, or, of
        several ranks, the batches of this rank; the functions in `ligermodels.evaluation` sum over the ranks.
    export: writes the result of the training to a folder.
    loss_options: further arguments of the loss, by step and number of steps.
    output_metrics: metrics to log, from an output of `trainable`.
    router_bias_update_rate: see `train`.
    reference: a second, frozen model that the run holds: a teacher, or the model before training; None without one.
    batches: the micro-batches of `trainable`, from those of the data.
    validation_batch_size: rows of a batch of the validation split; None for those of a micro-batch.
    """

    model: nn.Module
    trainable: Trainable
    learning_rates: Sequence[tuple[Iterable[nn.Parameter], float]]
    evaluate: Callable[[Callable[[], Iterable[Batch]]], Evaluation]
    export: Callable[[Path], object]
    loss_options: Callable[[int, int], Mapping[str, Any]] = lambda step, steps: {}
    output_metrics: Callable[[Any], OutputMetrics] = lambda out: OutputMetrics()
    router_bias_update_rate: float = 0.0
    reference: CausalLM | None = None
    batches: Callable[[Prefetcher], BatchSource] = lambda prefetcher: prefetcher
    validation_batch_size: int | None = None


class RunOptions(TypedDict, total=False):
    """Keyword arguments of `run_job`, and of the functions that train by a recipe, such as `fine_tune`.

    device: device of the model, such as "cpu" or "cuda", the GPU of the process. Default: None, the GPU if there is
        one, else the CPU.
    attention: attention backend of the model. Default: "auto".
    resume: continue from the newest checkpoint in the output folder, if there is one; otherwise `console` says that the
        run starts at step 1. Default: False.
    overwrite: replace what is in the output folder: an earlier run, or another model. Default: False, that is an error.
        With `resume` it has no effect on a run that has a checkpoint.
    console: where messages and progress go. Default: None, nowhere.
    callbacks: called after steps, evaluations and checkpoints, before the callbacks that the recipe names: see
        `Callback`. Default: none.
    """

    device: str | None
    attention: str
    resume: bool
    overwrite: bool
    console: Console | None
    callbacks: Sequence[Callback]


class JobFactory(Protocol[R]):
    """Makes the job of a recipe from its base model, which may be sharded. With `resuming`, a checkpoint overwrites the
    trained parameters afterwards, so there is no need to load values into them."""

    def __call__(self, recipe: R, model: CausalLM, *, resuming: bool) -> Job: ...


BeforeTraining: TypeAlias = "Callable[[RunPlan, Any, Console], object]"
"""Called with the plan, the job's model and the console, before a checkpoint is loaded. The model is sharded, and has
the parameters of the base."""

Prepare: TypeAlias = Callable[[R, CausalLM], object]
"""Changes the modules of the base model while it is on the meta device, before it is sharded and loaded."""


def prepare_model(recipe: TrainingRecipe, prepare_base: Prepare[Any] | None, model: CausalLM) -> None:
    """Change the modules of the base model by `prepare_base`, if given, and to float8 if the recipe says so."""
    if prepare_base is not None:
        prepare_base(recipe, model)
    if recipe.float8:
        gradients = {"e5m2": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}[recipe.float8_gradients]
        with arguments_named(exclude="float8_exclude"):
            float8(model, Float8Recipe(gradient_dtype=gradients), exclude=recipe.float8_exclude)


def quantize_base(recipe: Any, model: CausalLM) -> None:
    """Quantise the weights of the base model by the settings `quantize` and `quantize_exclude` of a recipe."""
    if recipe.quantize is not None:
        with arguments_named(exclude="quantize_exclude"):
            quantize(model, recipe.quantize, exclude=recipe.quantize_exclude)
