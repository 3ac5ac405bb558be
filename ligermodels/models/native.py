"""Error for arguments that are not native models."""

from __future__ import annotations

from typing import Any

from ligermodels.errors import InputError
from ligermodels.models.causal_lm import CausalLM


def check_native(model: Any, function: str) -> None:
    """InputError, naming the `function` that was called, unless its argument `model` is a native CausalLM."""
    if isinstance(model, CausalLM):
        return
    advice = "lm.from_pretrained and lm.from_config return one"
    if isinstance(getattr(model, "base", None), CausalLM):
        advice = "for a model with draft heads, pass its `base`"
    elif hasattr(getattr(model, "config", None), "model_type"):
        advice = "lm.from_transformers(model) converts a model of transformers"
    raise InputError(f"{function}: takes a native CausalLM, got a {type(model).__name__}; {advice}")


def check_own_modules(decoder: Any, function: str) -> None:
    """InputError, naming the `function` that was called, if a decoder computes by a transformers model."""
    if getattr(decoder, "exported_by", None) is not None:
        raise InputError(
            f"{function}: this model computes by the modules of the transformers model that wrap returned; use "
            "transformers' tools on that one (PEFT, accelerate), or load another native model"
        )
