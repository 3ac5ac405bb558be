"""The callbacks of a run: reports, checkpoints and evaluations. `AgreedStop` ends it after a signal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ligermodels.training.callback import Callback
from ligermodels.training.interruption import Interrupted
from ligermodels.training.job import Evaluation
from ligermodels.training.metrics import Metrics, evaluation_note, progress_note
from ligermodels.training.reports import StepMetrics
from ligermodels.training.run_state import RunState


class Report(Callback):
    """Moves the progress bar and writes metrics.jsonl."""

    def __init__(self, metrics: Metrics, update: Callable[..., None]) -> None:
        self._metrics, self._update = metrics, update

    def on_report(self, metrics: StepMetrics) -> None:
        self._update(metrics.step, metrics.steps, progress_note(metrics))
        self._metrics.write_report(metrics)


class SaveCheckpoint(Callback):
    """Writes a checkpoint every `every` steps."""

    def __init__(self, state: RunState, every: int) -> None:
        self.every, self._state, self._targets = every, state, state.plan.targets

    def on_report(self, metrics: StepMetrics) -> None:
        self._targets = metrics.targets

    def on_step_end(self, step: int) -> None:
        self._state.save(step, self._targets)


class Validate(Callback):
    """Evaluates every `every` steps, writes metrics.jsonl and prints the metrics. A signal abandons the evaluation."""

    def __init__(
        self, metrics: Metrics, every: int, evaluate: Callable[[], Evaluation], say: Callable[[str], object]
    ) -> None:
        self.every, self._metrics, self._evaluate, self._say = every, metrics, evaluate, say
        self.evaluations: dict[int, Evaluation] = {}
        """Step -> its evaluation."""

    def on_step_end(self, step: int) -> None:
        with suppress(Interrupted):
            self.evaluations[step] = self._evaluate()
            values = self.evaluations[step].metrics()
            self._metrics.write_evaluation(step, values)
            self._say(evaluation_note(step, values))
