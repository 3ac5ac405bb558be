"""Statistics of each row from hidden states, by chunks of rows, each statistic differentiable.

With effective logits x as at the head of `token_losses`, p = softmax(x) and lse = log sum exp x, the statistics are

    -log p_y = lse - x_y        entropy = -sum p log p = lse - sum p x        lse        mean of w_j x_j

Only the backward pass knows the gradients by the statistics. If the head is trained, it goes by chunks of classes
(`linear_gradients`) and recomputes the logits that the forward pass has not kept (`kept_logits`): three to four GEMMs
in all. If only the hidden states need a gradient, the forward pass computes the gradient of each row's -log p_y, and
the backward pass multiplies it by the gradient of the row: two GEMMs.
"""

import torch
from torch import Tensor

from ligermodels.ops.loss.chunks import linear_loss
from ligermodels.ops.loss.kept_logits import rows_to_keep, statistics_and_logits
from ligermodels.ops.loss.linear_gradients import gradients_from_kept, linear_gradients
from ligermodels.ops.loss.linear_head import LinearHead
from ligermodels.ops.loss.row_statistics import RowOutputs, RowStatistics, pack_results, unpack_gradients
from ligermodels.ops.loss.sampler import ALL_CLASSES, RowSampler, SamplerOptions
from ligermodels.ops.loss.token_losses import LossOptions
from ligermodels.ops.runtime.library import once_differentiable


def linear_statistics(
    head: LinearHead, options: LossOptions, outputs: RowOutputs, *, class_weights: Tensor | None = None,
    keep: bool = True, inverse_temperatures: Tensor | None = None, sampled: SamplerOptions = ALL_CLASSES,
) -> tuple[RowStatistics, Tensor | None]:  # fmt: skip
    """The statistics of the rows of a head, and the log mass of the kept classes; `losses` are -log p_y.

    Args:
        head: the checked arguments.
        options: the options of the loss, without label smoothing and z-loss.
        outputs: the requested statistics.
        class_weights: (V,), of the means, if these are requested.
        keep: whether the forward pass computes the gradient of -log p_y if only hidden states need a gradient. This is
            used if no other statistic gets a gradient.
        inverse_temperatures: of the head's rows, or None.
        sampled: the classes that a sampler keeps; the statistics are of these. The log mass is None if all are kept.
    """
    if head.shard is not None:
        from ligermodels.ops.loss.sharded_statistics import sharded_linear_statistics  # imports DTensors

        return sharded_linear_statistics(
            head, options, outputs, class_weights=class_weights, inverse_temperatures=inverse_temperatures,
            sampled=sampled,
        )  # fmt: skip
    packed = _LinearStatistics.apply(
        *head[:4], class_weights, inverse_temperatures, options, outputs, sampled, head.memory_budget, head.needs, keep
    )  # fmt: skip
    packed, log_masses = (packed[:-1], packed[-1]) if sampled.filters else (packed, None)
    return RowStatistics.unpack(packed, outputs), log_masses


class _LinearStatistics(torch.autograd.Function):
    """The packed `RowStatistics`, and if classes are dropped the log mass of the others, which has no gradient."""

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, target, class_weights, inverse_temperatures, options, outputs, sampled,
        memory_budget, needs, keep,
    ):  # fmt: skip
        inputs = hidden, weight, bias, target, class_weights
        requested = outputs._replace(lses=True)
        keep_gradient = keep and needs == (True, False, False) and hidden.dtype != torch.float16
        rows_kept = None if keep_gradient else rows_to_keep(hidden, len(weight), memory_budget, needs)
        dx = ctx.kept = None
        if rows_kept:
            rows, sampler, ctx.kept = statistics_and_logits(
                *inputs, options, requested, memory_budget, rows_kept, inverse_temperatures, sampled
            )
        else:
            ones = torch.ones_like(target, dtype=torch.promote_types(hidden.dtype, torch.float32))
            results = linear_loss(
                *inputs[:4], ones, class_weights, *options, requested, memory_budget, (keep_gradient, False, False),
                inverse_temperatures, *sampled,
            )  # fmt: skip
            results, of_sampler = (results[:-2], results[-2:]) if sampled.filters else (results, ())
            sampler = RowSampler(inverse_temperatures, *of_sampler)
            *packed, dx, _, _ = results
            rows = RowStatistics.unpack(packed, requested)
        ctx.save_for_backward(
            *inputs, rows.maxima, rows.totals, rows.entropies, dx if keep_gradient else None, *sampler[:2]
        )
        ctx.options, ctx.outputs, ctx.memory_budget = options, outputs, memory_budget
        return pack_results(ctx, rows, outputs, sampler.log_masses)

    @staticmethod
    @once_differentiable
    def backward(ctx, *by_fields):
        hidden, weight, bias, target, class_weights, maxima, totals, entropies, dx, *of_sampler = ctx.saved_tensors
        sampler = RowSampler(*of_sampler)
        if sampler.dropped_bits is not None:
            by_fields = by_fields[:-1]  # the log masses have no gradient
        gradients = unpack_gradients(ctx.outputs, maxima, by_fields)
        if dx is not None and all(g is None for g in gradients[1:]):
            return ((dx * gradients.losses.unsqueeze(-1)).to(dx.dtype),)
        kept, ctx.kept = ctx.kept, None  # once: the gradients overwrite them
        if kept is not None:
            return gradients_from_kept(
                kept, hidden, weight, bias, target, maxima, totals, entropies, gradients, class_weights, ctx.options,
                sampler, ctx.needs_input_grad[:3],
            )  # fmt: skip
        return linear_gradients(
            hidden, weight, bias, target, maxima, totals, entropies, *gradients, class_weights,
            ctx.options.ignore_index, ctx.options.softcap, ctx.options.logit_scale, ctx.memory_budget,
            ctx.needs_input_grad[:3], *sampler[:2],
        )  # fmt: skip
