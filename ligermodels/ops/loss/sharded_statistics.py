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
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ligermodels.ops.loss.chunks import rows_per_chunk
from ligermodels.ops.loss.linear_head import LinearHead
from ligermodels.ops.loss.row_statistics import gradient_in_place, pack_results, rows_in_place, unpack_gradients
from ligermodels.ops.loss.token_losses import LogitRows, LossOptions, RowGradients, RowOutputs
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import once_differentiable
from ligermodels.ops.runtime.tensors import as_rows

if TYPE_CHECKING:
    from ligermodels.ops.runtime.class_shards import ClassShard

IGNORED = -1  # the target of ignored rows among the classes of a rank, see `ClassShard.targets`


@torch.compiler.disable
def sharded_statistics(
    logits: Tensor, target: Tensor, options: LossOptions, outputs: RowOutputs, class_weights: Tensor | None,
    shard: "ClassShard",
) -> LogitRows:  # fmt: skip
    """The statistics of rows of logits with sharded classes.

    Args:
        logits: (..., n), of this rank's classes.
        target: int64 (...), among all classes.
        options: the options of the loss, without label smoothing and z-loss.
        outputs: the requested statistics, without entropies.
        class_weights: (V,), of all classes, of the means, if these are requested.
        shard: the classes of this rank.
    """
    without_ranks, weights = outputs._replace(ranks=False), local_weights(class_weights, shard)
    packed = _ShardedStatistics.apply(logits, target, weights, shard, options, without_ranks)
    rows = LogitRows.unpack(target, packed, without_ranks)
    if not outputs.ranks:
        return rows
    local = as_rows(logits.detach())
    return rows._replace(ranks=_ranks(local.__getitem__, len(local), target, options.ignore_index, shard))


def local_weights(class_weights: Tensor | None, shard: "ClassShard") -> Tensor | None:
    """The weights of this rank's classes, from the weights of all classes (V,); None for None."""
    return None if class_weights is None else class_weights[shard.first : shard.first + shard.size].contiguous()


def merge(local: LogitRows, inside: Tensor, shard: "ClassShard") -> LogitRows:
    """The statistics of whole rows from the statistics of each rank's classes.

    Args:
        local: statistics, with maxima and totals, of the classes of this rank; its targets are among these classes.
        inside: bool (...), whether the target is a class of this rank.
        shard: the classes of this rank.

    Returns:
        The statistics; targets and sampler as in `local`.
    """
    valid = local.target != IGNORED
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
    return local._replace(
        losses=losses, predicted=predicted, entropies=entropies, lses=maxima + totals.log(),
        means=means[0] if means else None, maxima=maxima, totals=totals,
    )  # fmt: skip


def local_gradients(gradients: RowGradients, inside: Tensor, shard: "ClassShard") -> RowGradients:
    """The gradients by the statistics of a rank's own classes.

    Args:
        gradients: by the statistics of whole rows.
        inside: bool (...), whether the target is a class of this rank.
        shard: the classes of this rank.
    """
    lses = torch.where(inside, 0.0, gradients.losses)
    return RowGradients(
        torch.where(inside, gradients.losses, 0.0),
        gradients.entropies,
        lses if gradients.lses is None else lses + gradients.lses,
        None if gradients.means is None else gradients.means * (shard.size / shard.num_classes),
    )


class _ShardedStatistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, class_weights, shard, options, outputs):
        local_target, _, inside = shard.targets(target, options.ignore_index)
        options, requested = options._replace(ignore_index=IGNORED), outputs._replace(lses=True)
        rows = LogitRows.empty(local_target, torch.promote_types(logits.dtype, torch.float32), requested)
        local = as_rows(logits)
        local = local if use_kernels(local) else local.clone()  # in torch they are overwritten
        rows_in_place(local, rows.chunk(slice(None)), options, class_weights)
        rows = merge(rows, inside, shard)
        ctx.save_for_backward(logits, class_weights, inside, *rows.for_gradients())
        ctx.options, ctx.outputs, ctx.shard = options, outputs, shard
        return pack_results(ctx, rows, outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *by_fields):
        logits, class_weights, inside, *fields = ctx.saved_tensors
        rows = LogitRows(*fields)
        gradients = local_gradients(unpack_gradients(ctx.outputs, rows, by_fields), inside, ctx.shard)
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format).copy_(logits)
        gradient_in_place(
            as_rows(gradient), rows.chunk(slice(None)), gradients.flat(), ctx.options, class_weights=class_weights,
            num_classes=logits.shape[-1],
        )  # fmt: skip
        return (gradient,)


def ranks_of_head(head: LinearHead, ignore_index: int) -> Tensor:
    """The number of classes of all ranks that rank before the target, of the target's shape.

    Args:
        head: with a shard; its weight and bias are of this rank's classes.
        ignore_index: the target of ignored rows, whose rank is -1.
    """
    assert head.shard is not None
    x, weight, bias = as_rows(head.hidden.detach()), head.weight.detach(), head.bias
    bytes_per_row = head.shard.most * (x.element_size() + 12)

    def logits(chunk: slice) -> Tensor:
        return torch.nn.functional.linear(x[chunk], weight, None if bias is None else bias.detach())

    size = rows_per_chunk(len(x), bytes_per_row, 0, head.memory_budget)  # the same on all ranks
    return _ranks(logits, size, head.target, ignore_index, head.shard)


@torch.no_grad()
def _ranks(
    logits: Callable[[slice], Tensor], size: int, target: Tensor, ignore_index: int, shard: "ClassShard"
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
