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
