"""Numbers of each row straight from hidden states, by chunks of rows, each with any gradient.

With effective logits x as at the head of `token_losses`, p = softmax(x) and lse = log sum exp x, each row has

    -log_prob = lse - x_y        entropy = -sum p log p = lse - sum p x        lse        mean of w_j x_j

What the gradients are multiplied by is known only in the backward pass. If the head is trained, that pass recomputes
the logits, by chunks of classes (`linear_columns`): four GEMMs in all. If only the hidden states need a gradient, the
forward pass computes that of each row's log-probability, and the backward pass multiplies it by the row's factor: two
GEMMs, whatever the loss.
"""

import torch
from torch import Tensor

from ligermodels.ops.loss.chunks import Head, linear_rows
from ligermodels.ops.loss.linear_columns import linear_columns
from ligermodels.ops.loss.token_losses import LossOptions, RowNumbers
from ligermodels.ops.runtime.library import once_differentiable


def linear_numbers(
    head: Head, options: LossOptions, memory_budget: int, *, return_entropy: bool = False, return_lse: bool = False,
    class_weights: Tensor | None = None, keep: bool = True,
) -> RowNumbers:  # fmt: skip
    """The `RowNumbers` of a head's rows; `losses` are -log p_y. What is not asked for is empty, or has no gradient.

    options: without label smoothing and z-loss. class_weights: (V,), those of the means, if these are asked for.
    keep: whether the forward pass keeps the gradient of -log p_y where it can, which serves if the loss uses no other.
    """
    if head.shard is not None:
        from ligermodels.ops.loss.sharded_numbers import sharded_linear_numbers  # imports DTensors

        return sharded_linear_numbers(
            head, options, memory_budget, return_entropy=return_entropy, return_lse=return_lse,
            class_weights=class_weights,
        )  # fmt: skip
    asked = (return_entropy, return_lse, class_weights is not None)
    return RowNumbers(
        *_LinearNumbers.apply(
            *head[:4], class_weights, head.num_targets, head.needs, options, asked, memory_budget, keep
        )
    )


class _LinearNumbers(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden, weight, bias, target, class_weights, num_targets, needs, options, asked, memory_budget, keep
    ):  # fmt: skip
        kept = keep and needs == (True, False, False) and hidden.dtype != torch.float16
        ones = torch.ones_like(target, dtype=torch.promote_types(hidden.dtype, torch.float32))
        return_entropy, _, return_mean = asked
        losses, ranks, predicted, entropies, maxima, totals, means, dx, _, _ = linear_rows(
            hidden, weight, bias, target, ones, class_weights, *options, return_entropy, True, return_mean,
            memory_budget, num_targets, kept, False, False,
        )  # fmt: skip
        others = entropies, maxima + totals.log(), means
        inputs = hidden, weight, bias, target
        ctx.save_for_backward(*inputs, maxima, totals, entropies, class_weights, dx if kept else None)
        ctx.options = (options.ignore_index, options.softcap, options.logit_scale, memory_budget, num_targets)
        ctx.asked = asked
        ctx.set_materialize_grads(False)  # None tells what the loss does not use
        ctx.mark_non_differentiable(ranks, predicted, *(x for x, used in zip(others, asked, strict=True) if not used))
        return losses, ranks, predicted, *others

    @staticmethod
    @once_differentiable
    def backward(ctx, of_losses, _ranks, _predicted, *of_others):
        *inputs, maxima, totals, entropies, class_weights, dx = ctx.saved_tensors
        # A compiled graph has zeros for None, also for what was not asked for.
        of_others = tuple(g if used else None for g, used in zip(of_others, ctx.asked, strict=True))
        if of_losses is None:
            of_losses = torch.zeros_like(maxima)
        if dx is not None and all(g is None for g in of_others):
            return ((dx * of_losses.unsqueeze(-1)).to(dx.dtype),)
        return linear_columns(
            *inputs, maxima, totals, None if of_others[0] is None else entropies, of_losses, *of_others,
            None if of_others[2] is None else class_weights, *ctx.options, *ctx.needs_input_grad[:3],
        )  # fmt: skip
