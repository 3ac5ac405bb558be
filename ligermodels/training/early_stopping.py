"""Early stopping, and the checkpoint with the lowest validation loss, or the highest validation reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ligermodels.arguments import check_count, check_number
from ligermodels.errors import InputError
from ligermodels.training.callback import Callback, Event

METRICS = {"loss": 1.0, "reward": -1.0}
"""Metrics of evaluations -> their sign as a loss. The first of them that an evaluation has is compared."""


class Best:
    """The lowest validation loss so far, and its step; None before the first evaluation. NaN is never the lowest. For
    objectives that are evaluated by rewards the loss is the negative reward."""

    def __init__(self) -> None:
        self.loss: float | None = None
        self.step: int | None = None

    def improves(self, event: Event, by: float = 0.0) -> bool:
        """Whether the loss is lower than before by more than `by`. Keeps the loss if it is lower at all."""
        name = next((name for name in METRICS if name in event.metrics), None)
        if name is None:
            raise InputError(
                f"early_stopping_patience, load_best_model_at_end: compare the metric 'loss' of evaluations, and there "
                f"are only {', '.join(event.metrics) or 'none'}"
            )
        loss, best = METRICS[name] * event.metrics[name], self.loss
        if best is None or loss < best:
            self.loss, self.step = (loss, event.step) if loss == loss else (None, None)
        return self.loss is not None if best is None else best - loss > by


class EarlyStopping(Callback):
    """Ends training after `patience` evaluations in a row without a lower validation loss.

    Args:
        patience: number of evaluations, at least 1.
        threshold: a loss that is not lower than the best by more than this is no improvement. Default: 0.

    Raises:
        InputError: a number is out of range.

    Examples:
        >>> fine_tune(recipe.changed({"evaluate_every": 100}), "out/", callbacks=[EarlyStopping(3)])
    """

    def __init__(self, patience: int, threshold: float = 0.0) -> None:
        self.patience, self.threshold = check_count("patience", patience), check_number("threshold", threshold)
        self._best, self._count = Best(), 0

    def on_evaluate(self, event: Event) -> None:
        """Count evaluations without an improvement."""
        self._count = 0 if self._best.improves(event, self.threshold) else self._count + 1

    def should_stop(self) -> bool:
        """Whether there were `patience` evaluations without an improvement."""
        return self._count >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """The best loss, its step, and the number of evaluations since the last improvement."""
        return {**vars(self._best), "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state back. The patience of this object stays: it may have changed."""
        self._best.loss, self._best.step, self._count = state["loss"], state["step"], state["count"]


class BestCheckpoint(Callback):
    """Keeps the checkpoint with the lowest validation loss.

    Args:
        keep: called with the step of each new best evaluation; it writes the checkpoint, and keeps it.
        since: step that the run resumes from; evaluations before it are not known. A state that is loaded replaces it.
    """

    def __init__(self, keep: Callable[[int], object], since: int = 0) -> None:
        self.best, self._keep, self.since = Best(), keep, since

    def on_evaluate(self, event: Event) -> None:
        """Keep the checkpoint of this step if its loss is the lowest."""
        if self.best.improves(event):
            self._keep(event.step)

    def state_dict(self) -> dict[str, Any]:
        """The best loss and its step, and the step of the first evaluations that were compared."""
        return {**vars(self.best), "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state back."""
        self.best.loss, self.best.step, self.since = state["loss"], state["step"], state.get("since", 0)
