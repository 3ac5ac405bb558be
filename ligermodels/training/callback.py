"""Callbacks of the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ligermodels.training.renamed import warn
from ligermodels.training.reports import StepMetrics

Hook = tuple[int, Callable[[int], object]]
"""(n, function): the function is called with the number of the step every n steps, and after the last step."""


class Callback:
    """Base class of callbacks of `train`. Each method does nothing; a subclass overrides the methods that it needs.

    Examples:
        >>> class EarlyStopping(Callback):
        ...     every, best, worse = 100, float("inf"), False
        ...     def on_step_end(self, step):
        ...         loss = evaluate(model, validation_batches)
        ...         self.worse, self.best = loss > self.best, min(loss, self.best)
        ...     def should_stop(self):
        ...         return self.worse
    """

    every: int | None = None
    """Period of `on_step_end` in steps; None: it is not called."""

    def on_report(self, metrics: StepMetrics) -> None:
        """Called every `report_every` steps, before every `on_step_end`, and after the last step."""

    def on_step_end(self, step: int) -> None:
        """Called after every `every`-th step and after the last step. It may leave the model in evaluation mode."""

    def should_stop(self) -> bool:
        """Whether training ends after this step. Called after each step, and again after `on_step_end`, which may take
        long. All ranks must return the same value."""
        return False


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
