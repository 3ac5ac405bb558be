"""Activation checkpointing: what a backward pass computes again instead of keeping it in memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ligermodels.layers.token_parts import TokenParts
from ligermodels.ops.float8.mm import widens

ActivationCheckpointing = Literal["none", "selective", "full"]

_GEMMS = ("mm", "addmm", "_grouped_mm", "grouped_mm", "bmm")
_ATTENTION = ("attention", "flash_attn")
_SCALARS = ("float8_amax", "float8_glu_amax")


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep results of attention, and of matrix products that are at least as wide as their operand; and maxima of
    tensors that are cast to float8.

    A narrower product (the down projection) is computed again if the backward pass needs it; the last one of a block
    never is.
    """
    name = op.__name__.partition(".")[0]
    if any(word in name for word in _ATTENTION) or name in _SCALARS:
        return CheckpointPolicy.MUST_SAVE
    if name in _GEMMS:
        weight = args[2] if name == "addmm" else args[1]
        if weight.shape[-1] >= weight.shape[-2]:
            return CheckpointPolicy.MUST_SAVE
    if name == "float8_mm" and widens(args[1]):
        return CheckpointPolicy.MUST_SAVE
    if name == "float8_lora_forward" and args[3].shape[0] >= args[6].shape[1]:  # the weight's own columns
        return CheckpointPolicy.MUST_SAVE
    if name == "all_gather_linear_forward" and args[1].shape[0] * args[4] >= args[1].shape[1]:
        return CheckpointPolicy.MUST_SAVE
    if name == "linear_reduce_scatter_forward" and args[1].shape[0] >= args[1].shape[1] * args[2]:
        return CheckpointPolicy.MUST_SAVE
    if name == "lora_linear_forward" and args[2].shape[0] >= args[2].shape[1]:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def run(mode: ActivationCheckpointing, module: nn.Module, *args: Any, parts: TokenParts | None = None) -> Any:
    """`module(*args)`; for the backward pass "selective" keeps results of expensive ops, "full" the inputs alone.

    parts: how the tokens that it is given are divided over ranks, also where it is computed again.
    """
    function = module if parts is None else partial(parts.call, module)
    if mode == "none" or not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, context_fn=partial(_contexts, mode))


def _contexts(mode: ActivationCheckpointing) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Of the first forward pass, and of the one in the backward pass, which with "full" keeps no results."""
    if mode == "full":
        return nullcontext(), nullcontext()
    first, again = create_selective_checkpoint_contexts(_policy)
    return first, again
