"""Errors for tools of transformers models (Trainer, TRL, PEFT, pipelines, lm-evaluation-harness) on a native model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any, NoReturn, TypeVar

from ligermodels.errors import InputError

ADVICE = (
    "a native model is no transformers model; for Trainer, TRL, PEFT, pipelines and lm-evaluation-harness, give "
    "ligermodels.integrations.wrap(model)"
)
Config = TypeVar("Config")


def refuse(*_: Any, **__: Any) -> NoReturn:
    """In place of `get_text_config` of transformers' configs, which tools call first. There is no `to_dict`: PEFT takes
    any dataclass without one, and `peft.inject_adapter_in_model` works on native models."""
    raise InputError(f"model.config: {ADVICE}. model.hf_config is the content of config.json")


def native_config(config: type[Config]) -> type[Config]:
    """Class decorator for a frozen dataclass: setting a field, and methods of transformers' configs, raise errors."""
    set_field: Callable[[Any, str, Any], None] = config.__setattr__

    def set_attribute(self: Config, name: str, value: Any) -> None:
        try:
            set_field(self, name, value)
        except FrozenInstanceError as error:
            advice = "dataclasses.replace makes another config" if hasattr(self, name) else ADVICE
            raise FrozenInstanceError(f"{error} of model.config: {advice}") from None

    config.get_text_config = refuse  # type: ignore[attr-defined]
    config.__setattr__ = set_attribute  # type: ignore[assignment,method-assign]
    return config
