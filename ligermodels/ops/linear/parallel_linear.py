"""Linear layers that are sharded over ranks, with rows that are sharded between layers (sequence parallelism).

See Korthikanti et al., 2022, https://arxiv.org/abs/2205.05198. Exchange and product are one op: the product of one
rank's rows is computed while the rows of the next rank arrive, or while the sums for the rank before travel (as in Wang
et al., 2023, https://doi.org/10.1145/3567955.3567959). Each rank saves only its own rows for the backward pass, and
gathers them again while it computes the gradient of the gathered rows. Activation checkpointing keeps results after the
exchange.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ligermodels.ops.runtime.collectives import Arrivals, rank_in, start_exchange, start_gather_by_rank
from ligermodels.ops.runtime.dispatch import refuse_batch_invariant
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable
from ligermodels.ops.runtime.tensors import empty_gradient, under_autocast


def all_gather_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, rows: int, ranks: int, group: str
) -> Tensor:
    """Gather the rows of x from all ranks, and multiply them by this rank's output channels of a weight.

    The gradient of x is summed over ranks.

    Args:
        x: (n, K), this rank's rows, any floating dtype. Under autocast all operands are cast to autocast's dtype.
        weight: (M, K), this rank's output channels.
        bias: (M,), this rank's output channels, or None.
        rows: number of gathered rows that are used; the others, at the end of the ranks * n rows, are padding.
        ranks: number of ranks.
        group: name of the process group.

    Returns:
        (rows, M).
    """
    refuse_batch_invariant("all_gather_linear")
    x, weight, bias = under_autocast(x, weight, bias)
    y: Tensor = _AllGatherLinear.apply(x, weight, bias, rows, ranks, group)
    return y


def linear_reduce_scatter(x: Tensor, weight: Tensor, *, ranks: int, group: str) -> Tensor:
    """Multiply x by this rank's input channels of a weight, sum over ranks, and keep this rank's rows.

    Args:
        x: (rows, K), all rows of this rank's input channels, any floating dtype. Under autocast both operands are cast
            to autocast's dtype.
        weight: (M, K), this rank's input channels.
        ranks: number of ranks.
        group: name of the process group.

    Returns:
        (n, M), where n = rows / ranks, rounded up. Rows beyond the last one are zero.
    """
    refuse_batch_invariant("linear_reduce_scatter")
    x, weight = under_autocast(x, weight)
    y: Tensor = _LinearReduceScatter.apply(x, weight, ranks, group)
    return y


@custom_op(keep=lambda x, weight, bias, rows, ranks, _: weight.shape[0] * ranks >= weight.shape[1])
def _all_gather_linear_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, ranks: int, group: str
) -> Tensor:
    if is_fake(x):
        return x.new_empty(rows, weight.shape[0])
    gathered, arriving = start_gather_by_rank(x, ranks, group)
    return _product_by_rank(gathered, arriving, weight.t(), bias, rows)


@custom_op()
def _all_gather_linear_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor, n: int, ranks: int, group: str, need_x: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x (n, K), weight and bias; a gradient that is not needed is empty. x is None if the weight needs
    no gradient."""
    dx = dy.new_empty(n if need_x else 0, weight.shape[1])
    dw = empty_gradient(weight, x is not None, dy)
    db = dy.new_empty(dy.shape[1] if need_bias else 0)
    if is_fake(dy):
        return dx, dw, db
    if x is not None:
        gathered, arriving = start_gather_by_rank(x, ranks, group)
    if need_x:
        finish = _start_summed_product(dy, weight, dx, ranks, group)
    if x is not None:
        for _, wait in arriving:
            wait()
        torch.mm(dy.t(), gathered[: dy.shape[0]], out=dw)
    if need_bias:
        torch.sum(dy, 0, out=db)
    if need_x:
        finish()
    return dx, dw, db


@custom_op(keep=lambda x, weight, ranks, _: weight.shape[0] >= weight.shape[1] * ranks)
def _linear_reduce_scatter_forward(x: Tensor, weight: Tensor, ranks: int, group: str) -> Tensor:
    output = x.new_empty(-(-x.shape[0] // ranks), weight.shape[0])
    if not is_fake(x):
        _start_summed_product(x, weight.t(), output, ranks, group)()
    return output


@custom_op()
def _linear_reduce_scatter_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor, rows: int, ranks: int, group: str, need_x: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of x (rows, K) and weight; a gradient that is not needed is empty. x is None if the weight needs no
    gradient."""
    dw = empty_gradient(weight, x is not None, dy)
    if is_fake(dy):
        return dy.new_empty(rows if need_x else 0, weight.shape[1]), dw
    gathered, arriving = start_gather_by_rank(dy, ranks, group)
    dx = _product_by_rank(gathered, arriving, weight, None, rows) if need_x else dy.new_empty(0, weight.shape[1])
    if x is not None:
        for _, wait in arriving:
            wait()
        torch.mm(gathered[:rows].t(), x, out=dw)
    return dx, dw


class _AllGatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, rows, ranks, group):
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.exchange = x.shape[0], ranks, group
        return _all_gather_linear_forward(x, weight, bias, rows, ranks, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        need_x, _, need_bias, *_ = ctx.needs_input_grad
        return _all_gather_linear_backward(dy, *ctx.saved_tensors, *ctx.exchange, need_x, need_bias)


class _LinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, ranks, group):
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.exchange, ctx.rows = (ranks, group), x.shape[0]
        return _linear_reduce_scatter_forward(x, weight, ranks, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _linear_reduce_scatter_backward(dy, *ctx.saved_tensors, ctx.rows, *ctx.exchange, ctx.needs_input_grad[0])


def _product_by_rank(gathered: Tensor, arriving: Arrivals, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """The first `rows` rows of gathered (n, K) times weight (K, M), plus a bias (M,), as they arrive."""
    y = gathered.new_empty(rows, weight.shape[1])
    for place, wait in arriving:
        wait()
        part, out = gathered[:rows][place], y[place]
        if bias is None:
            torch.mm(part, weight, out=out)
        else:
            torch.addmm(bias, part, weight, out=out)
    return y


def _start_summed_product(x: Tensor, weight: Tensor, out: Tensor, ranks: int, group: str) -> Callable[[], None]:
    """Start to compute this rank's rows of the sum over ranks of x (rows, K) times weight (K, M).

    Args:
        x: (rows, K), all rows.
        weight: (K, M).
        out: (n, M), filled with this rank's rows of the sum, where n = rows / ranks, rounded up. Rows beyond the last
            one are zero.
        ranks: number of ranks.
        group: name of the process group.

    Returns:
        A function that waits for the sums of the other ranks, and fills `out`.
    """
    n, this = out.shape[0], rank_in(group)
    terms = out.new_empty(ranks, *out.shape)
    waits = []
    for step in range(1, ranks):
        target, source = (this + step) % ranks, (this - step) % ranks
        product = _padded_product(x[target * n : (target + 1) * n], weight, torch.empty_like(out))
        waits.append(start_exchange(product, target, terms[source], source, group))
    _padded_product(x[this * n : (this + 1) * n], weight, terms[this])

    def finish() -> None:
        for wait in waits:
            wait()
        torch.sum(terms, 0, out=out)

    return finish


def _padded_product(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """`out` (n, M), filled with x times weight (K, M), and zeros below."""
    torch.mm(x, weight, out=out[: len(x)])
    out[len(x) :].zero_()
    return out
