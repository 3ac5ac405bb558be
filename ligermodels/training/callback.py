"""Callbacks of the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ligermodels.training.renamed import warn
from ligermodels.training.reports import StepMetrics

Hook = tuple[int, Callable[[int], object]]
"""(n, function): the function is called with the number of the step every n steps, and after the last step."""


@dataclass(frozen=True)
class Event:
    """The argument of `on_step`, `on_evaluate` and `on_save`.

    step, steps: number of the step, from 1, and number of steps of the run.
    model: the model that the loop trains; for fine-tuning the `CausalLM`.
    metrics: values by name. For `on_step`: `loss` and `grad_norm`, scalar tensors on the model's device, and
        `learning_rate`, a float; with several ranks `loss` is this rank's part of the sum. For `on_evaluate`: the
        metrics of the validation split, such as `loss`, as floats or lists of floats. For `on_save`: empty.
    folder: for `on_save`, the folder of the checkpoint; otherwise None.
    """

    step: int
    steps: int
    model: Any
    metrics: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None


class Callback:
    """Base class of callbacks of a run (`fine_tune`, `train_heads`, `train_mtp`) and of the loop alone (`train`).

    Each method does nothing; a subclass overrides the methods that it needs. All ranks call the methods. The loop alone
    neither evaluates nor saves: there `on_evaluate` and `on_save` are not called.

    Examples:
        >>> class StopAtLoss(Callback):
        ...     def on_evaluate(self, event):
        ...         self.stop = event.metrics["loss"] < 1.5
        >>> fine_tune(recipe, "out/", callbacks=[StopAtLoss()])
    """

    every: int | None = None
    """Period of `on_step_end` in steps; None: it is not called."""

    stop: bool = False
    """Set it to True in any method to end training after the current step. All ranks must set the same value."""

    def on_step(self, event: Event) -> None:
        """Called after every step, when the GPU may still compute it: reading a tensor of `event.metrics` waits for the
        GPU. Metrics that wait for nothing come with `on_report`."""

    def on_report(self, metrics: StepMetrics) -> None:
        """Called every `report_every` steps, before every `on_step_end`, and after the last step."""

    def on_step_end(self, step: int) -> None:
        """Called after every `every`-th step and after the last step. It may leave the model in evaluation mode."""

    def on_evaluate(self, event: Event) -> None:
        """Called after each evaluation on the validation split."""

    def on_save(self, event: Event) -> None:
        """Called when a checkpoint is complete on the disk. It is written while training continues, so the model may
        have taken further steps."""

    def should_stop(self) -> bool:
        """Whether training ends after this step: by default `stop`. Called after each step, and again after
        `on_step_end`, which may take long. All ranks must return the same value."""
        return self.stop

    def state_dict(self) -> dict[str, Any]:
        """Values of JSON types that a checkpoint keeps; by default none. Called on rank 0."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values that `state_dict` returned. Called when a run resumes, if it returned any."""


def is_due(step: int, every: int | None, steps: int) -> bool:
    """Whether `step` of `steps` is a multiple of the period `every`, or the last step; never for a period of None."""
    return every is not None and (step == steps or step % every == 0)


def callbacks_of(
    on_step: Callable[[StepMetrics], object] | None, hooks: Sequence[Hook], stop: Callable[[], bool] | None
) -> Iterator[Callback]:
    """Callbacks from the functions that `train` accepts in their place.

    Args:
        on_step: called with each report.
        hooks: periods and functions for `on_step_end`; deprecated.
        stop: called for `should_stop`; deprecated.
    """
    if on_step is not None:
        yield _callback(on_report=on_step)
    for every, function in hooks:
        warn("train(hooks=)", "callbacks=", stacklevel=5)
        yield _callback(every=every, on_step_end=function)
    if stop is not None:
        warn("train(stop=)", "callbacks=", stacklevel=5)
        yield _callback(should_stop=stop)


def _callback(**members: Any) -> Callback:
    callback = Callback()
    vars(callback).update(members)  # attributes of the instance take precedence over the methods of its class
    return callback
