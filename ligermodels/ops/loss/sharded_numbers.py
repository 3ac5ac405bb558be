"""The numbers of rows whose classes are sharded over ranks: no rank ever has all logits of a row.

Each rank computes the numbers of its own classes, as those of a vocabulary of its own, by what computes whole ones.
With m and s the maximum and sum exp(x - m) of a rank's effective logits x, and M the greatest of all m:

    lse = M + log S, where S = sum over ranks of s exp(m - M)        -log p_y = log S - (x_y - M)
    entropy = sum over ranks of w (entropy of the rank's softmax - log w), where w = exp(m - M) s / S is its share

So the ranks exchange a few numbers of each row (a maximum, then sums), and in the backward pass the gradient of the
hidden states. The gradient of a rank's logits follows from the whole row's numbers: in a row whose target is another
rank's, -log p_y has the gradient of lse. The backward pass computes the logits again, by chunks of classes: four GEMMs
in all, or three with a frozen head, and two exchanges of numbers whatever the chunks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ligermodels.ops.loss.chunks import Head, linear_rows, rows_per_chunk
from ligermodels.ops.loss.columns_in_place import Gradients, columns_in_place
from ligermodels.ops.loss.linear_columns import linear_columns
from ligermodels.ops.loss.rows_in_place import RowResults, rows_in_place
from ligermodels.ops.loss.token_losses import LossOptions, RowNumbers
from ligermodels.ops.runtime.class_shards import ClassShard
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import once_differentiable
from ligermodels.ops.runtime.tensors import as_rows

IGNORED = -1  # what targets that are ignored are on each rank


@torch.compiler.disable
def sharded_linear_numbers(
    head: Head, options: LossOptions, memory_budget: int, *, return_entropy: bool = False, return_lse: bool = False,
    class_weights: Tensor | None = None,
) -> RowNumbers:  # fmt: skip
    """`linear_numbers` of a head with a `shard`: its weight and bias are those of this rank's classes, the targets of
    all classes, as are class_weights, (V,). The gradient of hidden is this rank's part of a sum."""
    assert head.shard is not None
    asked = (return_entropy, return_lse, class_weights is not None)
    found = RowNumbers(
        *_ShardedLinearNumbers.apply(
            *head[:4], _own(class_weights, head.shard), head.shard, head.num_targets, options, asked, memory_budget
        )
    )
    if not options.return_rank:
        return found
    x, weight, bias = as_rows(head.hidden.detach()), head.weight.detach(), head.bias
    bytes_per_row = head.shard.most * (x.element_size() + 12)

    def logits(rows: slice) -> Tensor:
        return torch.nn.functional.linear(x[rows], weight, None if bias is None else bias.detach())

    size = rows_per_chunk(len(x), bytes_per_row, 0, memory_budget)  # the same on all ranks
    return found._replace(ranks=_ranks(logits, size, head.target, options.ignore_index, head.shard))


@torch.compiler.disable
def sharded_numbers(
    logits: Tensor, target: Tensor, shard: ClassShard, options: LossOptions, *, return_lse: bool = False,
    class_weights: Tensor | None = None,
) -> RowNumbers:  # fmt: skip
    """The numbers of rows of which `logits` (..., n) are those of this rank's classes; class_weights, (V,), are of
    all."""
    asked = (False, return_lse, class_weights is not None)
    found = RowNumbers(*_ShardedNumbers.apply(logits, target, _own(class_weights, shard), shard, options, asked))
    if not options.return_rank:
        return found
    rows = as_rows(logits.detach())
    return found._replace(ranks=_ranks(rows.__getitem__, len(rows), target, options.ignore_index, shard))


def _own(class_weights: Tensor | None, shard: ClassShard) -> Tensor | None:
    """The weights of this rank's classes."""
    return None if class_weights is None else class_weights[shard.first : shard.first + shard.size].contiguous()


class _Merged(NamedTuple):
    """The numbers of whole rows; see `RowNumbers` and `RowResults`."""

    losses: Tensor
    predicted: Tensor | None
    entropies: Tensor | None
    maxima: Tensor
    totals: Tensor
    means: Tensor | None


def _merge(own: RowResults, target: Tensor, ignore_index: int, shard: ClassShard) -> _Merged:
    """From the numbers of each rank's classes to those of whole rows; what is empty in `own` is None."""
    assert own.maxima is not None and own.totals is not None
    _, valid, inside = shard.targets(target, ignore_index)
    maxima = shard.all_reduce(own.maxima.clone(), dist.ReduceOp.MAX)
    below, log_total = own.maxima - maxima, own.totals.log()
    sums = [own.totals * below.exp(), torch.where(inside, log_total - own.losses + below, 0.0)]
    if own.means is not None and own.means.numel():
        sums.append(own.means * (shard.size / shard.num_classes))
    total, at_y, *means = shard.all_reduce(torch.stack(sums))
    totals = torch.where(valid, total, 1.0)
    losses = torch.where(valid, totals.log() - at_y, 0.0)
    entropies = predicted = None
    if own.entropies is not None and own.entropies.numel():
        log_share = below + log_total - totals.log()
        part = torch.where(log_share.isneginf(), 0.0, log_share.exp() * (own.entropies - log_share))
        entropies = torch.where(valid, shard.all_reduce(part), 0.0)
    if own.predicted is not None and own.predicted.numel():
        candidate = torch.where(own.maxima == maxima, own.predicted + shard.first, shard.num_classes)
        predicted = torch.where(valid, shard.all_reduce(candidate, dist.ReduceOp.MIN), -1)
    return _Merged(losses, predicted, entropies, maxima, totals, means[0] if means else None)


def _results(ctx: Any, merged: _Merged, asked: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """The fields of `RowNumbers`, of which those not asked for have no gradient; ranks are not computed here."""
    ctx.asked = asked
    ctx.set_materialize_grads(False)  # None tells what the loss does not use
    none = merged.losses.new_empty(0, dtype=torch.long)
    others = merged.entropies, merged.maxima + merged.totals.log(), merged.means
    kept = [x if used else None for x, used in zip(others, asked, strict=True)]
    ctx.mark_non_differentiable(none, *([] if merged.predicted is None else [merged.predicted]))
    return merged.losses, none, merged.predicted, *kept


def _factors(
    of_losses: Tensor | None, of_others: tuple[Tensor | None, ...], maxima: Tensor, inside: Tensor, shard: ClassShard
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """The gradients of the numbers, of losses, entropies, lses and means, as those of a rank's own classes."""
    of_entropies, of_lses, of_means = of_others
    of_losses = torch.zeros_like(maxima) if of_losses is None else of_losses
    elsewhere = torch.where(inside, 0.0, of_losses)
    of_lses = elsewhere if of_lses is None else elsewhere + of_lses
    of_means = None if of_means is None else of_means * (shard.size / shard.num_classes)
    return torch.where(inside, of_losses, 0.0), of_entropies, of_lses, of_means


class _ShardedLinearNumbers(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden, weight, bias, target, class_weights, shard, num_targets, options, asked, memory_budget
    ):  # fmt: skip
        own_target, _, inside = shard.targets(target, options.ignore_index)
        ones = torch.ones_like(target, dtype=torch.promote_types(hidden.dtype, torch.float32))
        own_options = options._replace(ignore_index=IGNORED, return_rank=False)
        own = RowResults(*linear_rows(
            hidden, weight, bias, own_target, ones, class_weights, *own_options, asked[0], True, asked[2],
            memory_budget, num_targets, False, False, False,
        )[:7])  # fmt: skip
        merged = _merge(own, target, options.ignore_index, shard)
        ctx.save_for_backward(
            hidden, weight, bias, own_target, merged.maxima, merged.totals, merged.entropies, inside, class_weights
        )
        ctx.options, ctx.shard = (IGNORED, options.softcap, options.logit_scale, memory_budget, num_targets), shard
        return _results(ctx, merged, asked)

    @staticmethod
    @once_differentiable
    def backward(ctx, of_losses, _ranks, _predicted, *of_others):
        *inputs, maxima, totals, entropies, inside, class_weights = ctx.saved_tensors
        factors = _factors(of_losses, of_others, maxima, inside, ctx.shard)
        return linear_columns(
            *inputs, maxima, totals, None if factors[1] is None else entropies, *factors,
            None if factors[3] is None else class_weights, *ctx.options, *ctx.needs_input_grad[:3],
        )  # fmt: skip


class _ShardedNumbers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, class_weights, shard, options, asked):
        own_target, _, inside = shard.targets(target, options.ignore_index)
        wide, rows = torch.promote_types(logits.dtype, torch.float32), as_rows(logits)

        def empty(needed: bool = True, dtype: torch.dtype = wide) -> Tensor:
            return target.new_empty(target.shape if needed else 0, dtype=dtype)

        predicted = empty(dtype=torch.long) if options.return_predicted else None
        own = RowResults(
            empty(), empty(False, torch.long), predicted, None, empty(), empty(), empty() if asked[2] else None
        )
        own_options = options._replace(ignore_index=IGNORED, return_rank=False)
        given = rows if use_kernels(rows) else rows.clone()  # in torch these are overwritten
        flat: Any = [None if x is None else x.view(-1) for x in own]
        rows_in_place(given, own_target.flatten(), RowResults(*flat), None, own_options, class_weights)
        merged = _merge(own, target, options.ignore_index, shard)
        ctx.save_for_backward(logits, own_target, merged.maxima, merged.totals, inside, class_weights)
        ctx.options, ctx.shard = own_options, shard
        return _results(ctx, merged, asked)

    @staticmethod
    @once_differentiable
    def backward(ctx, of_losses, _ranks, _predicted, *of_others):
        logits, target, maxima, totals, inside, class_weights = ctx.saved_tensors
        factors = _factors(of_losses, of_others, maxima, inside, ctx.shard)
        rows: Any = [None if x is None else x.flatten() for x in (target, maxima, totals, *factors)]
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format).copy_(logits)
        columns_in_place(
            as_rows(gradient), 0, rows[0], rows[1], rows[2], None, Gradients(*rows[3:]), ctx.options,
            None if factors[3] is None else class_weights, logits.shape[-1],
        )  # fmt: skip
        return (gradient,)


@torch.no_grad()
def _ranks(
    logits: Callable[[slice], Tensor], size: int, target: Tensor, ignore_index: int, shard: ClassShard
) -> Tensor:
    """As in `cross_entropy`, of target's shape. logits: those (n, classes of this rank) of a chunk of up to `size`
    rows."""
    own_target, valid, inside = (x.flatten() for x in shard.targets(target, ignore_index))
    classes = torch.arange(shard.first, shard.first + shard.size, device=target.device)
    found = torch.zeros_like(own_target)
    for start in range(0, len(own_target), max(size, 1)):
        rows = slice(start, start + size)
        x = logits(rows)
        at_y = x.gather(1, own_target[rows].clamp(min=0)[:, None]).squeeze(1)
        at_y = at_y.to(torch.promote_types(x.dtype, torch.float32))
        at_y = shard.all_reduce(torch.where(inside[rows], at_y, -torch.inf), dist.ReduceOp.MAX)[:, None]
        before = (x > at_y) | ((x == at_y) & (classes < target.flatten()[rows][:, None]))
        found[rows] = before.sum(1)
    return torch.where(valid, shard.all_reduce(found), -1).view(target.shape)
