"""A linear layer with a low-rank update (LoRA; Hu et al., 2021, https://arxiv.org/abs/2106.09685).

The update is computed first, and the GEMM of the weight adds to it. A separate sum would read and write the result
once more. The gradient of x is computed in the same way.
"""

import torch
from torch import Tensor

from ligermodels.arguments import is_number
from ligermodels.errors import InputError, short
from ligermodels.ops.linear.linear import dense_linear
from ligermodels.ops.runtime.checks import Signature
from ligermodels.ops.runtime.dispatch import set_batch_invariant
from ligermodels.ops.runtime.library import custom_op, is_dtensor, is_fake, once_differentiable
from ligermodels.ops.runtime.tensors import count_rows, empty_gradient, under_autocast

_TENSORS = Signature(x="... K", weight="M K =x", a="r K =x", b="M r =x", bias="M =x ?", dropped="... K =x ?")


def lora_linear(
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    scaling: float = 1.0,
    dropped: Tensor | None = None,
) -> Tensor:
    """x weight^T + bias + scaling * x a^T b^T.

    Gradients are computed only for operands that require one; a frozen weight costs nothing. Torch's own ops
    compute DTensors.

    Args:
        x: (..., K), any floating dtype. Under autocast all operands are cast to autocast's dtype.
        weight: (M, K), dtype of x.
        a: (r, K), dtype of x.
        b: (M, r), dtype of x.
        bias: (M,), dtype of x; or None.
        scaling: factor of the update. Default: 1.
        dropped: x after dropout, (..., K): a multiplies it in place of x. Default: None.

    Returns:
        (..., M), dtype of x.

    Raises:
        InputError: shapes, dtypes or devices do not fit.
    """
    x, weight, a, b, bias, dropped = tensors = under_autocast(x, weight, a, b, bias, dropped)
    if any(is_dtensor(t) for t in tensors if t is not None):
        return lora_linear_reference(x, weight, a, b, bias, scaling=scaling, dropped=dropped)
    _TENSORS.check("lora_linear", x, weight, a, b, bias, dropped)
    if not (torch.compiler.is_compiling() or is_number(scaling)):
        raise InputError(f"lora_linear: scaling must be a number, got {short(scaling)}")
    if set_batch_invariant.value:
        return lora_linear_reference(x, weight, a, b, bias, scaling=scaling, dropped=dropped)
    rows, K = count_rows(x), x.shape[-1]
    dropped = None if dropped is None else dropped.reshape(rows, K)
    y: Tensor = _LoRALinear.apply(x.reshape(rows, K), dropped, weight, bias, a, b, scaling)
    return y.view(*x.shape[:-1], weight.shape[0])


def lora_linear_reference(
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    scaling: float = 1.0,
    dropped: Tensor | None = None,
) -> Tensor:
    """The specification of `lora_linear`, in plain torch.

    Args:
        x: (..., K).
        weight: (M, K).
        a: (r, K).
        b: (M, r).
        bias: (M,), or None.
        scaling: factor of the update. Default: 1.
        dropped: x after dropout, (..., K): a multiplies it in place of x. Default: None.

    Returns:
        (..., M).
    """
    down = dense_linear(x if dropped is None else dropped, a)
    return dense_linear(x, weight, bias) + scaling * dense_linear(down, b)


@custom_op(keep=lambda x, dropped, weight, *_: weight.shape[0] >= weight.shape[1])
def _lora_linear_forward(
    x: Tensor, dropped: Tensor | None, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """x (N, K) -> y (N, M), and x a^T (N, r) for the backward pass."""
    y, down = x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], a.shape[0])
    if is_fake(x):
        return y, down
    torch.mm(x if dropped is None else dropped, a.t(), out=down)
    torch.addmm(y if bias is None else bias, down, b.t(), beta=0 if bias is None else 1, alpha=scaling, out=y)
    return y.addmm_(x, weight.t()), down


@custom_op()
def _lora_linear_backward(
    dy: Tensor, x: Tensor | None, dropped: Tensor | None, weight: Tensor, a: Tensor, b: Tensor, down: Tensor,
    scaling: float, need_x: bool, need_dropped: bool, need_weight: bool, need_bias: bool, need_a: bool, need_b: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, dropped, weight, bias, a and b; a gradient that is not needed is empty. x is None if no
    gradient needs it."""
    rows = (dy.shape[0], weight.shape[1])
    dx, d_dropped, d_bias = (
        dy.new_empty(shape if needed else 0)
        for shape, needed in ((rows, need_x), (rows, need_dropped), (dy.shape[1], need_bias))
    )
    dw, da, db = (
        empty_gradient(parameter, needed, dy) for parameter, needed in ((weight, need_weight), (a, need_a), (b, need_b))
    )
    gradients = dx, d_dropped, dw, d_bias, da, db
    if is_fake(dy):
        return gradients
    source, d_source, need_source = (x, dx, need_x) if dropped is None else (dropped, d_dropped, need_dropped)
    _update_gradients(dy, source, a, b, down, scaling, d_source if need_source else None, da if need_a else None)
    if need_x:
        torch.addmm(dx, dy, weight, beta=0 if dropped is not None else 1, out=dx)
    if need_weight and x is not None:
        torch.mm(dy.t(), x, out=dw)
    if need_bias:
        torch.sum(dy, 0, out=d_bias)
    if need_b:
        torch.addmm(db, dy.t(), down, beta=0, alpha=scaling, out=db)
    return gradients


def _update_gradients(
    dy: Tensor, x: Tensor | None, a: Tensor, b: Tensor, down: Tensor, scaling: float, dx: Tensor | None,
    da: Tensor | None,
) -> None:  # fmt: skip
    """Fill `dx` and `da`, where they are not None, with the gradients of x and a in scaling * x a^T b^T."""
    if dx is None and da is None:
        return
    d_down = torch.addmm(down, dy, b, beta=0, alpha=scaling)
    if da is not None and x is not None:
        torch.mm(d_down.t(), x, out=da)
    if dx is not None:
        torch.mm(d_down, a, out=dx)


class _LoRALinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dropped, weight, bias, a, b, scaling):
        _, _, need_weight, _, need_a, _, _ = ctx.needs_input_grad
        y, down = _lora_linear_forward(x, dropped, weight, bias, a, b, scaling)
        needs_x = need_weight or (need_a and dropped is None)
        ctx.save_for_backward(x if needs_x else None, dropped, weight, a, b, down)
        ctx.scaling = scaling
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _lora_linear_backward(dy, *ctx.saved_tensors, ctx.scaling, *ctx.needs_input_grad[:6])
