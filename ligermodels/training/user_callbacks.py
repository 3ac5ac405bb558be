"""Callbacks that users give: as objects or by import path; and their states in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from ligermodels.errors import BackendError, ConfigError, InputError, short
from ligermodels.training.callback import Callback
from ligermodels.training.import_path import imported


def check_callbacks(callbacks: Iterable[object]) -> None:
    """Raise InputError unless all are instances of `Callback`."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = "; give an instance of the class" if isinstance(callback, type) else ""
            raise InputError(f"callbacks: must be instances of Callback, got {short(callback)}{hint}")


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
    return callbacks


def states_of(callbacks: Sequence[Callback]) -> dict[str, dict[str, Any]]:
    """Name of the class -> `state_dict`, of callbacks that have a state. Raises InputError unless it is JSON types."""
    states = {name: state for name, callback in _named(callbacks).items() if (state := callback.state_dict())}
    for name, state in states.items():
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise InputError(f"callbacks: the state_dict of {name} must hold JSON types: {error}") from None
    return states


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
