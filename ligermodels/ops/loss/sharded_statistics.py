"""Statistics of rows with classes that are sharded over ranks: no rank ever has all logits of a row.

Each rank computes the statistics of its own classes as if they were the whole vocabulary. With m and s the maximum and
sum exp(x - m) of a rank's effective logits x, and M the largest m:

    lse = M + log S, where S = sum over ranks of s exp(m - M)        -log p_y = log S - (x_y - M)
    entropy = sum over ranks of w (entropy of the rank's softmax - log w), where w = exp(m - M) s / S is its weight

So the ranks exchange a few numbers for each row (a maximum, then sums), and in the backward pass the gradient of the
hidden states. The gradient of a rank's logits follows from the statistics of the whole row: where the target is a class
of another rank, -log p_y has the gradient of lse. The backward pass recomputes the logits by chunks of classes: four
GEMMs in all, or three with a frozen head, and two exchanges of numbers for any number of chunks.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ligermodels.ops.loss.chunks import linear_loss, rows_per_chunk
from ligermodels.ops.loss.kept_logits import rows_to_keep, statistics_and_logits
from ligermodels.ops.loss.linear_gradients import gradients_from_kept, linear_gradients
from ligermodels.ops.loss.linear_head import LinearHead
from ligermodels.ops.loss.row_statistics import (
    RowGradients,
    RowOutputs,
    RowStatistics,
    gradient_in_place,
    pack_results,
    rows_in_place,
    unpack_gradients,
)
from ligermodels.ops.loss.sampler import ALL_CLASSES, RowSampler, SamplerOptions
from ligermodels.ops.loss.token_losses import LossOptions
from ligermodels.ops.runtime.class_shards import ClassShard
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import once_differentiable
from ligermodels.ops.runtime.tensors import as_rows

IGNORED = -1  # the target of ignored rows among the classes of a rank, see `ClassShard.targets`


@torch.compiler.disable
def sharded_linear_statistics(
    head: LinearHead, options: LossOptions, outputs: RowOutputs, *, class_weights: Tensor | None = None,
    inverse_temperatures: Tensor | None = None, sampled: SamplerOptions = ALL_CLASSES,
) -> tuple[RowStatistics, Tensor | None]:  # fmt: skip
    """`linear_statistics` of a head with a `shard`. The gradient of hidden is this rank's part of a sum.

    Args:
        head: weight and bias of this rank's classes; targets among all classes.
        options: the options of the loss, without label smoothing and z-loss.
        outputs: the requested statistics.
        class_weights: (V,), of all classes, of the means, if these are requested.
        inverse_temperatures: of the head's rows, or None.
        sampled: the classes that a sampler keeps.
    """
    assert head.shard is not None
    weights = _local(class_weights, head.shard)
    without_ranks = outputs._replace(ranks=False)
    packed = _ShardedLinearStatistics.apply(
        *head[:4], weights, inverse_temperatures, head.shard, options, without_ranks, sampled, head.memory_budget,
        head.needs,
    )  # fmt: skip
    packed, log_masses = (packed[:-1], packed[-1]) if sampled.filters else (packed, None)
    rows = RowStatistics.unpack(packed, without_ranks)
    if not outputs.ranks:
        return rows, log_masses
    x, weight, bias = as_rows(head.hidden.detach()), head.weight.detach(), head.bias
    bytes_per_row = head.shard.most * (x.element_size() + 12)

    def logits(chunk: slice) -> Tensor:
        return torch.nn.functional.linear(x[chunk], weight, None if bias is None else bias.detach())

    size = rows_per_chunk(len(x), bytes_per_row, 0, head.memory_budget)  # the same on all ranks
    ranks = _ranks(logits, size, head.target, options.ignore_index, head.shard)
    return rows._replace(ranks=ranks), log_masses


@torch.compiler.disable
def sharded_statistics(
    logits: Tensor, target: Tensor, options: LossOptions, outputs: RowOutputs, class_weights: Tensor | None,
    shard: ClassShard,
) -> RowStatistics:  # fmt: skip
    """The statistics of rows of logits with sharded classes.

    Args:
        logits: (..., n), of this rank's classes.
        target: int64 (...), among all classes.
        options: the options of the loss, without label smoothing and z-loss.
        outputs: the requested statistics, without entropies.
        class_weights: (V,), of all classes, of the means, if these are requested.
        shard: the classes of this rank.
    """
    without_ranks = outputs._replace(ranks=False)
    packed = _ShardedStatistics.apply(logits, target, _local(class_weights, shard), shard, options, without_ranks)
    rows = RowStatistics.unpack(packed, without_ranks)
    if not outputs.ranks:
        return rows
    local = as_rows(logits.detach())
    return rows._replace(ranks=_ranks(local.__getitem__, len(local), target, options.ignore_index, shard))


def _local(class_weights: Tensor | None, shard: ClassShard) -> Tensor | None:
    """The weights of this rank's classes."""
    return None if class_weights is None else class_weights[shard.first : shard.first + shard.size].contiguous()


def _merge(local: RowStatistics, target: Tensor, ignore_index: int, shard: ClassShard) -> RowStatistics:
    """The statistics of whole rows from the statistics of each rank's classes."""
    assert local.maxima is not None and local.totals is not None
    _, valid, inside = shard.targets(target, ignore_index)
    maxima = shard.all_reduce(local.maxima.clone(), dist.ReduceOp.MAX)
    below, log_total = local.maxima - maxima, local.totals.log()
    sums = [local.totals * below.exp(), torch.where(inside, log_total - local.losses + below, 0.0)]
    if local.means is not None:
        sums.append(local.means * (shard.size / shard.num_classes))
    total, at_y, *means = shard.all_reduce(torch.stack(sums))
    totals = torch.where(valid, total, 1.0)
    losses = torch.where(valid, totals.log() - at_y, 0.0)
    entropies = predicted = None
    if local.entropies is not None:
        log_share = below + log_total - totals.log()
        part = torch.where(log_share.isneginf(), 0.0, log_share.exp() * (local.entropies - log_share))
        entropies = torch.where(valid, shard.all_reduce(part), 0.0)
    if local.predicted is not None:
        candidate = torch.where(local.maxima == maxima, local.predicted + shard.first, shard.num_classes)
        predicted = torch.where(valid, shard.all_reduce(candidate, dist.ReduceOp.MIN), -1)
    return RowStatistics(
        losses, None, predicted, entropies, maxima + totals.log(), means[0] if means else None, maxima, totals
    )


def _local_gradients(gradients: RowGradients, inside: Tensor, shard: ClassShard) -> RowGradients:
    """The gradients by the statistics of a rank's own classes, from the gradients by the statistics of whole rows."""
    lses = torch.where(inside, 0.0, gradients.losses)
    return RowGradients(
        torch.where(inside, gradients.losses, 0.0),
        gradients.entropies,
        lses if gradients.lses is None else lses + gradients.lses,
        None if gradients.means is None else gradients.means * (shard.size / shard.num_classes),
    )


class _ShardedLinearStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden, weight, bias, target, class_weights, inverse_temperatures, shard, options, outputs, sampled,
        memory_budget, needs,
    ):  # fmt: skip
        local_target, _, inside = shard.targets(target, options.ignore_index)
        local_options, local_outputs = options._replace(ignore_index=IGNORED), outputs._replace(lses=True)
        inputs = hidden, weight, bias, local_target
        rows_kept, ctx.kept = rows_to_keep(hidden, shard.most, memory_budget, needs), None
        if rows_kept or sampled.filters:
            local, sampler, ctx.kept = statistics_and_logits(
                *inputs, class_weights, local_options, local_outputs, memory_budget, rows_kept, inverse_temperatures,
                sampled, shard,
            )  # fmt: skip
        else:
            ones = torch.ones_like(target, dtype=torch.promote_types(hidden.dtype, torch.float32))
            packed = linear_loss(
                *inputs, ones, class_weights, *local_options, local_outputs, memory_budget, (False, False, False),
                inverse_temperatures,
            )[:-3]  # fmt: skip
            local, sampler = RowStatistics.unpack(packed, local_outputs), RowSampler(inverse_temperatures)
        rows = _merge(local, target, options.ignore_index, shard)
        ctx.save_for_backward(
            *inputs, rows.maxima, rows.totals, rows.entropies, inside, class_weights, *sampler[:2]
        )  # fmt: skip
        ctx.options, ctx.outputs, ctx.shard, ctx.memory_budget = local_options, outputs, shard, memory_budget
        return pack_results(ctx, rows, outputs, sampler.log_masses)

    @staticmethod
    @once_differentiable
    def backward(ctx, *by_fields):
        hidden, weight, bias, target, *saved = ctx.saved_tensors
        maxima, totals, entropies, inside, class_weights, *of_sampler = saved
        sampler = RowSampler(*of_sampler)
        if sampler.dropped_bits is not None:
            by_fields = by_fields[:-1]  # the log masses have no gradient
        gradients = _local_gradients(unpack_gradients(ctx.outputs, maxima, by_fields), inside, ctx.shard)
        kept, ctx.kept = ctx.kept, None  # once: the gradients overwrite them
        if kept is not None:
            return gradients_from_kept(
                kept, hidden, weight, bias, target, maxima, totals, entropies, gradients, class_weights, ctx.options,
                sampler, ctx.needs_input_grad[:3],
            )  # fmt: skip
        return linear_gradients(
            hidden, weight, bias, target, maxima, totals, entropies, *gradients, class_weights, IGNORED,
            ctx.options.softcap, ctx.options.logit_scale, ctx.memory_budget, ctx.needs_input_grad[:3], *sampler[:2],
        )  # fmt: skip


class _ShardedStatistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, class_weights, shard, options, outputs):
        local_target, _, inside = shard.targets(target, options.ignore_index)
        local_options, local_outputs = options._replace(ignore_index=IGNORED), outputs._replace(lses=True)
        local = RowStatistics.empty(local_target, torch.promote_types(logits.dtype, torch.float32), local_outputs)
        rows = as_rows(logits)
        rows = rows if use_kernels(rows) else rows.clone()  # in torch they are overwritten
        rows_in_place(
            rows, local_target.flatten(), local.rows(slice(None)), local_options, class_weights=class_weights
        )  # fmt: skip
        merged = _merge(local, target, options.ignore_index, shard)
        ctx.save_for_backward(logits, local_target, merged.maxima, merged.totals, inside, class_weights)
        ctx.options, ctx.outputs, ctx.shard = local_options, outputs, shard
        return pack_results(ctx, merged, outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *by_fields):
        logits, target, maxima, totals, inside, class_weights = ctx.saved_tensors
        gradients = _local_gradients(unpack_gradients(ctx.outputs, maxima, by_fields), inside, ctx.shard)
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format).copy_(logits)
        gradient_in_place(
            as_rows(gradient), target.flatten(), maxima.flatten(), totals.flatten(), gradients.flat(), ctx.options,
            class_weights=class_weights, num_classes=logits.shape[-1],
        )  # fmt: skip
        return (gradient,)


@torch.no_grad()
def _ranks(
    logits: Callable[[slice], Tensor], size: int, target: Tensor, ignore_index: int, shard: ClassShard
) -> Tensor:
    """The number of classes that rank before the target, of the target's shape. logits: the logits (n, classes of this
    rank) of a chunk of up to `size` rows."""
    local_target, valid, inside = (x.flatten() for x in shard.targets(target, ignore_index))
    classes = torch.arange(shard.first, shard.first + shard.size, device=target.device)
    counts = torch.zeros_like(local_target)
    for start in range(0, len(local_target), max(size, 1)):
        rows = slice(start, start + size)
        x = logits(rows)
        at_y = x.gather(1, local_target[rows].clamp(min=0)[:, None]).squeeze(1)
        at_y = at_y.to(torch.promote_types(x.dtype, torch.float32))
        at_y = shard.all_reduce(torch.where(inside[rows], at_y, -torch.inf), dist.ReduceOp.MAX)[:, None]
        before = (x > at_y) | ((x == at_y) & (classes < target.flatten()[rows][:, None]))
        counts[rows] = before.sum(1)
    return torch.where(valid, shard.all_reduce(counts), -1).view(target.shape)
