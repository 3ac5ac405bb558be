"""The language-model head and its cross entropy in one op, by chunks of rows, so that the logits never exist whole.

With reduction "mean" or "sum" the forward pass computes the gradients too: per chunk one GEMM for the logits, the loss,
the gradient in place of the logits, and one GEMM for each gradient that is needed. The backward pass only scales them.
The backward pass recomputes the logits with reduction "none", because only it knows the weights of the rows, and in
float16, because gradients of logits underflow without the loss scale. It also does with token scaling, and with class
weights beside label smoothing or a z-loss: `loss_terms` sums these losses from `linear_statistics`.
"""

from typing import Any

import torch
from torch import Tensor

from ligermodels.ops.loss.chunks import linear_loss
from ligermodels.ops.loss.cross_entropy import cross_entropy_reference
from ligermodels.ops.loss.gradient_sum import keep_gradients, kept_gradients
from ligermodels.ops.loss.linear_head import LinearHead, checked_head
from ligermodels.ops.loss.linear_statistics import linear_statistics
from ligermodels.ops.loss.loss_terms import LossTerms, has_one_weight, weighted_z_losses
from ligermodels.ops.loss.loss_weights import with_extras
from ligermodels.ops.loss.token_losses import LossOptions, Reduction, RowOutputs, Rows
from ligermodels.ops.runtime.library import once_differentiable


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
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
    memory_budget: int = 2**30,
    num_targets: int | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`cross_entropy(hidden @ weight.T + bias, target)` without the logits in memory; exact, gradients included.

    A gradient is computed only if its operand requires it; under no_grad only the loss is computed. Eagerly, the first
    backward pass returns the gradients of the forward pass, and another one over a retained graph recomputes them. In
    bfloat16 they are rounded before they are multiplied by the gradient of the loss, and once more if that is no power
    of two.

    Args:
        hidden: hidden states, (..., H), any floating dtype and strides.
        weight: (V, H), the dtype of `hidden`; under autocast both are cast to its dtype. It may be a DTensor that is
            sharded by classes, over ranks with the same hidden states and targets: then no rank computes all logits of
            a row, and the gradient of `hidden` is summed over the ranks (see `sharded_statistics`).
        target: class indices, int64 (...), in [0, V) or `ignore_index`.
        bias: (V,), the dtype and sharding of `weight`; by default none.
        ignore_index: the target of ignored rows, which have no loss and a gradient of exact zeros. Default: -100.
        reduction: "mean" (default): the sum of the losses over the number of rows that are not ignored, or over the sum
            of their token weights times class weights (z-loss: of their token weights); 0 if that sum is 0. "sum", or
            "none": a loss for each row, (...).
        token_weights: floating (...), not negative: factors of the rows' losses, without a gradient.
        class_weights: floating (V,): `weight` of torch's cross_entropy, without a gradient; not used for the z-loss.
        token_scaling: multiply each row's loss by the probability of its target, without a gradient. This, and class
            weights beside label smoothing or a z-loss, cost one more GEMM, because the backward pass recomputes logits.
        label_smoothing: in [0, 1], the fraction of the target distribution that is spread over all classes. Default: 0.
        z_loss: coefficient of the squared log-sum-exp, 0 or above. Default: 0.
        softcap: positive: logits become softcap * tanh(logits / softcap). Default: no cap.
        logit_scale: positive factor of the logits, before the softcap. Default: 1.
        return_rank: also return the number of classes that rank before the target, int64 (...), -1 for ignored rows.
        return_z_loss: also return the part of the loss that is the z-loss, reduced as the loss, without a gradient.
        return_predicted: also return the class of the largest logit, int64 (...), -1 for ignored rows.
        memory_budget: bytes for the logits of a chunk and everything computed from them; a chunk has at least one row.
            Gradients are not included. With several chunks and a 16-bit weight, the float32 sum of the weight's
            gradient takes the memory of this gradient once more (`GradientSum`): from the budget if it is at most half
            of it, else in addition. Default: 1 GiB.
        num_targets: the number of targets that are not ignored, if the host knows it: the GEMMs then skip ignored rows,
            and a copy of the other hidden states is kept. On the CPU it is counted. On CUDA counting would wait for the
            device, so that without it no row is skipped.

    Returns:
        The loss, float32 (float64 for float64 `hidden`); or a tuple of the loss and the requested extras, in the order
        ranks, z-loss, predicted classes.

    Raises:
        InputError: shapes, dtypes, devices or options do not fit, or, on the CPU, a target is out of range. On CUDA
            such a target fails a device-side assertion, unless `set_host_checks` is on.

    Examples:
        >>> hidden = torch.randn(2, 16, 64, requires_grad=True)
        >>> weight = torch.randn(1000, 64, requires_grad=True)
        >>> target = torch.randint(1000, (2, 16))
        >>> loss = ops.linear_cross_entropy(hidden, weight, target)
        >>> loss.backward()
        >>> loss, rank = ops.linear_cross_entropy(hidden, weight, target, return_rank=True)
        >>> top_5_accuracy = (rank < 5).float().mean()
    """
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    head = checked_head(
        "linear_cross_entropy", hidden, weight, target, bias, options, memory_budget=memory_budget,
        num_targets=num_targets, reduction=reduction, token_weights=token_weights, class_weights=class_weights,
    )  # fmt: skip
    outputs, z_losses = RowOutputs(return_rank, return_predicted, lses=return_z_loss), None
    if head.shard is None and has_one_weight(options, class_weights, token_scaling):
        rows = _fused(head, options, outputs, reduced=reduction != "none")
        loss = rows.losses
        if return_z_loss:
            z_losses = weighted_z_losses(rows, head.loss_weights, options)
    else:
        rows, losses, z_losses = _by_terms(head, LossTerms(options, head.class_weights, token_scaling, False), outputs)
        loss = losses if reduction == "none" else losses.sum()
    if z_losses is not None and reduction != "none":
        z_losses = z_losses.sum()
    extras = head.restore(rows.ranks, -1), head.restore(z_losses, 0), head.restore(rows.predicted, -1)
    return with_extras(head.restore(loss, 0), *extras)


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor | tuple[Tensor, ...]:
    """The specification of `linear_cross_entropy`, in plain torch, with all the logits.

    Args:
        hidden: (..., H).
        weight: (V, H).
        target: int64 (...).
        bias: (V,), or None.
        options: keyword arguments of `linear_cross_entropy`.
    """
    for name in ("memory_budget", "num_targets"):
        options.pop(name, None)
    return cross_entropy_reference(torch.nn.functional.linear(hidden, weight, bias), target, **options)


def _fused(head: LinearHead, options: LossOptions, outputs: RowOutputs, *, reduced: bool) -> Rows:
    """The requested statistics, and as `losses` the reduced loss or the weighted losses of rows."""
    tensors = head.hidden, head.weight, head.bias, head.target, head.loss_weights.nll
    packed = _LinearCrossEntropy.apply(*tensors, head.needs, options, outputs, head.memory_budget, reduced)
    return Rows.unpack(head.target, packed, outputs)


class _LinearCrossEntropy(torch.autograd.Function):
    """The reduced loss or the weighted losses of rows, and the requested statistics, which have no gradients."""

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, target, loss_weights, needs, options, outputs, memory_budget, reduced
    ):  # fmt: skip
        inputs = hidden, weight, bias, target, loss_weights
        now = needs if reduced and hidden.dtype != torch.float16 else (False, False, False)
        *statistics, dx, dw, db = linear_loss(*inputs, None, *options, outputs, memory_budget, now, None, ())
        keep_gradients(ctx, inputs, [dx, dw, db], now)
        ctx.options, ctx.memory_budget = options, memory_budget
        losses, *others = statistics[: 1 + sum(outputs)]
        ctx.mark_non_differentiable(*others)
        losses = losses * loss_weights
        return losses.sum() if reduced else losses, *others

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        kept = kept_gradients(ctx, grad)
        if kept is not None:
            return kept
        *inputs, loss_weights = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        return linear_loss(
            *inputs, loss_weights * grad, None, *ctx.options, RowOutputs(), ctx.memory_budget, needs, None, ()
        )[-3:]  # fmt: skip


def _by_terms(head: LinearHead, terms: LossTerms, outputs: RowOutputs) -> tuple[Rows, Tensor, Tensor | None]:
    """The requested statistics, the weighted losses of rows, and their z-losses if lses are requested."""
    requested = terms.outputs(outputs.ranks, outputs.lses, outputs.predicted)
    rows = linear_statistics(
        head, terms.kernel_options, requested, class_weights=terms.mean_weights(head.num_classes, head.hidden),
        keep=not (terms.separate or outputs.lses),
    )  # fmt: skip
    losses = terms.losses(rows, head.loss_weights)
    return rows, losses, terms.z_losses(rows, head.loss_weights) if outputs.lses else None
