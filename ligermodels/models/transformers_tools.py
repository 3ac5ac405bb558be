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
    """In place of the methods of transformers' configs that tools call first."""
    raise InputError(f"model.config: {ADVICE}. model.hf_config is the content of config.json")


def native_config(config: type[Config]) -> type[Config]:
    """Class decorator for a frozen dataclass: what tools do to transformers' configs raises errors that name `wrap`."""
    set_field: Callable[[Any, str, Any], None] = config.__setattr__

    def set_attribute(self: Config, name: str, value: Any) -> None:
        try:
            set_field(self, name, value)
        except FrozenInstanceError as error:
            advice = "dataclasses.replace makes another config" if hasattr(self, name) else ADVICE
            raise FrozenInstanceError(f"{error} of model.config: {advice}") from None

    for name in ("to_dict", "get_text_config"):
        setattr(config, name, refuse)
    config.__setattr__ = set_attribute  # type: ignore[assignment,method-assign]
    return config
