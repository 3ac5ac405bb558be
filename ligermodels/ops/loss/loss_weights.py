"""The weights of the rows in the reduced loss, and the checks of what they depend on."""

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.loss.token_losses import Reduction
from ligermodels.ops.runtime.dispatch import checked_on_host
from ligermodels.ops.runtime.library import custom_op, is_fake, reject_dtensors
from ligermodels.ops.runtime.tensors import check_tensor, empty_like


def checked_loss_weights(
    target: Tensor, num_classes: int, ignore_index: int, reduction: Reduction, token_weights: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Checks the targets (`check_targets`) and computes their `loss_weights`, in one op.

    A compiled graph that uses the returned targets therefore keeps the check.

    Args:
        target: int64 (...).
        num_classes: the number of classes V.
        ignore_index: the target of ignored rows.
        reduction: "mean", "sum" or "none".
        token_weights: floating (...), or None.
        dtype: the dtype of the logits or hidden states.

    Returns:
        A contiguous copy of the targets, and the weights, contiguous and without a gradient.
    """
    tokens = None if token_weights is None else token_weights.detach()
    checked, weights = _loss_weights(target, tokens, num_classes, ignore_index, reduction, dtype == torch.float64)
    return checked, weights


@custom_op()
def _loss_weights(
    target: Tensor, token_weights: Tensor | None, num_classes: int, ignore_index: int, reduction: str, double: bool
) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if double else torch.float32
    if is_fake(target):
        return empty_like(target), target.new_empty(target.shape, dtype=dtype)
    check_targets(target, num_classes, ignore_index)
    weights = loss_weights(target, ignore_index, reduction, token_weights, dtype)
    return target.clone(memory_format=torch.contiguous_format), weights.contiguous()


def loss_weights(
    target: Tensor, ignore_index: int, reduction: str, token_weights: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The weight of each row in the reduced loss, for targets that have been checked; 0 for ignored rows.

    Args:
        target: int64 (...).
        ignore_index: the target of ignored rows.
        reduction: "mean" divides the weights by their sum; "sum" and "none" divide by nothing.
        token_weights: floating (...), or None for ones.
        dtype: the dtype of the logits or hidden states; the weights are at least float32.
    """
    dtype, valid = torch.promote_types(dtype, torch.float32), target != ignore_index
    weights = valid.to(dtype) if token_weights is None else torch.where(valid, token_weights.detach().to(dtype), 0.0)
    return normalised(weights, weights) if reduction == "mean" else weights


def normalised(weights: Tensor, divisors: Tensor) -> Tensor:
    """weights (...) / sum of divisors (...); 0 if that sum is 0."""
    total = divisors.sum()
    return torch.where(total != 0, weights / total, 0.0)


def check_reduction(op: str, reduction: str) -> None:
    """Raises InputError unless the reduction is "mean", "sum" or "none"."""
    if reduction not in ("mean", "sum", "none"):
        raise InputError(f'{op}: reduction must be "mean", "sum" or "none", got {reduction!r}')


def checked_class_weights(op: str, class_weights: Tensor, num_classes: int, x: Tensor) -> Tensor:
    """Checks the class weights, and casts them to the dtype of the losses.

    Args:
        op: the op's name, for error messages.
        class_weights: floating (num_classes,).
        num_classes: the number of classes.
        x: logits or hidden states, for device and dtype.

    Returns:
        The weights without a gradient, contiguous, float32 (float64 for float64 `x`).

    Raises:
        InputError: shape, dtype or device do not fit, or the weights are a DTensor.
    """
    reject_dtensors(op, class_weights)
    check_tensor(op, "class_weights", class_weights, (num_classes,), x.device)
    return class_weights.detach().to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def check_targets(target: Tensor, num_classes: int, ignore_index: int) -> None:
    """Checks that each target is a class or ignored.

    On CUDA this is a device-side assertion, so that the host does not wait for the device, unless `host_checks` are on.

    Args:
        target: int64, any shape.
        num_classes: targets must be in [0, num_classes).
        ignore_index: the target of ignored rows.

    Raises:
        InputError: a target is neither a class nor `ignore_index`.
    """
    valid = (target.clamp(0, num_classes - 1) == target) | (target == ignore_index)
    if not checked_on_host(target):
        message = f"a target is neither in [0, {num_classes}) nor ignore_index ({ignore_index})"
        torch._assert_async(valid.all(), message)
    elif not valid.all():
        index = (~valid).nonzero()[0].tolist()
        raise InputError(
            f"target{index} is {target[tuple(index)].item()}, which is neither in [0, {num_classes}) nor the "
            f"ignore_index ({ignore_index}); {int((~valid).sum())} such in all"
        )


def with_extras(loss: Tensor, *extras: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    """The loss, or a tuple of the loss and the extras that are not None."""
    returned = [x for x in extras if x is not None]
    return (loss, *returned) if returned else loss
