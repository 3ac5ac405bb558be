"""Linear layers that are sharded over ranks, with rows that are sharded between layers (sequence parallelism).

See Korthikanti et al., 2022, https://arxiv.org/abs/2205.05198. Exchange and product are one op. Each rank saves only
its own rows for the backward pass, and gathers them again while it computes the gradient of the gathered rows.
Activation checkpointing keeps results after the exchange.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.ops.runtime.collectives import all_gather_rows, start_all_gather, start_reduce_scatter
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
    gathered, wait = start_all_gather(x, ranks, group)
    wait()
    return F.linear(gathered[:rows], weight, bias)


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
        gathered, gather = start_all_gather(x, ranks, group)
    if need_x:
        product = _padded_product(dy, weight, ranks * n)
    if x is not None:
        gather()
    if need_x:
        scatter = start_reduce_scatter(dx, product, group)
    if x is not None:
        torch.mm(dy.t(), gathered[: dy.shape[0]], out=dw)
    if need_bias:
        torch.sum(dy, 0, out=db)
    if need_x:
        scatter()
    return dx, dw, db


@custom_op(keep=lambda x, weight, ranks, _: weight.shape[0] >= weight.shape[1] * ranks)
def _linear_reduce_scatter_forward(x: Tensor, weight: Tensor, ranks: int, group: str) -> Tensor:
    output = x.new_empty(-(-x.shape[0] // ranks), weight.shape[0])
    if not is_fake(x):
        start_reduce_scatter(output, _padded_product(x, weight.t(), ranks * output.shape[0]), group)()
    return output


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
        x, weight = ctx.saved_tensors
        gathered = all_gather_rows(dy, *ctx.exchange)[: ctx.rows]
        dx = gathered @ weight if ctx.needs_input_grad[0] else None
        return dx, None if x is None else gathered.t() @ x


def _padded_product(x: Tensor, weight: Tensor, rows: int) -> Tensor:
    """x (n, K) times weight (K, M), padded with zeros to (rows, M)."""
    product = x.new_empty(rows, weight.shape[1])
    torch.mm(x, weight, out=product[: len(x)])
    product[len(x) :].zero_()
    return product
