"""What functions that take a native model say of anything else."""

from __future__ import annotations

from typing import Any

from ligermodels.errors import InputError
from ligermodels.models.causal_lm import CausalLM


def check_native(model: Any, what: str) -> None:
    """InputError unless `model`, the argument of `what`, is a native CausalLM."""
    if isinstance(model, CausalLM):
        return
    advice = "lm.from_pretrained and lm.from_config make one"
    if isinstance(getattr(model, "base", None), CausalLM):
        advice = "of heads on a model, give their base"
    elif hasattr(getattr(model, "config", None), "to_dict"):
        advice = "lm.from_transformers(model) makes one of a model of transformers"
    raise InputError(f"{what}: takes a native CausalLM, got a {type(model).__name__}; {advice}")
