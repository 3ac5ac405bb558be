"""A linear layer with a low-rank update (LoRA; Hu et al., 2021, https://arxiv.org/abs/2106.09685).

The update is made first, and the GEMM of the weight adds to it: a sum of its own would read and write the result of
the layer once more. The same holds of the gradient of x.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.ops.runtime.library import custom_op, is_dtensor, is_fake, once_differentiable
from ligermodels.ops.runtime.tensors import check_tensor, empty_gradient, under_autocast


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

    x: (..., K), any floating dtype. weight: (M, K). a: (r, K). b: (M, r). bias: (M,). All of x's dtype; under autocast
    they are cast to its dtype. dropped: x after dropout, (..., K), which a multiplies in place of x.
    Returns (..., M) of x's dtype. Gradients are computed only for what requires one: a frozen weight costs none.
    DTensors go through torch's own ops, which have rules for them.
    Raises InputError if shapes, dtypes or devices do not fit.
    """
    x, weight, a, b, bias, dropped = tensors = under_autocast(x, weight, a, b, bias, dropped)
    if any(is_dtensor(t) for t in tensors if t is not None):
        return lora_linear_reference(x, weight, a, b, bias, scaling=scaling, dropped=dropped)
    name, rows, K = "lora_linear", x.shape[:-1].numel(), x.shape[-1]
    check_tensor(name, "weight", weight, ("M", K), x.device, x.dtype)
    check_tensor(name, "a", a, ("r", K), x.device, x.dtype)
    check_tensor(name, "b", b, (weight.shape[0], a.shape[0]), x.device, x.dtype)
    if bias is not None:
        check_tensor(name, "bias", bias, (weight.shape[0],), x.device, x.dtype)
    if dropped is not None:
        check_tensor(name, "dropped", dropped, x.shape, x.device, x.dtype)
        dropped = dropped.reshape(rows, K)
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
    """The specification of `lora_linear`, in plain torch."""
    return F.linear(x, weight, bias) + scaling * F.linear(F.linear(x if dropped is None else dropped, a), b)


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
    """The gradients of x, dropped, weight, bias, a and b; empty if not needed. x is None if no gradient needs it."""
    rows = (dy.shape[0], weight.shape[1])
    dx = dy.new_empty(rows if need_x else 0)
    d_dropped = dy.new_empty(rows if need_dropped else 0)
    d_bias = dy.new_empty(dy.shape[1] if need_bias else 0)
    dw, da, db = (empty_gradient(t, n, dy) for t, n in ((weight, need_weight), (a, need_a), (b, need_b)))
    if is_fake(dy):
        return dx, d_dropped, dw, d_bias, da, db
    source, need_source = (x, need_x) if dropped is None else (dropped, need_dropped)
    if need_a or need_source:
        d_down = torch.addmm(down, dy, b, beta=0, alpha=scaling)
        if need_a and source is not None:
            torch.mm(d_down.t(), source, out=da)
        if need_source:
            torch.mm(d_down, a, out=dx if dropped is None else d_dropped)
    if need_x and dropped is None:
        dx.addmm_(dy, weight)
    elif need_x:
        torch.mm(dy, weight, out=dx)
    if need_weight and x is not None:
        torch.mm(dy.t(), x, out=dw)
    if need_bias:
        torch.sum(dy, 0, out=d_bias)
    if need_b:
        torch.addmm(db, dy.t(), down, beta=0, alpha=scaling, out=db)
    return dx, d_dropped, dw, d_bias, da, db


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
