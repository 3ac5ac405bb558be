"""Callbacks of the training loop; those of users, as objects or by import path, and their states in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from inspect import isfunction, signature
from pathlib import Path
from typing import Any

from ligermodels.arguments import check_count, nearest
from ligermodels.errors import BackendError, ConfigError, InputError, short, warn_caller
from ligermodels.training.import_path import imported
from ligermodels.training.renamed import warn
from ligermodels.training.reports import StepMetrics

Hook = tuple[int, Callable[[int], object]]
"""(n, function): the function is called with the number of the step every n steps, and after the last step."""


@dataclass(frozen=True)
class Event:
    """The argument of `on_step`, `on_evaluate` and `on_save`.

    step, steps: number of the step, from 1, and number of steps of the run.
    model: the model that is trained: for fine-tuning, by any objective, the `CausalLM`; for draft heads the model with
        its heads.
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
    """Base class of callbacks of a run (`fine_tune`, `train_heads` and so on) and of the loop alone (`train`).

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

    def __init_subclass__(cls, **options: Any) -> None:
        """Warn of methods on_... that no run calls: a typing error, or a method of another library's callbacks."""
        super().__init_subclass__(**options)
        known = [name for name in vars(Callback) if name.startswith("on_")]
        for name in sorted(vars(cls)):
            if name.startswith("on_") and not hasattr(Callback, name):
                message = f"{cls.__name__}.{name}: is never called; runs call {', '.join(known)}{nearest(name, known)}"
                warn_caller(message, UserWarning)

    def on_step(self, event: Event) -> None:
        """Called after every step, when the GPU may still compute it: reading a tensor of `event.metrics` waits for the
        GPU. Metrics that wait for nothing come with `on_report`. It may leave the model in evaluation mode."""

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


def trained_model(trainable: Any) -> Any:
    """The model of `Event.model`: that of a module which computes its loss, by an attribute `trained_model`, or the
    module itself."""
    return getattr(trainable, "trained_model", trainable)


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


def check_callbacks(callbacks: Iterable[object]) -> None:
    """Raise InputError unless all are instances of `Callback`, with methods that take the arguments of its methods, and
    a period that is a whole number of steps."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = "; give an instance of the class" if isinstance(callback, type) else ""
            raise InputError(f"callbacks: must be instances of Callback, got {short(callback)}{hint}")
        for name, parameters in _PARAMETERS.items():
            if not _takes(getattr(callback, name), parameters):
                expected = ", ".join(["self", *parameters])
                where = f"{type(callback).__name__}.{name}"
                raise InputError(f"callbacks: {where}: must take the arguments ({expected})")
        if callback.every is not None:
            check_count(f"{type(callback).__name__}.every", callback.every)


_PARAMETERS = {
    name: list(signature(method).parameters)[1:]
    for name, method in vars(Callback).items()
    if isfunction(method) and not name.startswith("__")
}


def _takes(method: Callable[..., Any], parameters: Sequence[str]) -> bool:
    """Whether a method may be called with these positional arguments."""
    try:
        signature(method).bind(*parameters)
    except TypeError:
        return False
    except ValueError:  # a function in C says nothing
        return True
    return True


def lm_eval_callback(settings: Mapping[str, Any]) -> Any:
    """The callback for the settings `lm_eval` of a recipe; None without them. It is found by its import path, as a
    callback of a user: integrations are above training.

    Raises:
        BackendError: lm-eval is not installed.
        ConfigError: lm-eval has no such task.
    """
    if not settings.get("lm_eval"):
        return None
    if find_spec("lm_eval") is None:
        raise BackendError("lm_eval: lm-evaluation-harness is not installed; pip install 'lm_eval[hf]'")
    return imported("ligermodels.integrations.lm_eval:LmEval", "lm_eval")(settings)


def callbacks_at(paths: Iterable[str]) -> list[Callback]:
    """Instances of the classes at import paths, made without arguments. Raises ConfigError for anything else."""
    callbacks = []
    for path in paths:
        kind = imported(path, "callback")
        if not (isinstance(kind, type) and issubclass(kind, Callback)):
            raise ConfigError(f"callback: {path}: is not a subclass of ligermodels.training.Callback")
        try:
            callbacks.append(kind())
        except TypeError as error:
            raise ConfigError(f"callback: {path}: must be made without arguments: {error}") from error
    check_callbacks(callbacks)
    return callbacks


def states_of(callbacks: Sequence[Callback]) -> dict[str, dict[str, Any]]:
    """Name of the class -> `state_dict`, of callbacks that have a state. Raises InputError unless it is JSON types."""
    states = {name: state for name, callback in _named(callbacks).items() if (state := callback.state_dict())}
    for name, state in states.items():
        try:
            json.dumps(state)
            _require_text_keys(state)
        except (TypeError, ValueError) as error:
            raise InputError(f"callbacks: the state_dict of {name} must hold JSON types: {error}") from None
    return states


def _require_text_keys(value: Any) -> None:
    """Raise TypeError for a key that JSON would turn into text."""
    match value:
        case Mapping():
            for key, item in value.items():
                if not isinstance(key, str):
                    raise TypeError(f"the key {key!r} is no text, and would come back as one")
                _require_text_keys(item)
        case list() | tuple():
            for item in value:
                _require_text_keys(item)


def restore_states(
    callbacks: Sequence[Callback], states: Mapping[str, Mapping[str, Any]]
) -> tuple[list[str], list[str]]:
    """Give callbacks their states back. Returns the names of callbacks in `states` that the run does not have now, and
    the names of callbacks that have a state now, and none in `states`."""
    named = _named(callbacks)
    for name in named.keys() & states.keys():
        named[name].load_state_dict(states[name])
    new = [name for name, callback in named.items() if name not in states and callback.state_dict()]
    return sorted(states.keys() - named.keys()), new


def _named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Callbacks by the names of their classes; the second of a class gets "#2"."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        name = f"{type(callback).__module__}.{type(callback).__qualname__}"
        number = 1 + sum(type(other) is type(callback) for other in named.values())
        named[name if number == 1 else f"{name}#{number}"] = callback
    return named
