"""Statistics of each row from hidden states, by chunks of rows, each statistic differentiable.

With effective logits x as at the head of `token_losses`, p = softmax(x) and lse = log sum exp x, the statistics are

    -log p_y = lse - x_y        entropy = -sum p log p = lse - sum p x        lse        mean of w_j x_j

Only the backward pass knows the gradients by the statistics. If the head is trained, it goes by chunks of classes
(`linear_gradients`) and recomputes the logits that the forward pass has not kept (`kept_logits`): three to four GEMMs
in all. If only the hidden states need a gradient, the forward pass computes the gradient of each row's -log p_y, and
the backward pass multiplies it by the gradient of the row: two GEMMs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.ops.loss.chunks import bytes_beside, chunk_rows, chunks_of_logits, empty_gradients
from ligermodels.ops.loss.cutoffs import bytes_for_cutoffs, fill_dropped
from ligermodels.ops.loss.kept_logits import NO_ROWS, rows_to_keep, statistics_and_logits
from ligermodels.ops.loss.linear_gradients import gradients_from_kept, linear_gradients
from ligermodels.ops.loss.linear_head import LinearHead
from ligermodels.ops.loss.row_statistics import pack_results, rows_in_place, unpack_gradients
from ligermodels.ops.loss.sampler import SamplerOptions, empty_sampler
from ligermodels.ops.loss.sharded_statistics import IGNORED, local_gradients, local_weights, merge, ranks_of_head
from ligermodels.ops.loss.token_losses import LogitRows, LossOptions, RowOutputs
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable


def linear_statistics(
    head: LinearHead, options: LossOptions, outputs: RowOutputs, *, class_weights: Tensor | None = None,
    keep: bool = True, inverse_temperatures: Tensor | None = None, sampled: SamplerOptions | None = None,
) -> LogitRows:  # fmt: skip
    """The statistics of the rows of a head; `losses` are -log p_y.

    Args:
        head: the checked arguments. With a `shard`, weight and bias are of this rank's classes, and the gradient of
            hidden is this rank's part of a sum (`sharded_statistics`).
        options: the options of the loss, without label smoothing and z-loss.
        outputs: the requested statistics.
        class_weights: (V,), of the means, if these are requested.
        keep: whether the forward pass computes the gradient of -log p_y if only hidden states need a gradient. This is
            used if no other statistic gets a gradient.
        inverse_temperatures: of the head's rows, or None.
        sampled: the classes that a sampler keeps; the statistics are of these, and the rows have `log_masses`. Default:
            all classes.
    """
    if head.shard is not None:
        return _sharded(head, options, outputs, class_weights, inverse_temperatures, sampled)
    return _statistics(head, options, outputs, class_weights, inverse_temperatures, sampled, keep)


@torch.compiler.disable
def _sharded(
    head: LinearHead, options: LossOptions, outputs: RowOutputs, class_weights: Tensor | None,
    inverse_temperatures: Tensor | None, sampled: SamplerOptions | None,
) -> LogitRows:  # fmt: skip
    assert head.shard is not None
    without_ranks, weights = outputs._replace(ranks=False), local_weights(class_weights, head.shard)
    rows = _statistics(head, options, without_ranks, weights, inverse_temperatures, sampled, False)
    return rows._replace(ranks=ranks_of_head(head, options.ignore_index) if outputs.ranks else None)


def _statistics(
    head: LinearHead, options: LossOptions, outputs: RowOutputs, class_weights: Tensor | None,
    inverse_temperatures: Tensor | None, sampled: SamplerOptions | None, keep: bool,
) -> LogitRows:  # fmt: skip
    packed = _LinearStatistics.apply(
        head.hidden, head.weight, head.bias, head.target, class_weights, inverse_temperatures, options, outputs,
        sampled, head.memory_budget, head.needs, keep, head.shard,
    )  # fmt: skip
    statistics, log_masses = (packed, None) if sampled is None else (packed[:-1], packed[-1])
    return LogitRows.unpack(head.target, statistics, outputs)._replace(log_masses=log_masses)


@custom_op()
def linear_rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, loss_weights: Tensor,
    class_weights: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None,
    logit_scale: float, outputs: Sequence[bool], memory_budget: int, needs: Sequence[bool],
    inverse_temperatures: Tensor | None, sampled: Sequence[float],
) -> list[Tensor]:  # fmt: skip
    """Losses and statistics of each row of a head, and the gradients of sum(loss_weights * losses).

    Args:
        hidden: (..., H).
        weight: (V, H).
        bias: (V,), or None.
        target: int64 (...), contiguous, checked.
        loss_weights: float32 or float64 (...), contiguous; gives the dtype of the statistics.
        class_weights: (V,), of the means, or None.
        ignore_index: as the following options, see `LossOptions`.
        label_smoothing: in [0, 1].
        z_loss: 0 or above.
        softcap: positive, or None.
        logit_scale: positive.
        outputs: the requested statistics, see `RowOutputs`.
        memory_budget: bytes for a chunk.
        needs: whether the gradients of hidden, weight and bias are needed.
        inverse_temperatures: (...), contiguous, the dtype of the statistics, or None.
        sampled: the `SamplerOptions`; empty if all classes are kept.

    Returns:
        The packed statistics of `LogitRows`; the three gradients, without elements where not needed; and if classes may
        be dropped, the dropped bits and the log masses of `LogitRows`.
    """
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    rows = LogitRows.empty(target, loss_weights.dtype, RowOutputs(*outputs))
    if inverse_temperatures is not None or sampled:
        rows = empty_sampler(rows, inverse_temperatures, len(weight), filtered=bool(sampled))
    gradients = empty_gradients(hidden, weight, bias, needs)
    results = [*rows.pack(), *gradients, *rows.dropped()]
    if is_fake(hidden):
        return results
    if any(needs):
        rows = rows._replace(weights=loss_weights)
    beside = bytes_beside(weight, options, ranks=rows.ranks is not None)
    if sampled:
        beside = max(beside, len(weight) * bytes_for_cutoffs(weight.dtype))
    size = chunk_rows(target.numel(), weight, beside, memory_budget, needs[1])
    for chunk, logits in chunks_of_logits(hidden, weight, bias, size, gradients):
        chunk_of_rows = rows.chunk(chunk)
        if sampled:
            fill_dropped(logits, chunk_of_rows, options, SamplerOptions(int(sampled[0]), *sampled[1:]))
        rows_in_place(logits, chunk_of_rows, options, class_weights)
    rows.fill_lses()
    return results


class _LinearStatistics(torch.autograd.Function):
    """The packed statistics of `LogitRows`; with a sampler that drops classes also the log masses, without gradient."""

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, target, class_weights, inverse_temperatures, options, outputs, sampled,
        memory_budget, needs, keep, shard,
    ):  # fmt: skip
        inside: Any = None
        requested = outputs._replace(lses=True)
        if shard is not None:
            target, _, inside = shard.targets(target, options.ignore_index)
            options = options._replace(ignore_index=IGNORED)
        inputs = hidden, weight, bias, target, class_weights
        keep_gradient = keep and needs == (True, False, False) and hidden.dtype != torch.float16
        num_classes = len(weight) if shard is None else shard.most
        kept_rows = NO_ROWS if keep_gradient else rows_to_keep(hidden, num_classes, memory_budget, needs)
        dx = ctx.kept = None
        if kept_rows or (shard is not None and sampled is not None):
            rows, ctx.kept = statistics_and_logits(
                *inputs, options, requested, memory_budget, kept_rows, inverse_temperatures, sampled, shard
            )
        else:
            ones = torch.ones_like(target, dtype=torch.promote_types(hidden.dtype, torch.float32))
            results = linear_rows(
                hidden, weight, bias, target, ones, class_weights, *options, requested, memory_budget,
                (keep_gradient, False, False), inverse_temperatures, sampled or (),
            )  # fmt: skip
            results, dropped = (results, (None, None)) if sampled is None else (results[:-2], results[-2:])
            *statistics, dx, _, _ = results
            rows = LogitRows.unpack(target, statistics, requested)
            rows = rows._replace(
                inverse_temperatures=inverse_temperatures, dropped_bits=dropped[0], log_masses=dropped[1]
            )
        if shard is not None:
            rows = merge(rows, inside, shard)
        ctx.save_for_backward(
            hidden, weight, bias, class_weights, inside, dx if keep_gradient else None, *rows.for_gradients()
        )
        ctx.options, ctx.outputs, ctx.shard, ctx.memory_budget = options, outputs, shard, memory_budget
        return pack_results(ctx, rows, outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *by_fields):
        hidden, weight, bias, class_weights, inside, dx, *fields = ctx.saved_tensors
        rows, options, needs = LogitRows(*fields), ctx.options, ctx.needs_input_grad[:3]
        gradients = unpack_gradients(ctx.outputs, rows, by_fields)
        if dx is not None and all(g is None for g in gradients[1:]):
            # An ignored row keeps its zeros whatever its gradient: 1 / log_probs gives it an infinite one.
            by_row = gradients.losses.masked_fill(rows.target == options.ignore_index, 0.0)
            return ((dx * by_row.unsqueeze(-1)).to(dx.dtype),)
        if ctx.shard is not None:
            gradients = local_gradients(gradients, inside, ctx.shard)
        kept, ctx.kept = ctx.kept, None  # once: the gradients overwrite them
        if kept is not None:
            return gradients_from_kept(
                kept, hidden, weight, bias, rows, gradients, class_weights, options, needs
            )  # fmt: skip
        return linear_gradients(
            hidden, weight, bias, rows.target, rows.maxima, rows.totals, rows.entropies, *gradients, class_weights,
            options.ignore_index, options.softcap, options.logit_scale, ctx.memory_budget, needs,
            rows.inverse_temperatures, rows.dropped_bits,
        )  # fmt: skip
