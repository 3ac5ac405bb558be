"""The callbacks of a run: reports, checkpoints, evaluations, and the callbacks of the recipe and of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ligermodels.training.callback import Callback, Event, is_due, restore_states, states_of
from ligermodels.training.early_stopping import METRICS, BestCheckpoint, EarlyStopping
from ligermodels.training.interruption import AgreedStop, Interrupted
from ligermodels.training.job import Evaluation
from ligermodels.training.metrics import Metrics, evaluation_note, progress_note
from ligermodels.training.reports import StepMetrics, Value
from ligermodels.training.run_state import RunState


class Events:
    """Tells the callbacks of a run about evaluations and checkpoints.

    `callbacks` are called in this order. `evaluated` is the step of the last evaluation that they were told about.
    """

    def __init__(self, steps: int, model: Any) -> None:
        self.callbacks: Sequence[Callback] = ()
        self.evaluated = 0
        self._event = partial(Event, steps=steps, model=model)

    def evaluation(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Call `on_evaluate`."""
        self.evaluated = step
        for callback in self.callbacks:
            callback.on_evaluate(self._event(step, metrics=metrics))

    def checkpoint(self, step: int, folder: Path) -> None:
        """Call `on_save`."""
        for callback in self.callbacks:
            callback.on_save(self._event(step, folder=folder))

    def state_dict(self) -> dict[str, Any]:
        """Values for run.json: the states of the callbacks."""
        return {"callbacks": states_of(self.callbacks), "evaluated": self.evaluated}

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Take a state back. Returns the names of callbacks that only the state has, and that only the run has."""
        self.evaluated = state.get("evaluated", 0)
        return restore_states(self.callbacks, state.get("callbacks", {}))


class Report(Callback):
    """Moves the progress bar and writes metrics.jsonl."""

    def __init__(self, metrics: Metrics, update: Callable[..., None]) -> None:
        self._metrics, self._update = metrics, update

    def on_report(self, metrics: StepMetrics) -> None:
        self._update(metrics.step, metrics.steps, progress_note(metrics))
        self._metrics.write_report(metrics)


class SaveCheckpoint(Callback):
    """Writes a checkpoint every `every` steps, and tells `events` when it is complete."""

    def __init__(self, state: RunState, every: int, events: Events) -> None:
        self.every, self._state, self._targets, self._events = every, state, state.plan.targets, events
        self._saved, self._pending = state.plan.start, 0

    def on_step(self, event: Event) -> None:
        if self._pending and not self._state.ranks.together and self._state.checkpoints.is_written():
            self.complete()

    def on_report(self, metrics: StepMetrics) -> None:
        self._targets, ranks = metrics.targets, self._state.ranks
        # Several ranks agree, where they wait for one another anyway: `on_save` may call a collective.
        if self._pending and ranks.together and all(ranks.gather(self._state.checkpoints.is_written())):
            self.complete()

    def on_step_end(self, step: int) -> None:
        """Start to write the checkpoint of `step`, unless it has been."""
        if step != self._saved:
            self.complete()
            self._state.save(step, self._targets, self._events.state_dict())
            self._saved = self._pending = step

    def keep(self, step: int) -> None:
        """Write the checkpoint of `step` and keep it, in place of the one that was kept before."""
        self._state.checkpoints.kept = {step}
        self.on_step_end(step)

    def complete(self) -> None:
        """Wait for the checkpoint in progress. Raises CheckpointError if it could not be written."""
        pending, self._pending = self._pending, 0
        self._state.checkpoints.wait()
        if pending:
            self._events.checkpoint(pending, self._state.checkpoints.path(pending))


class Validate(Callback):
    """Evaluates every `every` steps, writes metrics.jsonl and prints the metrics. A signal abandons the evaluation."""

    def __init__(
        self,
        metrics: Metrics,
        every: int,
        evaluate: Callable[[], Evaluation],
        say: Callable[[str], object],
        events: Events,
    ) -> None:
        self.every, self._metrics, self._evaluate, self._say, self._events = every, metrics, evaluate, say, events
        self.evaluations: dict[int, Evaluation] = {}
        """Step -> its evaluation."""

    def on_step_end(self, step: int) -> None:
        with suppress(Interrupted):
            self.evaluations[step] = self._evaluate()
            values = self.evaluations[step].metrics()
            self._metrics.write_evaluation(step, values)
            self._say(evaluation_note(step, values))
            self._events.evaluation(step, values)


class RunCallbacks:
    """The callbacks of a run. `all` has them in the order of their calls.

    Args:
        state: the run, at the step that it starts or resumes from.
        metrics: metrics.jsonl and trackers.
        update: moves the progress bar.
        stop: ends the run after a signal.
        callbacks: the callbacks of the user.
        lm_eval: evaluates tasks of lm-eval; None: not.
    """

    def __init__(
        self,
        state: RunState,
        metrics: Metrics,
        update: Callable[..., None],
        stop: AgreedStop,
        callbacks: Sequence[Callback],
        lm_eval: Any = None,
    ) -> None:
        plan, recipe, say = state.plan, state.plan.recipe, state.console.say
        self.events, self._metrics, self._state = Events(plan.steps, state.job.model), metrics, state
        self.save = SaveCheckpoint(state, recipe.checkpoint_every or plan.steps, self.events)
        evaluate = partial(state.evaluate, stop.should_stop)
        every = recipe.evaluate_every or plan.steps
        self.validate = Validate(metrics, every, evaluate, say, self.events)
        self.best = BestCheckpoint(self.save.keep, since=plan.start)
        # A checkpoint has the states of the user's callbacks after its step. It comes before the evaluation, so that a
        # failed evaluation loses nothing. The best checkpoint comes last: it has the states after the evaluation.
        self.all: list[Callback] = [Report(metrics, update), *callbacks, self.save]
        if plan.has_validation:
            self.all.append(self.validate)
        self._lm_eval = lm_eval
        if lm_eval is not None:
            parts = {"write": metrics.write, "say": say, "stop": stop.should_stop}
            lm_eval.attach(state.job.model, plan.base.tokenizer, **parts)
            self.all.append(lm_eval)
        if recipe.early_stopping_patience is not None:
            self.all.append(EarlyStopping(recipe.early_stopping_patience, recipe.early_stopping_threshold))
        if recipe.load_best_model_at_end:
            self.all.append(self.best)
        self.all.append(stop)
        self.events.callbacks = self.all
        gone, new = self.events.load_state_dict(plan.checkpoint)
        for name in gone:
            say(f"callbacks: the checkpoint has a state of {name}, which the run does not have now")
        for name in new if plan.resumes else ():
            say(
                f"callbacks: the checkpoint has no state of {name}, which begins at step {plan.start:,}: steps and "
                "evaluations before it do not count"
            )

    def resume(self) -> None:
        """Complete the evaluations of the step to resume from, where the run was stopped before they were."""
        plan = self._state.plan
        start, steps = plan.start, plan.steps
        if not start:
            return
        values, names = self._state.ranks.from_first("metrics", lambda: (self._metrics.evaluation, self._metrics.names))
        if METRICS.keys().isdisjoint(values):  # it was NaN, which is not in the file: evaluate again
            values = {}
        if values and self.events.evaluated < start:
            self.events.evaluation(start, values)
        elif plan.has_validation and not values and is_due(start, self.validate.every, steps):
            self.validate.on_step_end(start)
        if self._lm_eval is not None:
            if any(name.startswith("lm_eval/") for name in names):
                self._lm_eval.evaluated.add(start)
            elif start < steps and is_due(start, self._lm_eval.every, steps):
                self._lm_eval.on_step_end(start)

    def evaluate_last(self, step: int) -> None:
        """Evaluate after the last step, if a callback ended the run there and no evaluation was due."""
        if self._state.plan.has_validation and self.events.evaluated != step:
            self.validate.on_step_end(step)

    def evaluate_result(self, step: int) -> None:
        """Evaluate the tasks of lm-eval on the result, the model of `step`, unless that has been done."""
        if self._lm_eval is not None and step not in self._lm_eval.evaluated:
            self._lm_eval.on_step_end(step)

    def should_stop(self) -> bool:
        """Whether a callback ends the run now."""
        return any([callback.should_stop() for callback in self.all])  # a list: every callback is asked
