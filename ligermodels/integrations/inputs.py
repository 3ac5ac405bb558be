"""Checks of the inputs of a native forward of a transformers model, where transformers itself has no clear error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError


def check_inputs(input_ids: Any, inputs_embeds: Any, attention_mask: Any, hidden_size: int, labels: Any = None) -> None:
    """Raises InputError that names the first argument of a wrong type, dtype or shape, or without a token.

    input_ids: integers (B, T). inputs_embeds: floating (B, T, hidden_size). labels: of B * T elements. attention_mask:
    anything that a transformers model takes, so no list or number. Each may be None.
    """
    tokens, name, dims = input_ids, "input_ids", "(B, T)"
    if tokens is None:
        tokens, name, dims = inputs_embeds, "inputs_embeds", f"(B, T, {hidden_size})"
    if tokens is None:
        return
    if not isinstance(tokens, Tensor):
        raise InputError(f"{name}: must be a tensor {dims}, got {type(tokens).__name__}")
    dtypes = "int32 or int64" if name == "input_ids" else "floating"
    right = tokens.dtype in (torch.int32, torch.int64) if name == "input_ids" else tokens.is_floating_point()
    last = () if name == "input_ids" else (hidden_size,)
    if not right or tokens.dim() != 2 + len(last) or tuple(tokens.shape[2:]) != last:
        raise InputError(f"{name}: must be {dtypes}, of shape {dims}; got {tokens.dtype} {tuple(tokens.shape)}")
    if not tokens.numel():
        raise InputError(f"{name}: has no token, {tuple(tokens.shape)}; give at least one sequence of one token")
    if isinstance(attention_mask, Sequence | int | float):
        raise InputError(f"attention_mask: must be a tensor (B, T), got {type(attention_mask).__name__}")
    if labels is not None and (not isinstance(labels, Tensor) or labels.numel() != tokens.shape[:2].numel()):
        found = tuple(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise InputError(f"labels: must be a tensor {tuple(tokens.shape[:2])}, as {name} has tokens; got {found}")
