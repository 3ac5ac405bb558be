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
    evaluation: the final evaluation; None without a validation split, or if the run was stopped.
    stopped: whether a signal ended the run, even after the last step.
    """

    step: int
    steps: int
    evaluation: Any = None
    stopped: bool = False

    @property
    def finished(self) -> bool:
        """Whether the run is complete and the result written."""
        return self.step == self.steps and not self.stopped
