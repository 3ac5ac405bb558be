"""The language model head and its cross entropy in one op, by chunks of rows, so that the logits never exist whole.

With reduction "mean" or "sum" the forward pass computes the gradients too: per chunk one GEMM for the logits, the loss,
whose gradient takes their place, and one GEMM for each gradient that is needed. The backward pass only scales them.
With reduction "none", whose factors are known only in the backward pass, and in float16, where the gradients of logits
underflow without the loss scale, the backward pass recomputes the logits. So it does with token scaling, and with class
weights beside label smoothing or a z-loss: these losses are put together above `linear_numbers`.
"""

from typing import Any

import torch
from torch import Tensor

from ligermodels.ops.loss.chunks import checked_head, keep_gradients, kept_gradients, linear_rows
from ligermodels.ops.loss.cross_entropy import cross_entropy_reference
from ligermodels.ops.loss.linear_numbers import linear_numbers
from ligermodels.ops.loss.loss_terms import LossTerms
from ligermodels.ops.loss.token_losses import LossOptions, Reduction, RowNumbers
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

    hidden: (..., H), any floating dtype and strides. weight: (V, H) and bias: (V,), of hidden's dtype (under autocast
        all three are cast to its dtype). target, weights of tokens and classes, and the options: as in `cross_entropy`,
        and the result. weight and bias may be DTensors that are sharded by classes, over ranks that have all else
        alike: no rank then has all logits of a row, and the gradient of hidden is that of the whole (see
        `sharded_numbers`).
    memory_budget: bytes for a chunk's logits and for what is computed with them (at least one row is taken, whatever
        it needs). The gradients themselves come on top. With several chunks and a 16-bit weight it takes as much as the
        weight's gradient once more, for that is summed in float32 (`GradientSum`) and rounded once: of the budget, if
        that is no more than half of it, else on top. All rows at once may take that memory too, for they need no sum.
    num_targets: the number of targets that are not ignored, if known on the host: the other rows then take no part in
        the GEMMs. On the CPU it is counted; on CUDA that would wait for the device, so without it no row is skipped.
    A gradient is computed exactly if its own operand requires it; under no_grad only the loss is. Eagerly, the first
    backward pass hands out the gradients of the forward pass; a repeated one over a retained graph computes them anew.
    In bfloat16 they are rounded before they are multiplied by the loss's own gradient, and so once more if that is no
    power of two.
    With token_scaling, and with class_weights beside label_smoothing or z_loss, the backward pass computes the logits
    again. With a frozen head, and neither smoothing nor a z-loss, the gradient of hidden is kept and multiplied, as in
    `linear_log_probs`.
    Raises InputError as `cross_entropy` does.
    """
    options = LossOptions(
        ignore_index, label_smoothing, z_loss, softcap, logit_scale, return_rank, return_predicted
    )  # fmt: skip
    head = checked_head(
        "linear_cross_entropy",
        hidden,
        weight,
        target,
        bias,
        token_weights,
        reduction,
        options,
        memory_budget,
        num_targets,
        class_weights,
    )
    terms = LossTerms(options, head.class_weights, token_scaling, return_z_loss, head.shard is not None)
    if terms.together:
        loss, *others = _LinearCrossEntropy.apply(
            *head[:4], head.loss_weights.of_target, options, return_z_loss, memory_budget, head.num_targets,
            reduction != "none", head.needs,
        )  # fmt: skip
        found = RowNumbers(loss, *others)
        z_losses = terms.z_losses(found, head.loss_weights)
    else:
        found = linear_numbers(
            head, terms.of_kernels, memory_budget, return_lse=terms.needs_lse,
            class_weights=terms.mean_weights(head.num_classes, head.hidden), keep=not terms.needs_lse,
        )  # fmt: skip
        losses, z_losses = terms.losses(found, head.loss_weights)
        loss = losses if reduction == "none" else losses.sum()
    return terms.results(loss, z_losses, reduction, found)


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor | tuple[Tensor, ...]:
    """The specification of `linear_cross_entropy`, in plain torch, with all the logits; the same arguments."""
    for name in ("memory_budget", "num_targets"):
        options.pop(name, None)
    return cross_entropy_reference(torch.nn.functional.linear(hidden, weight, bias), target, **options)


class _LinearCrossEntropy(torch.autograd.Function):
    """The reduced loss (or each row's, times its weight), ranks, predicted classes, None, and log-sum-exps; empty where
    not asked for."""

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, target, loss_weights, options, return_lse, memory_budget, num_targets, reduced, needs
    ):  # fmt: skip
        now = needs if reduced and hidden.dtype != torch.float16 else (False, False, False)
        losses, rank, predicted, _, maxima, totals, _, *gradients = linear_rows(
            hidden, weight, bias, target, loss_weights, None, *options, False, return_lse, False,
            memory_budget, num_targets, *now,
        )  # fmt: skip
        losses, lses = losses * loss_weights, maxima + totals.log()
        numbers = (*options._replace(return_rank=False, return_predicted=False), False, False, False)
        ctx.options = (*numbers, memory_budget, num_targets)
        ctx.mark_non_differentiable(rank, predicted, lses)
        keep_gradients(ctx, (hidden, weight, bias, target, loss_weights), gradients, now)
        return losses.sum() if reduced else losses, rank, predicted, None, lses

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        kept = kept_gradients(ctx, grad)
        if kept is not None:
            return kept
        *inputs, loss_weights = ctx.saved_tensors
        return linear_rows(*inputs, loss_weights * grad, None, *ctx.options, *ctx.needs_input_grad[:3])[-3:]
