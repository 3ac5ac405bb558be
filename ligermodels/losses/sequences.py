"""Per-token log-probabilities over a mask: their checks, and their sums by sequence."""

import math
from collections.abc import Collection
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ligermodels.arguments import check_flag
from ligermodels.errors import InputError, short
from ligermodels.ops.runtime.tensors import check_tensor


def sequence_log_probs(log_probs: Tensor, mask: Tensor, *, average: bool = False) -> Tensor:
    """The sum of each sequence's log-probabilities, or with `average` their mean: (N,).

    log_probs: (N, T), any floating dtype, as `ops.linear_log_probs` gives them. mask: (N, T), bool, the tokens that
        count; the values of others, be they nan, have no effect.
    Returns float32 (float64 for float64); 0 for a sequence without tokens. Raises InputError if the shapes do not fit.
    """
    check_tokens("sequence_log_probs", log_probs, mask)
    check_flag("average", average)
    sums = masked(log_probs, mask).sum(1)
    return sums / lengths(mask) if average else sums


def masked(log_probs: Tensor, mask: Tensor) -> Tensor:
    """log_probs in at least float32, 0 outside the mask."""
    return torch.where(mask, log_probs.to(torch.promote_types(log_probs.dtype, torch.float32)), 0.0)


def lengths(mask: Tensor) -> Tensor:
    """The number of tokens of each sequence, at least 1."""
    return mask.sum(1).clamp(min=1)


def reference_sums(loss: str, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """A reference's log-probabilities (N, T) summed over the mask, without a gradient; sums (N,) as they are."""
    check_rows_or_sequences(loss, "ref_log_probs", ref_log_probs, mask)
    return ref_log_probs.detach() if ref_log_probs.dim() == 1 else masked(ref_log_probs.detach(), mask).sum(1)


def check_tokens(loss: str, log_probs: Tensor, mask: Tensor, **others: Tensor | None) -> None:
    """Raises InputError unless log_probs are (N, T), mask bool of that shape, and others floating of it."""
    if not isinstance(log_probs, Tensor):
        raise InputError(f"{loss}: log_probs must be a tensor, got {type(log_probs).__name__}")
    check_tensor(loss, "log_probs", log_probs, ("N", "T"), log_probs.device)
    check_tensor(loss, "mask", mask, log_probs.shape, log_probs.device, torch.bool)
    for name, each in others.items():
        if each is not None:
            check_tensor(loss, name, each, log_probs.shape, log_probs.device)


def check_rows_or_sequences(loss: str, name: str, x: Tensor, mask: Tensor) -> None:
    """Raises InputError unless x is floating, of the mask's shape (N, T), or (N,)."""
    dims = 2 if isinstance(x, Tensor) and x.dim() == 2 else 1
    check_tensor(loss, name, x, mask.shape[:dims], mask.device)


def check_choice(loss: str, name: str, value: str, known: Collection[str]) -> None:
    """Raises InputError, with the known values, for another."""
    if not isinstance(value, str) or value not in known:
        raise InputError(f"{loss}: {name} must be one of {', '.join(known)}; got {short(value)}")


def check_finite(loss: str, **values: Any) -> None:
    """Raises InputError for a value that is no finite number, nor a tensor of one; None passes."""
    for name, value in values.items():
        is_one = isinstance(value, Real) and math.isfinite(value)
        if value is not None and not is_one and not (isinstance(value, Tensor) and value.numel() == 1):
            raise InputError(f"{loss}: {name} must be a finite number, got {short(value)}")


def check_positive(loss: str, **values: Any) -> None:
    """Raises InputError for a value that is not positive; None passes."""
    for name, value in values.items():
        is_number = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
        if value is not None and (not is_number or not value > 0):
            raise InputError(f"{loss}: {name} must be positive, got {short(value)}")


def check_used(loss: str, loss_type: str, used: Collection[str], **options: Any) -> None:
    """Raises InputError for an option that is set, to anything but None, and that the loss type does not use."""
    for name, value in options.items():
        if value is not None and name not in used:
            raise InputError(f"{loss}: loss_type {loss_type!r} has no {name}; leave it out")


def reduced(loss: str, losses: Tensor, reduction: str) -> Tensor:
    """The mean of losses (N,), or these themselves with reduction "none"."""
    check_choice(loss, "reduction", reduction, ("mean", "none"))
    return losses.mean() if reduction == "mean" else losses
