"""The cross entropy of a linear head with class weights, token scaling or sharded classes, and with further results.

Where one weight for the whole loss of a row is enough, the forward pass computes the gradients, as in `linear_loss`,
and the further statistics beside them. Otherwise `loss_terms` sums the loss from `linear_statistics`: the backward pass
recomputes the logits.
"""

import torch
from torch import Tensor

from ligermodels.ops.loss.chunks import keep_gradients
from ligermodels.ops.loss.linear_head import LinearHead, LinearLoss
from ligermodels.ops.loss.linear_statistics import linear_rows, linear_statistics
from ligermodels.ops.loss.loss_terms import LossTerms, has_one_weight, term_weights
from ligermodels.ops.loss.token_losses import LogitRows, LossOptions, Reduction, checked_class_weights, with_extras


def linear_loss_terms(
    head: LinearHead, options: LossOptions, *, reduction: Reduction, class_weights: Tensor | None, token_scaling: bool,
    return_rank: bool, return_z_loss: bool, return_predicted: bool,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """The loss, or a tuple of the loss and the requested results: ranks, z-loss, predicted classes.

    Args:
        head: the checked arguments of `linear_cross_entropy`; with class weights, its loss weights are not divided.
        options: the options of the loss.
        reduction: "mean", "sum" or "none".
        class_weights: floating (V,), or None.
        token_scaling: whether a row's loss is multiplied by the probability of its target.
        return_rank: whether the ranks are returned.
        return_z_loss: whether the z-loss is returned.
        return_predicted: whether the predicted classes are returned.
    """
    if class_weights is not None:
        class_weights = checked_class_weights("linear_cross_entropy", class_weights, head.num_classes, head.hidden)
    fused, reduced = has_one_weight(options, class_weights, token_scaling), reduction != "none"
    weights = term_weights(head.loss_weights, head.target, class_weights, reduction)
    terms = LossTerms(options, class_weights, token_scaling, fused and head.shard is None)
    outputs = terms.outputs(return_rank, return_z_loss, return_predicted)
    if terms.fused:
        packed = _LinearLossAndMore.apply(
            *head[:4], weights.nll, head.needs, options, outputs, head.memory_budget, reduced
        )
        rows = LogitRows.unpack(head.target, packed, outputs)
        loss = rows.losses
    else:
        rows = linear_statistics(
            head, terms.kernel_options, outputs, class_weights=terms.mean_weights(head.num_classes, head.hidden),
            keep=not outputs.lses,
        )  # fmt: skip
        loss = _reduced(terms.losses(rows, weights), reduced)
    z_losses = _reduced(terms.z_losses(rows, weights), reduced) if return_z_loss else None
    extras = head.restore(rows.ranks, -1), head.restore(z_losses, 0), head.restore(rows.predicted, -1)
    return with_extras(head.restore(loss, 0), *extras)


def _reduced(losses: Tensor, reduced: bool) -> Tensor:
    return losses.sum() if reduced else losses


class _LinearLossAndMore(torch.autograd.Function):
    """`LinearLoss` and the requested statistics, which have no gradients."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, loss_weights, needs, options, outputs, memory_budget, reduced):
        inputs = hidden, weight, bias, target, loss_weights
        now = needs if reduced and hidden.dtype != torch.float16 else (False, False, False)
        *statistics, dx, dw, db = linear_rows(*inputs, None, *options, outputs, memory_budget, now, None, ())
        keep_gradients(ctx, inputs, [dx, dw, db], now)
        ctx.options, ctx.memory_budget = options, memory_budget
        losses, *others = statistics[: 1 + sum(outputs)]
        ctx.mark_non_differentiable(*others)
        return _reduced(losses * loss_weights, reduced), *others

    backward = staticmethod(LinearLoss.backward)
