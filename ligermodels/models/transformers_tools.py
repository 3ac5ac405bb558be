"""Errors for tools of transformers models (Trainer, TRL, PEFT, pipelines, lm-evaluation-harness) on a native model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError
from typing import Any, ClassVar, NoReturn, TypeVar

from torch import nn

from ligermodels.errors import InputError

ADVICE = (
    "a native model is no transformers model; for Trainer, TRL, PEFT, pipelines and lm-evaluation-harness, give "
    "ligermodels.integrations.wrap(model)"
)
GENERATION_CONFIG = {
    "generation_config": "give the options to generate, by name or as its generation_config; a checkpoint has defaults "
    "in generation_config.json"
}
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


class RefusesForeignNames(nn.Module):
    """A module on which attributes of transformers' models, which it would not read, cannot be set.

    A subclass that defines such an attribute reads it, and so can be given it.
    """

    foreign: ClassVar[Mapping[str, str]] = GENERATION_CONFIG
    """Names of such attributes -> what to do instead."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.foreign and not hasattr(type(self), name):
            raise AttributeError(f"{name}: would have no effect on a native model; {self.foreign[name]}")
        super().__setattr__(name, value)


class NativeModel(RefusesForeignNames):
    """A native model in place of a transformers model: errors for attributes of the latter say what to use instead."""

    foreign: ClassVar[Mapping[str, str]] = {
        **GENERATION_CONFIG,
        "lm_head": "the head is model.head",
        "loss_function": "compute a loss of your own from model(input_ids).logits, or from model.log_probs",
    }

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(f"{error}; {self.foreign.get(name, ADVICE)}") from None
