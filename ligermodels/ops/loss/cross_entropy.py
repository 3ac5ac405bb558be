"""Cross entropy over given logits; the formula is at the head of `token_losses`."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.ops.loss.token_losses import (
    LossOptions,
    Reduction,
    check_loss,
    check_targets,
    checked_loss_weights,
    loss_weights,
    row_losses_reference,
)
from ligermodels.ops.loss.token_losses_kernels import launch_gradient, launch_rows
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable
from ligermodels.ops.runtime.tensors import as_rows


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    token_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_rank: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross entropy of logits against class indices (the formula is at the head of `token_losses`).

    logits: (..., V), any floating dtype and strides. target: (...), int64, in [0, V) or ignore_index: such rows have no
        loss and a gradient of exact zeros.
    token_weights: (...), floating, not negative, multiplied into each row's loss; they get no gradient.
    reduction: "none" gives a loss for each row, (...); "sum" their sum; "mean" their sum over the number of rows not
        ignored, or over the sum of those rows' token_weights if given. If that is 0, the loss is 0 (where torch gives
        nan) and so are the gradients.
    return_rank: also return (...) int64, the number of classes that rank before the target: those of a greater logit,
        and those of an equal logit and a smaller index; -1 for ignored rows. So rank < k is top-k accuracy.
    Returns the loss in float32 (float64 for float64 logits), or (loss, rank).
    Raises InputError if shapes, dtypes, devices or options do not fit, or, on the CPU, for a target out of range. On
    CUDA such a target fails a device-side assertion (no wait for the device), and is never used as an index.
    """
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, return_rank)
    check_loss("cross_entropy", logits, "logits", target, token_weights, reduction, options)
    V, dtype = logits.shape[-1], logits.dtype
    target, weights = checked_loss_weights(target, V, ignore_index, reduction, token_weights, dtype)
    if use_kernels(logits):
        losses, rank = _CrossEntropy.apply(logits, target, options)
    else:
        losses, rank = row_losses_reference(logits, target, options)
    loss = losses * weights if reduction == "none" else (losses * weights).sum()
    return (loss, rank) if return_rank else loss


def cross_entropy_reference(
    logits: Tensor, target: Tensor, *, reduction: Reduction = "mean", token_weights: Tensor | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The specification of `cross_entropy`, in plain torch; the same arguments."""
    chosen = LossOptions(**options)
    check_targets(target, logits.shape[-1], chosen.ignore_index)
    losses, rank = row_losses_reference(logits, target, chosen)
    losses = losses * loss_weights(target, chosen.ignore_index, reduction, token_weights, logits.dtype)
    loss = losses if reduction == "none" else losses.sum()
    return (loss, rank) if chosen.return_rank else loss


@custom_op()
def _cross_entropy_forward(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None,
    logit_scale: float, return_rank: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Each row's loss, max, log of the sum of exp(x - max), and rank. A target out of range counts as ignored: targets
    have been checked."""
    losses, maxima, log_sums = (target.new_empty(target.shape, dtype=torch.float32) for _ in range(3))
    ranks = target.new_empty(target.shape if return_rank else (0,))
    if is_fake(losses):
        return losses, maxima, log_sums, ranks
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, return_rank)
    launch_rows(as_rows(logits), target.contiguous(), losses, ranks, options, maxima=maxima, log_sums=log_sums)
    return losses, maxima, log_sums, ranks


@custom_op()
def _cross_entropy_backward(
    dlosses: Tensor, logits: Tensor, target: Tensor, maxima: Tensor, log_sums: Tensor, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float | None, logit_scale: float, return_rank: bool,
) -> Tensor:  # fmt: skip
    """The gradient of the logits, given that of each row's loss."""
    gradient = logits.new_empty(logits.shape)
    if is_fake(gradient):
        return gradient
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    launch_gradient(as_rows(logits), gradient, target.contiguous(), maxima, log_sums, dlosses.contiguous(), options)
    return gradient


class _CrossEntropy(torch.autograd.Function):
    """Each row's loss and rank."""

    @staticmethod
    def forward(ctx, logits, target, options):
        losses, maxima, log_sums, rank = _cross_entropy_forward(logits, target, *options)
        ctx.save_for_backward(logits, target, maxima, log_sums)
        ctx.options = options
        ctx.mark_non_differentiable(rank)
        return losses, rank

    @staticmethod
    @once_differentiable
    def backward(ctx, dlosses, _):
        return (_cross_entropy_backward(dlosses, *ctx.saved_tensors, *ctx.options),)
