"""Cross entropy of logits. The head of `token_losses` has the formula, the head of `loss_terms` the formula with class
weights and token scaling."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.arguments import check_flags
from ligermodels.ops.loss.loss_terms import LossTerms, LossWeights, has_one_weight, term_weights
from ligermodels.ops.loss.row_statistics import pack_results, row_statistics_reference, unpack_gradients
from ligermodels.ops.loss.sharded_statistics import sharded_statistics
from ligermodels.ops.loss.token_losses import (
    LogitRows,
    LossOptions,
    Reduction,
    RowGradients,
    RowOutputs,
    check_targets,
    checked_class_weights,
    checked_loss_weights,
    loss_weights,
    with_extras,
)
from ligermodels.ops.loss.token_losses_kernels import launch_gradient, launch_rows
from ligermodels.ops.runtime.checks import Signature
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import custom_op, is_dtensor, is_fake, once_differentiable
from ligermodels.ops.runtime.tensors import as_rows

_TENSORS = Signature(logits="... V+", target="... int64", token_weights="... ?")


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
    """Cross entropy of logits against class indices (formulas: heads of `token_losses` and `loss_terms`).

    Args:
        logits: (..., V), any floating dtype and strides; or a DTensor that is sharded in its last dimension, over ranks
            with the same rows (see `sharded_statistics`): the results are plain tensors, the same on all ranks.
        target: class indices, int64 (...), in [0, V) or `ignore_index`.
        ignore_index: the target of ignored rows, which have no loss and a gradient of exact zeros. Default: -100.
        reduction: "mean" (default): the sum of the losses over the number of rows that are not ignored, or over the sum
            of their token weights times class weights (z-loss: of their token weights). If that sum is 0, so are loss
            and gradients, where torch returns nan. "sum", or "none": a loss for each row, (...).
        token_weights: floating (...): factors of the rows' losses, without a gradient. Not negative for "mean".
        class_weights: floating (V,): `weight` of torch's cross_entropy, also for label smoothing; without a gradient.
            The z-loss is not weighted by class, as in Liger-Kernel.
        token_scaling: multiply each row's loss, z-loss included, by the probability of its target, without a gradient.
        label_smoothing: in [0, 1], the fraction of the target distribution that is spread over all classes. Default: 0.
        z_loss: coefficient of the squared log-sum-exp, 0 or above. Default: 0.
        softcap: positive: logits become softcap * tanh(logits / softcap). Default: no cap.
        logit_scale: positive factor of the logits, before the softcap. Default: 1.
        return_rank: also return the number of classes that rank before the target, int64 (...), -1 for ignored rows:
            classes with a larger logit, or with an equal logit and a smaller index. rank < k is top-k accuracy.
        return_z_loss: also return the part of the loss that is the z-loss, reduced as the loss, without a gradient.
        return_predicted: also return the class of the largest logit, the first one of equal logits, int64 (...), -1 for
            ignored rows.

    Returns:
        The loss, float32 (float64 for float64 logits); or a tuple of the loss and the requested extras, in this order:
        ranks, z-loss, predicted classes.

    Raises:
        InputError: shapes, dtypes, devices or options do not fit, or, on the CPU, a target is out of range. On CUDA
            such a target fails a device-side assertion, without a wait for the device, and is never used as an index;
            with `set_host_checks` it is an InputError there too.

    Examples:
        >>> logits = torch.randn(2, 16, 1000, requires_grad=True)
        >>> target = torch.randint(1000, (2, 16))
        >>> ops.cross_entropy(logits, target, label_smoothing=0.1).backward()
    """
    check_flags(
        "cross_entropy", token_scaling=token_scaling, return_rank=return_rank, return_z_loss=return_z_loss,
        return_predicted=return_predicted,
    )  # fmt: skip
    options, shard = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale), None
    if is_dtensor(logits) and logits.ndim:
        from ligermodels.ops.runtime.class_shards import shard_of_classes  # imports DTensors

        logits, shard = shard_of_classes("cross_entropy", "logits", logits, -1)
    _TENSORS.check("cross_entropy", logits, target, token_weights)
    options.check("cross_entropy", reduction)
    V = logits.shape[-1] if shard is None else shard.num_classes
    divided = class_weights is None
    if class_weights is not None:
        class_weights = checked_class_weights("cross_entropy", class_weights, V, logits)
    target, row_weights = checked_loss_weights(target, V, ignore_index, reduction, token_weights, logits.dtype, divided)
    weights = term_weights(row_weights, target, class_weights, reduction)
    fused = shard is None and has_one_weight(options, class_weights, token_scaling)
    terms = LossTerms(options, class_weights, token_scaling, fused)
    outputs = terms.outputs(return_rank, return_z_loss, return_predicted)
    arguments = logits, target, terms.kernel_options, outputs, terms.mean_weights(V, logits)
    if shard is not None:
        rows = sharded_statistics(*arguments, shard)
    elif use_kernels(logits):
        rows = LogitRows.unpack(target, _CrossEntropy.apply(*arguments), outputs)
    else:
        rows = row_statistics_reference(*arguments)
    return _reduced(terms, rows, weights, reduction, return_z_loss)


def cross_entropy_reference(
    logits: Tensor, target: Tensor, *, reduction: Reduction = "mean", token_weights: Tensor | None = None,
    class_weights: Tensor | None = None, token_scaling: bool = False, return_rank: bool = False,
    return_z_loss: bool = False, return_predicted: bool = False, **options: Any,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """The specification of `cross_entropy`, in plain torch.

    Args:
        logits: (..., V).
        target: int64 (...).
        reduction: "mean", "sum" or "none".
        token_weights: floating (...), or None.
        class_weights: floating (V,), or None.
        token_scaling: whether each row's loss is multiplied by the probability of its target.
        return_rank: whether to return the ranks.
        return_z_loss: whether to return the z-loss.
        return_predicted: whether to return the predicted classes.
        options: fields of `LossOptions`.
    """
    loss_options = LossOptions(**options)
    check_targets(target, logits.shape[-1], loss_options.ignore_index)
    divided = class_weights is None
    if class_weights is not None:
        class_weights = checked_class_weights("cross_entropy", class_weights, logits.shape[-1], logits)
    row_weights = loss_weights(target, loss_options.ignore_index, reduction, token_weights, logits.dtype, divided)
    weights = term_weights(row_weights, target, class_weights, reduction)
    fused = has_one_weight(loss_options, class_weights, token_scaling)
    terms = LossTerms(loss_options, class_weights, token_scaling, fused)
    outputs = terms.outputs(return_rank, return_z_loss, return_predicted)
    means = terms.mean_weights(logits.shape[-1], logits)
    rows = row_statistics_reference(logits, target, terms.kernel_options, outputs, means)
    return _reduced(terms, rows, weights, reduction, return_z_loss)


def _reduced(
    terms: LossTerms, rows: LogitRows, weights: LossWeights, reduction: Reduction, return_z_loss: bool
) -> Tensor | tuple[Tensor, ...]:
    losses, z_losses = terms.losses(rows, weights), terms.z_losses(rows, weights) if return_z_loss else None
    if reduction != "none":
        losses, z_losses = losses.sum(), None if z_losses is None else z_losses.sum()
    return with_extras(losses, rows.ranks, z_losses, rows.predicted)


@custom_op()
def _cross_entropy_forward(
    logits: Tensor, target: Tensor, class_weights: Tensor | None, ignore_index: int, label_smoothing: float,
    z_loss: float, softcap: float | None, logit_scale: float, outputs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """The packed statistics of `LogitRows`. A target out of range counts as ignored: targets have been checked."""
    rows = LogitRows.empty(target.contiguous(), torch.float32, RowOutputs(*outputs))
    if not is_fake(logits):
        options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
        launch_rows(as_rows(logits), rows, options, class_weights)
        rows.fill_lses()
    return rows.pack()


@custom_op()
def _cross_entropy_backward(
    dlosses: Tensor, dlses: Tensor | None, dmeans: Tensor | None, logits: Tensor, target: Tensor,
    class_weights: Tensor | None, maxima: Tensor, totals: Tensor, ignore_index: int, label_smoothing: float,
    z_loss: float, softcap: float | None, logit_scale: float,
) -> Tensor:  # fmt: skip
    """The gradient by the logits, from the gradients by the loss, log-sum-exp and mean of each row."""
    gradient = logits.new_empty(logits.shape)
    if not is_fake(gradient):
        options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
        rows = LogitRows(target.contiguous(), maxima=maxima, totals=totals)
        gradients = RowGradients(dlosses, lses=dlses, means=dmeans).flat()
        V = logits.shape[-1]
        launch_gradient(as_rows(logits), as_rows(gradient), rows, gradients, options, class_weights, 0, V)
    return gradient


class _CrossEntropy(torch.autograd.Function):
    """The packed statistics of `LogitRows`, without entropies."""

    @staticmethod
    def forward(ctx, logits, target, options, outputs, class_weights):
        requested = outputs._replace(lses=True)
        packed = _cross_entropy_forward(logits, target, class_weights, *options, requested)
        rows = LogitRows.unpack(target, packed, requested)
        ctx.save_for_backward(logits, class_weights, *rows.for_gradients())
        ctx.options, ctx.outputs = options, outputs
        return pack_results(ctx, rows, outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *by_fields):
        logits, class_weights, *fields = ctx.saved_tensors
        rows = LogitRows(*fields)
        by = unpack_gradients(ctx.outputs, rows, by_fields)
        return (
            _cross_entropy_backward(
                by.losses, by.lses, by.means, logits, rows.target, class_weights, rows.maxima, rows.totals, *ctx.options
            ),
        )  # fmt: skip
