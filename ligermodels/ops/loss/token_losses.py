"""The loss of a row of logits: its options, its weight in the reduced loss, and the checks of both.

For a row of logits l and its target y, with effective logits x = logit_scale * l, or softcap * tanh(logit_scale * l /
softcap) (Gemma 2, https://arxiv.org/abs/2408.00118), and lse = log sum exp x:

    loss = lse - (1 - label_smoothing) * x_y - label_smoothing * mean(x) + z_loss * lse^2

(label smoothing as torch and https://arxiv.org/abs/1512.00567, z-loss as PaLM, https://arxiv.org/abs/2204.02311). The
head of `loss_terms` has the formula with class weights and token scaling.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.runtime.dispatch import checked_on_host
from ligermodels.ops.runtime.library import custom_op, is_fake, reject_dtensors
from ligermodels.ops.runtime.tensors import check_rows, check_tensor, empty_like

Reduction = Literal["mean", "sum", "none"]


class LossOptions(NamedTuple):
    """Options of the loss of a row, in the order of the arguments of the registered ops."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0

    def fused(self, class_weights: Tensor | None, token_scaling: bool) -> bool:
        """Whether one weight for the whole loss of a row is enough; otherwise `loss_terms` sums the terms."""
        one_weight = class_weights is None or not (self.label_smoothing or self.z_loss)
        return one_weight and not token_scaling


class LossWeights(NamedTuple):
    """The weight of each term of each row's loss; the reduced loss is the sum of weight * term over rows and terms.

    float32 (float64 for float64 losses), the target's shape. Weights are 0 for ignored rows, and for all rows if the
    divisor of the mean is 0. Without class weights all three are the same tensor.
    """

    nll: Tensor  # of -log p_y: token weight * class weight
    smoothing: Tensor  # of the mean over classes: token weight, over the same divisor
    z_loss: Tensor  # of the z-loss: token weight, over the sum of token weights


def loss_weights(
    target: Tensor, ignore_index: int, reduction: str, token_weights: Tensor | None, dtype: torch.dtype,
    class_weights: Tensor | None = None,
) -> LossWeights:  # fmt: skip
    """Weights of the loss terms of each row, for targets that have been checked.

    Args:
        target: int64 (...).
        ignore_index: the target of ignored rows.
        reduction: "mean" divides the weights by their sum; with class weights the z-loss has a divisor of its own, the
            sum of the token weights, as in Liger-Kernel. "sum" and "none" divide by nothing.
        token_weights: floating (...), or None for ones.
        dtype: the dtype of the logits or hidden states; the weights are at least float32.
        class_weights: floating (V,), or None for ones.
    """
    dtype, valid = torch.promote_types(dtype, torch.float32), target != ignore_index
    tokens = valid.to(dtype) if token_weights is None else torch.where(valid, token_weights.detach().to(dtype), 0.0)
    if class_weights is None:
        return LossWeights(*[_normalised(tokens, tokens) if reduction == "mean" else tokens] * 3)
    classes = target.clamp(0, len(class_weights) - 1)  # on CUDA the check has not stopped an invalid target yet
    products = tokens * class_weights.detach().to(dtype)[classes]
    if reduction != "mean":
        return LossWeights(products, tokens, tokens.clone())
    return LossWeights(_normalised(products, products), _normalised(tokens, products), _normalised(tokens, tokens))


def _normalised(weights: Tensor, divisors: Tensor) -> Tensor:
    """weights / sum of divisors; 0 if that sum is 0."""
    total = divisors.sum()
    return torch.where(total != 0, weights / total, 0.0)


def checked_loss_weights(
    target: Tensor, num_classes: int, ignore_index: int, reduction: Reduction, token_weights: Tensor | None,
    dtype: torch.dtype, class_weights: Tensor | None = None,
) -> tuple[Tensor, LossWeights]:  # fmt: skip
    """Checks the targets (`check_targets`) and computes their `loss_weights`, in one op.

    A compiled graph that uses the returned targets therefore keeps the check.

    Args:
        target: int64 (...).
        num_classes: the number of classes V.
        ignore_index: the target of ignored rows.
        reduction: "mean", "sum" or "none".
        token_weights: floating (...), or None.
        dtype: the dtype of the logits or hidden states.
        class_weights: floating (V,), or None.

    Returns:
        A contiguous copy of the targets, and the weights, contiguous and without a gradient.
    """
    tokens, classes = (None if weights is None else weights.detach() for weights in (token_weights, class_weights))
    checked, *weights = _loss_weights(
        target, tokens, classes, num_classes, ignore_index, reduction, dtype == torch.float64
    )
    return checked, LossWeights(*weights if classes is not None else weights * 3)


@custom_op()
def _loss_weights(
    target: Tensor, token_weights: Tensor | None, class_weights: Tensor | None, num_classes: int, ignore_index: int,
    reduction: str, double: bool,
) -> list[Tensor]:  # fmt: skip
    """A copy of the targets, and the three weights, or without class weights one."""
    dtype, count = torch.float64 if double else torch.float32, 1 if class_weights is None else 3
    if is_fake(target):
        return [empty_like(target), *(target.new_empty(target.shape, dtype=dtype) for _ in range(count))]
    check_targets(target, num_classes, ignore_index)
    weights = loss_weights(target, ignore_index, reduction, token_weights, dtype, class_weights)
    return [target.clone(memory_format=torch.contiguous_format), *(w.contiguous() for w in weights[:count])]


def check_loss(
    op: str, name: str, x: Tensor, target: Tensor, token_weights: Tensor | None, reduction: str, options: LossOptions
) -> None:
    """Checks the arguments that all cross entropies share.

    Args:
        op: the op's name, for error messages.
        name: the name of `x`, for error messages.
        x: logits or hidden states, floating (..., N).
        target: int64 (...).
        token_weights: floating (...), or None.
        reduction: "mean", "sum" or "none".
        options: the options of the loss.

    Raises:
        InputError: a shape, dtype, device or option does not fit, or a tensor is a DTensor.
    """
    reject_dtensors(op, x, target, token_weights)
    check_rows(op, name, x)
    check_tensor(op, "target", target, x.shape[:-1], x.device, torch.int64)
    if token_weights is not None:
        check_tensor(op, "token_weights", token_weights, target.shape, x.device)
    check_reduction(op, reduction)
    if not 0 <= options.label_smoothing <= 1:
        raise InputError(f"{op}: label_smoothing must be in [0, 1], got {options.label_smoothing}")
    if not options.z_loss >= 0:
        raise InputError(f"{op}: z_loss must be 0 or above, got {options.z_loss}")
    if options.softcap is not None and not options.softcap > 0:
        raise InputError(f"{op}: softcap must be positive or None, got {options.softcap}")
    if not options.logit_scale > 0:
        raise InputError(f"{op}: logit_scale must be positive, got {options.logit_scale}")


def check_reduction(op: str, reduction: str) -> None:
    """Raises InputError unless the reduction is "mean", "sum" or "none"."""
    if reduction not in ("mean", "sum", "none"):
        raise InputError(f'{op}: reduction must be "mean", "sum" or "none", got {reduction!r}')


def check_class_weights(op: str, class_weights: Tensor | None, num_classes: int, x: Tensor) -> Tensor | None:
    """Checks the class weights, and casts them to the dtype of the losses.

    Args:
        op: the op's name, for error messages.
        class_weights: floating (num_classes,), or None.
        num_classes: the number of classes.
        x: logits or hidden states, for device and dtype.

    Returns:
        The weights without a gradient, contiguous, float32 (float64 for float64 `x`); None for None.

    Raises:
        InputError: shape, dtype or device do not fit, or the weights are a DTensor.
    """
    if class_weights is None:
        return None
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
