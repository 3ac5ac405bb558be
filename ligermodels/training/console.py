"""Where a run reports to, and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Console:
    """Where a run reports. By default nothing is shown.

    say: called with each message.
    progress: makes a progress bar: a context manager for a title; its value is called with the amount done, the total
        and a note.
    """

    say: Callable[[str], object] = lambda message: None
    progress: Callable[..., AbstractContextManager[Callable[..., None]]] = lambda title, **_: nullcontext(
        lambda *_: None
    )


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    step, steps: the last step taken, and the number of steps of the run.
    evaluation: the evaluation of the model that was written; None without a validation split, or if a signal ended the
        run.
    stopped: whether a signal ended the run, even after the last step.
    stopped_early: whether a callback, such as early stopping, ended the run before the last step. The result is
        written.
    best_step: the step of the best checkpoint, if that is what was written; otherwise None.
    """

    step: int
    steps: int
    evaluation: Any = None
    stopped: bool = False
    stopped_early: bool = False
    best_step: int | None = None

    @property
    def finished(self) -> bool:
        """Whether the run is complete and the result written."""
        return (self.step == self.steps or self.stopped_early) and not self.stopped
