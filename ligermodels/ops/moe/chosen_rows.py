"""Rows of some of the choices of tokens: tokens become rows, and rows are summed to tokens.

N tokens with k choices each have N * k choices. C of them, in any order, are rows: all of them, or those that this rank
computes. A sum reads each row once and writes each token once, in a fixed order and in float32. Its backward pass reads
a row and the gradient of its token once, for the gradients of the row and of its weight.
"""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.ops.runtime.checks import Signature
from ligermodels.ops.runtime.dispatch import tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable
from ligermodels.ops.runtime.tensors import as_rows, contiguous

BLOCK = 1024
"""Columns that a program reads at a time."""


_TAKE = Signature(x="N H", choices="C int64 int32", rows="N k+ int64 int32")
_SUM = Signature(y="C H", weights="N k ?", choices="C int64 int32", rows="N k+ int64 int32")


class ChosenRows(NamedTuple):
    """Which choices are rows.

    choices: int32 or int64 (C,); row r is choice choices[r] = n * k + j, token n's j-th choice.
    rows: int32 or int64 (N, k); choice (n, j) is row rows[n, j]; it is no row if that is below 0, or C or more.
    """

    choices: Tensor
    rows: Tensor


def take_rows(x: Tensor, chosen: ChosenRows) -> Tensor:
    """Row r is the token of choice r. The gradient of a token is the sum over its rows.

    Args:
        x: (N, H), floating.
        chosen: the C rows.

    Returns:
        (C, H), of x's dtype.

    Raises:
        InputError: shapes, dtypes or devices do not fit.
    """
    _TAKE.check("take_rows", x, *chosen)
    return _TakeChosen.apply(x, *chosen)


def sum_rows(y: Tensor, weights: Tensor | None, chosen: ChosenRows) -> Tensor:
    """The sum over each token's rows, times their weights; zero for a token without rows.

    Args:
        y: (C, H), floating.
        weights: (N, k), floating; None for ones. The weights of choices that are no rows get a gradient of zero.
        chosen: the C rows.

    Returns:
        (N, H), of y's dtype, summed in float32 (float64 if y or the weights are float64).

    Raises:
        InputError: shapes, dtypes or devices do not fit.
    """
    _SUM.check("sum_rows", y, weights, *chosen)
    weights = None if weights is None else weights.to(torch.promote_types(weights.dtype, torch.float32))
    return _SumChosen.apply(y, weights, *chosen)


def gather_rows(x: Tensor, index: Tensor, inverse: Tensor, copies: int = 1) -> Tensor:
    """Deprecated: x[index // copies] is take_rows(x, ChosenRows(index, inverse.view(-1, copies))).

    Args:
        x: (N, H), floating.
        index: long (N * copies,), a permutation, such as `Routes.order`.
        inverse: long (N * copies,), the inverse of `index`.
        copies: number of copies of each row. Default: 1.

    Returns:
        (N * copies, H), of x's dtype.
    """
    message = "ops.gather_rows is deprecated: use ops.take_rows(x, ops.ChosenRows(index, inverse.view(-1, copies)))"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return take_rows(x, ChosenRows(index, inverse.view(-1, copies)))


class _TakeChosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, choices, rows):
        ctx.save_for_backward(rows)
        return x[choices // rows.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return (_rows_sum(dy, None, *ctx.saved_tensors),)


class _SumChosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, weights, choices, rows):
        ctx.save_for_backward(y if ctx.needs_input_grad[1] else None, weights, choices, rows)
        return _rows_sum(y, weights, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        y, weights, choices, rows = ctx.saved_tensors
        if weights is None:
            return (d_out[choices // rows.shape[1]],)
        dy, dweights = _rows_sum_backward(d_out, y, weights, choices, ctx.needs_input_grad[0])
        return dy, dweights if ctx.needs_input_grad[1] else None


def _rows_sum_reference(y: Tensor, weights: Tensor | None, rows: Tensor) -> Tensor:
    exists = (rows >= 0) & (rows < y.shape[0])
    if not y.shape[0]:
        return y.new_zeros(rows.shape[0], y.shape[1])
    wide = (
        torch.promote_types(y.dtype, torch.float32) if weights is None else torch.promote_types(y.dtype, weights.dtype)
    )
    picked = y[torch.where(exists, rows, 0)].to(wide).masked_fill(~exists[..., None], 0)
    return (picked if weights is None else picked * weights[..., None]).sum(1).to(y.dtype)


@custom_op()
def _rows_sum(y: Tensor, weights: Tensor | None, rows: Tensor) -> Tensor:
    """y (C, H), weights (N, k), rows (N, k) -> (N, H)."""
    tokens, copies = rows.shape
    if is_fake(y):
        return y.new_empty(tokens, y.shape[1])
    if not use_kernels(y, weights):
        return _rows_sum_reference(y, weights, rows)
    y, out = as_rows(y), y.new_empty(tokens, y.shape[1])
    if out.numel():
        _sum_kernel[(tokens, -(-y.shape[1] // BLOCK))](
            y, y.stride(0), contiguous(weights), rows.contiguous(), out, y.shape[0], y.shape[1], COPIES=copies,
            BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return out


@custom_op()
def _rows_sum_backward(
    d_out: Tensor, y: Tensor | None, weights: Tensor, choices: Tensor, need_rows: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of y (C, H), and of weights (N, k), from d_out (N, H) and y; without elements where not needed."""
    C, H, copies = choices.shape[0], d_out.shape[1], weights.shape[1]
    dy = d_out.new_empty((C, H) if need_rows else (0,))
    dweights = weights.new_zeros(weights.shape if y is not None else (0,))
    if is_fake(d_out):
        return dy, dweights
    if not use_kernels(d_out, weights):
        rows = d_out[choices // copies].to(weights.dtype)
        if need_rows:
            dy.copy_(rows * weights.flatten()[choices, None])
        if y is not None:
            dweights.view(-1)[choices] = (rows * y).sum(1).to(weights.dtype)
        return dy, dweights
    if C and H:
        d_out, y = as_rows(d_out), None if y is None else as_rows(y)
        _sum_gradient_kernel[(C,)](
            d_out, d_out.stride(0), y, 0 if y is None else y.stride(0), weights.contiguous(), choices.contiguous(),
            dy if need_rows else None, None if y is None else dweights, H, COPIES=copies, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return dy, dweights


@kernel
def _sum_kernel(y, y_stride, weights, rows, out, C, H, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    """out[n]: the sum of weight * y[row] over the rows of token n, in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for copy in tl.static_range(COPIES):
        row = tl.load(rows + token * COPIES + copy).to(tl.int64)
        exists = (row >= 0) & (row < C)
        values = tl.load(y + row * y_stride + col, mask=exists & (col < H), other=0.0).to(tl.float32)
        if weights is not None:
            values = tl.where(exists, values * tl.load(weights + token * COPIES + copy), 0.0)
        total += values
    tl.store(out + token * H + col, total.to(out.dtype.element_ty), mask=col < H)


@kernel
def _sum_gradient_kernel(
    d_out, d_out_stride, y, y_stride, weights, choices, dy, dweights, H, COPIES: tl.constexpr, BLOCK: tl.constexpr
):
    """dy[r]: the weight of choice r times the gradient of its token; dweights of the choice: the product of the
    gradient of its token and y[r]."""
    row = tl.program_id(0).to(tl.int64)
    choice = tl.load(choices + row).to(tl.int64)
    gradient = d_out + choice // COPIES * d_out_stride
    weight = tl.load(weights + choice)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, H, BLOCK):
        col = start + tl.arange(0, BLOCK)
        values = tl.load(gradient + col, mask=col < H, other=0.0).to(tl.float32)
        if dy is not None:
            tl.store(dy + row * H + col, (values * weight).to(dy.dtype.element_ty), mask=col < H)
        if y is not None:
            total += values * tl.load(y + row * y_stride + col, mask=col < H, other=0.0).to(tl.float32)
    if y is not None:
        tl.store(dweights + choice, tl.sum(total, 0))
