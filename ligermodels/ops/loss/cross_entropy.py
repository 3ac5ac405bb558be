"""Cross entropy over given logits; the formula is at the head of `token_losses`, and with class weights or token
scaling at that of `loss_terms`."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.ops.loss.loss_terms import LossTerms
from ligermodels.ops.loss.token_losses import (
    LossOptions,
    LossWeights,
    Reduction,
    RowNumbers,
    check_class_weights,
    check_loss,
    check_targets,
    checked_loss_weights,
    class_loss_weights,
    row_numbers_reference,
)
from ligermodels.ops.loss.token_losses_kernels import launch_gradient, launch_rows
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import custom_op, is_dtensor, is_fake, once_differentiable
from ligermodels.ops.runtime.tensors import as_rows


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    token_weights: Tensor | None = None,
    class_weights: Tensor | None = None,
    token_scaling: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_rank: bool = False,
    return_z_loss: bool = False,
    return_predicted: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Cross entropy of logits against class indices (the formulas are at the heads of `token_losses` and
    `loss_terms`).

    logits: (..., V), any floating dtype and strides; or a DTensor that is sharded in its last dimension, over ranks
        that have all else alike (see `sharded_numbers`): then the results are plain tensors, the same on all ranks.
    target: (...), int64, in [0, V) or ignore_index: such rows have no loss and a gradient of exact zeros.
    token_weights: (...), floating, not negative, multiplied into each row's loss; they get no gradient.
    class_weights: (V,), floating, as `weight` of torch's cross_entropy, label smoothing included; they get no gradient.
        The z-loss is not weighted by class, as in Liger-Kernel.
    token_scaling: multiply each row's loss, z-loss included, by the probability of its target, without a gradient.
    reduction: "none" gives a loss for each row, (...); "sum" their sum; "mean" their sum over the number of rows not
        ignored, or over the sum of those rows' token_weights if given (times their targets' class_weights, but for the
        z-loss). If that is 0, the loss is 0 (where torch gives nan) and so are the gradients.
    return_rank: also return (...) int64, the number of classes that rank before the target: those of a greater logit,
        and those of an equal logit and a smaller index; -1 for ignored rows. So rank < k is top-k accuracy.
    return_z_loss: also return what of the loss is the z-loss, reduced in the same way, without a gradient.
    return_predicted: also return (...) int64, the class of the greatest logit, the first of equal ones; -1 for ignored
        rows.
    Returns the loss in float32 (float64 for float64 logits), or a tuple of it and of what else is asked for, in this
    order: rank, z-loss, predicted classes.
    Raises InputError if shapes, dtypes, devices or options do not fit, or, on the CPU, for a target out of range. On
    CUDA such a target fails a device-side assertion (no wait for the device), and is never used as an index;
    `set_host_checks` asks for the InputError there too.
    """
    options = LossOptions(
        ignore_index, label_smoothing, z_loss, softcap, logit_scale, return_rank, return_predicted
    )  # fmt: skip
    V, shard = logits.shape[-1:].numel(), None
    if is_dtensor(logits) and logits.ndim:
        from ligermodels.ops.runtime.class_shards import shard_of_classes  # imports DTensors

        logits, shard = shard_of_classes("cross_entropy", "logits", logits, -1)
    check_loss("cross_entropy", logits, "logits", target, token_weights, reduction, options)
    dtype = logits.dtype
    class_weights = check_class_weights("cross_entropy", class_weights, V, logits.device, dtype)
    terms = LossTerms(options, class_weights, token_scaling, return_z_loss, shard is not None)
    target, weights = checked_loss_weights(target, V, ignore_index, reduction, token_weights, dtype, class_weights)
    mean_weights = terms.mean_weights(V, logits)
    if shard is not None:
        from ligermodels.ops.loss.sharded_numbers import sharded_numbers

        found = sharded_numbers(
            logits, target, shard, terms.of_kernels, return_lse=terms.needs_lse, class_weights=mean_weights
        )
    elif use_kernels(logits):
        arguments = (logits, target, mean_weights, terms.of_kernels, terms.needs_lse)
        found = RowNumbers(*_CrossEntropy.apply(*arguments))
    else:
        return _by_reference(logits, target, terms, weights, reduction)
    losses, z_losses = terms.losses(found, weights)
    return terms.results(losses if reduction == "none" else losses.sum(), z_losses, reduction, found)


def cross_entropy_reference(
    logits: Tensor, target: Tensor, *, reduction: Reduction = "mean", token_weights: Tensor | None = None,
    class_weights: Tensor | None = None, token_scaling: bool = False, return_z_loss: bool = False, **options: Any,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """The specification of `cross_entropy`, in plain torch; the same arguments."""
    chosen = LossOptions(**options)
    V, dtype = logits.shape[-1], logits.dtype
    check_targets(target, V, chosen.ignore_index)
    class_weights = check_class_weights("cross_entropy", class_weights, V, logits.device, dtype)
    terms = LossTerms(chosen, class_weights, token_scaling, return_z_loss)
    weights = class_loss_weights(target, chosen.ignore_index, reduction, token_weights, class_weights, dtype)
    return _by_reference(logits, target, terms, weights, reduction)


def _by_reference(
    logits: Tensor, target: Tensor, terms: LossTerms, weights: LossWeights, reduction: Reduction
) -> Tensor | tuple[Tensor, ...]:
    means = terms.mean_weights(logits.shape[-1], logits)
    found = row_numbers_reference(logits, target, terms.of_kernels, means, terms.needs_lse)
    losses, z_losses = terms.losses(found, weights)
    return terms.results(losses if reduction == "none" else losses.sum(), z_losses, reduction, found)


@custom_op()
def _cross_entropy_forward(
    logits: Tensor, target: Tensor, class_weights: Tensor | None, ignore_index: int, label_smoothing: float,
    z_loss: float, softcap: float | None, logit_scale: float, return_rank: bool, return_predicted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Each row's loss, max, sum of exp(x - max), rank, predicted class, and mean of class_weights * x; those
    not asked for are empty. A target out of range counts as ignored: targets have been checked."""
    losses, maxima, totals = (target.new_empty(target.shape, dtype=torch.float32) for _ in range(3))
    ranks, predicted = (target.new_empty(target.shape if r else (0,)) for r in (return_rank, return_predicted))
    means = losses.new_empty((0,) if class_weights is None else losses.shape)
    if is_fake(losses):
        return losses, maxima, totals, ranks, predicted, means
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, return_rank)
    launch_rows(
        as_rows(logits), target.contiguous(), losses, ranks, options, maxima=maxima, totals=totals,
        predicted=predicted if return_predicted else None, means=None if class_weights is None else means,
        class_weights=class_weights,
    )  # fmt: skip
    return losses, maxima, totals, ranks, predicted, means


@custom_op()
def _cross_entropy_backward(
    dlosses: Tensor, dlses: Tensor | None, dmeans: Tensor | None, logits: Tensor, target: Tensor,
    class_weights: Tensor | None, maxima: Tensor, totals: Tensor, ignore_index: int, label_smoothing: float,
    z_loss: float, softcap: float | None, logit_scale: float, return_rank: bool, return_predicted: bool,
) -> Tensor:  # fmt: skip
    """The gradient of the logits, given those of each row's loss, log-sum-exp and mean."""
    gradient = logits.new_empty(logits.shape)
    if is_fake(gradient):
        return gradient
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    dlses, dmeans = (None if d is None else d.contiguous() for d in (dlses, dmeans))
    launch_gradient(
        as_rows(logits), as_rows(gradient), target.contiguous(), maxima, totals, dlosses.contiguous(), options,
        lse_weights=dlses, mean_weights=dmeans, class_weights=None if dmeans is None else class_weights,
    )  # fmt: skip
    return gradient


class _CrossEntropy(torch.autograd.Function):
    """The `RowNumbers` without entropies; empty, or None, where not asked for."""

    @staticmethod
    def forward(ctx, logits, target, class_weights, options, return_lse):
        losses, maxima, totals, ranks, predicted, means = _cross_entropy_forward(
            logits, target, class_weights, *options
        )
        ctx.save_for_backward(logits, target, class_weights, maxima, totals)
        ctx.options, ctx.asked = options, (return_lse, class_weights is not None)
        ctx.set_materialize_grads(False)  # None tells what the loss does not use
        lses = maxima + totals.log() if return_lse else None
        means = means if class_weights is not None else None
        ctx.mark_non_differentiable(ranks, predicted)
        return losses, ranks, predicted, None, lses, means

    @staticmethod
    @once_differentiable
    def backward(ctx, dlosses, _ranks, _predicted, _entropies, dlses, dmeans):
        # A compiled graph has zeros for None, also for what was not asked for.
        dlses, dmeans = (d if used else None for d, used in zip((dlses, dmeans), ctx.asked, strict=True))
        return (_cross_entropy_backward(dlosses, dlses, dmeans, *ctx.saved_tensors, *ctx.options),)
