"""Per-token log-probabilities over a mask: their checks, their sums by sequence, and the division of summed losses."""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ligermodels.arguments import check_flag, is_number
from ligermodels.errors import InputError, short
from ligermodels.ops.runtime.checks import assert_async, check_tensor


def sequence_log_probs(log_probs: Tensor, mask: Tensor, *, average: bool = False) -> Tensor:
    """The sum, or the mean, of each sequence's log-probabilities.

    Args:
        log_probs: (N, T), any floating dtype, from `ops.linear_log_probs` or a model.
        mask: bool (N, T), the tokens that count; the values of other tokens, even nan, have no effect.
        average: divide each sum by the number of tokens. Default: False.

    Returns:
        (N,), float32 (float64 for float64 `log_probs`); 0 for a sequence without tokens.

    Raises:
        InputError: shapes, dtypes or devices do not fit.

    Examples:
        >>> log_probs, mask = -torch.rand(4, 10), torch.ones(4, 10, dtype=torch.bool)
        >>> ref_log_probs = sequence_log_probs(log_probs, mask)
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
    """The reference's log-probabilities summed over the mask, without a gradient.

    Args:
        loss: the name of the loss, for error messages.
        ref_log_probs: (N, T), or already summed, (N,).
        mask: bool (N, T).
    """
    check_rows_or_sequences(loss, "ref_log_probs", ref_log_probs, mask)
    return ref_log_probs.detach() if ref_log_probs.dim() == 1 else masked(ref_log_probs.detach(), mask).sum(1)


def check_tokens(loss: str, log_probs: Tensor, mask: Tensor, **others: Tensor | None) -> None:
    """Checks tensors with a value for each token.

    Args:
        loss: the name of the loss, for error messages.
        log_probs: must be floating (N, T).
        mask: must be bool (N, T).
        others: must be floating (N, T), or None.

    Raises:
        InputError: a shape, dtype or device does not fit.
    """
    if not isinstance(log_probs, Tensor):
        raise InputError(f"{loss}: log_probs must be a tensor, got {type(log_probs).__name__}")
    check_tensor(loss, "log_probs", log_probs, ("N", "T"), log_probs.device)
    check_tensor(loss, "mask", mask, log_probs.shape, log_probs.device, torch.bool)
    for name, x in others.items():
        if x is not None:
            check_tensor(loss, name, x, log_probs.shape, log_probs.device)


def check_rows_or_sequences(loss: str, name: str, x: Tensor, mask: Tensor) -> None:
    """Raises InputError, naming `loss` and x by `name`, unless x is floating, (N, T) as `mask`, or (N,)."""
    dims = 2 if isinstance(x, Tensor) and x.dim() == 2 else 1
    check_tensor(loss, name, x, mask.shape[:dims], mask.device)


def check_choice(loss: str, name: str, value: str, known: Collection[str]) -> None:
    """Raises InputError, with the names of `loss` and argument (`name`), unless `value` is a `known` value."""
    if not isinstance(value, str) or value not in known:
        raise InputError(f"{loss}: {name} must be one of {', '.join(known)}; got {short(value)}")


def check_finite(loss: str, **values: Any) -> None:
    """Raises InputError for a value that is neither a finite number nor a tensor with one element."""
    for name, value in values.items():
        if not _is_one(value) or not (isinstance(value, Tensor) or math.isfinite(value)):
            raise InputError(f"{loss}: {name} must be a finite number, got {short(value)}")


def check_positive(loss: str, **values: Any) -> None:
    """Raises InputError for a value that is neither a positive finite number nor a tensor with one."""
    for name, value in values.items():
        if not _is_one(value) or not 0 < value < math.inf:
            raise InputError(f"{loss}: {name} must be positive and finite, got {short(value)}")


def _is_one(value: object) -> bool:
    """Whether `value` is a number, or a tensor with one element."""
    return is_number(value) or (isinstance(value, Tensor) and value.numel() == 1)


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def check_used(loss: str, loss_type: str, used: Collection[str], **options: Any) -> None:
    """Checks that the loss type uses every option that is set.

    Args:
        loss: the name of the loss, for error messages.
        loss_type: the loss type, for error messages.
        used: the names of the options that the loss type uses.
        options: the options by name; None: not set.

    Raises:
        InputError: an option is set but not used.
    """
    for name in given(**options):
        if name not in used:
            raise InputError(f"{loss}: loss_type {loss_type!r} has no {name}; leave it out")


def reduced(loss: str, losses: Tensor, reduction: str) -> Tensor:
    """The mean of the `losses` (N,), or with `reduction` "none" the losses; InputError with the name of `loss` else."""
    check_choice(loss, "reduction", reduction, ("mean", "none"))
    return losses.mean() if reduction == "mean" else losses


def per_item(total: Tensor, num_items_in_batch: Tensor | float, name: str = "num_items_in_batch") -> Tensor:
    """Divide summed losses by the number of targets in the whole batch.

    Args:
        total: the sums, any shape.
        num_items_in_batch: the number, or a tensor of one element.
        name: name of this number, for error messages.

    Returns:
        total / num_items_in_batch. 0 / 0 is 0: without a target in all micro-batches there is no loss.

    Raises:
        InputError: several numbers; a negative number; or 0 where a sum is not 0. For a tensor on a GPU the last
            two are device assertions.
    """
    message = f"{name}: must be above 0, the number of targets; 0 only where no label is counted"
    if isinstance(num_items_in_batch, Tensor):
        items = num_items_in_batch
        if items.numel() != 1:
            raise InputError(f"{name}: must be one number, got a tensor of shape {tuple(items.shape)}")
        assert_async((items > 0) | (items == 0) & (total == 0), f"{message}; got another tensor")
        return total / items.masked_fill(items == 0, 1)
    if not num_items_in_batch >= 0:
        raise InputError(f"{message}; got {num_items_in_batch}")
    if num_items_in_batch == 0:
        assert_async(total == 0, f"{message}; got 0")
    # A tensor: divided by a number, CUDA multiplies by its reciprocal, which rounds otherwise than a tensor's quotient.
    return total / total.new_full((), num_items_in_batch or 1)
