"""A linear layer with a low-rank update, `lora_linear`, whose weight is float8 and frozen."""

import torch
from torch import Tensor

from ligermodels.errors import BackendError, InputError
from ligermodels.ops.float8.cast import float8_cast, float8_transpose
from ligermodels.ops.float8.linear import Float8Recipe, float8_unsupported
from ligermodels.ops.float8.mm import float8_mm
from ligermodels.ops.float8.tensor import Float8Tensor
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable, reject_dtensors
from ligermodels.ops.runtime.tensors import check_tensor, empty_gradient, under_autocast


def float8_lora_linear(
    x: Tensor,
    weight: Float8Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Float8Recipe,
    scaling: float = 1.0,
    dropped: Tensor | None = None,
) -> Tensor:
    """x weight^T + bias + scaling * x a^T b^T, the first product in float8, and with it the gradient of x.

    x: (..., K), any floating dtype. weight: (M, K), with rows; the gradient of x takes its columns, or transposes its
    rows. a: (r, K). b: (M, r). bias: (M,). All but the weight of x's dtype; under autocast they are cast to its dtype.
    dropped: x after dropout, (..., K), which a multiplies in place of x. Neither activations nor gradients are
    transposed: the weight has no gradient. Returns (..., M) of x's dtype.
    Raises InputError if shapes, dtypes or devices do not fit, for a bias that needs a gradient, and for DTensors;
    BackendError on a GPU without float8.
    """
    name = "float8_lora_linear"
    x, a, b, bias, dropped = tensors = under_autocast(x, a, b, bias, dropped)
    reject_dtensors(name, *tensors)
    if (reason := float8_unsupported(x.device)) is not None:
        raise BackendError(f"{name}: {reason}")
    rows, K, M = x.shape[:-1].numel(), x.shape[-1], weight.shape[0]
    if weight.shape != (M, K) or weight.rows is None:
        raise InputError(f"{name}: weight must be a Float8Tensor (M, {K}) with rows")
    check_tensor(name, "a", a, ("r", K), x.device, x.dtype)
    check_tensor(name, "b", b, (M, a.shape[0]), x.device, x.dtype)
    if bias is not None:
        check_tensor(name, "bias", bias, (M,), x.device, x.dtype)
        if bias.requires_grad:
            raise InputError(f"{name}: bias must need no gradient: the layer is frozen but for a and b")
    if dropped is not None:
        check_tensor(name, "dropped", dropped, x.shape, x.device, x.dtype)
        dropped = dropped.reshape(rows, K)
    y: Tensor = _Float8LoRALinear.apply(x.reshape(rows, K), dropped, weight, bias, a, b, scaling, recipe)
    return y.view(*x.shape[:-1], M)


@custom_op()
def _float8_lora_forward(
    x: Tensor, x_rows: Tensor, x_scale: Tensor, dropped: Tensor | None, w_rows: Tensor, w_scale: Tensor,
    bias: Tensor | None, a: Tensor, b: Tensor, scaling: float, fast: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x (N, K) -> y (N, M), and x a^T (N, r) for the backward pass."""
    if is_fake(x):
        return x.new_empty(x.shape[0], w_rows.shape[0]), x.new_empty(x.shape[0], a.shape[0])
    y = float8_mm(x_rows, w_rows, x_scale, w_scale, x.dtype, bias, fast_accumulation=fast)
    down = torch.mm(x if dropped is None else dropped, a.t())
    return y.addmm_(down, b.t(), alpha=scaling), down


@custom_op()
def _float8_lora_backward(
    dy: Tensor, dy_rows: Tensor | None, dy_scale: Tensor | None, x: Tensor | None, dropped: Tensor | None,
    w_columns: Tensor | None, w_scale: Tensor, a: Tensor, b: Tensor, down: Tensor, scaling: float, fast: bool,
    need_x: bool, need_dropped: bool, need_a: bool, need_b: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, dropped, a and b; empty if not needed. x is None if no gradient needs it."""
    rows = (dy.shape[0], a.shape[1])
    d_dropped = dy.new_empty(rows if need_dropped else 0)
    da, db = empty_gradient(a, need_a, dy), empty_gradient(b, need_b, dy)
    if is_fake(dy):
        return dy.new_empty(rows if need_x else 0), d_dropped, da, db
    dx = dy.new_empty(0)
    if need_x and dy_rows is not None and dy_scale is not None and w_columns is not None:
        dx = float8_mm(dy_rows, w_columns, dy_scale, w_scale, dy.dtype, fast_accumulation=fast)
    source, need_source = (x, need_x) if dropped is None else (dropped, need_dropped)
    if need_a or need_source:
        d_down = torch.addmm(down, dy, b, beta=0, alpha=scaling)
        if need_a and source is not None:
            torch.mm(d_down.t(), source, out=da)
        if need_source and dropped is None:
            dx.addmm_(d_down, a)
        elif need_source:
            torch.mm(d_down, a, out=d_dropped)
    if need_b:
        torch.addmm(db, dy.t(), down, beta=0, alpha=scaling, out=db)
    return dx, d_dropped, da, db


class _Float8LoRALinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dropped, weight, bias, a, b, scaling, recipe):
        x8 = float8_cast(x, recipe.dtype)
        assert x8.rows is not None
        y, down = _float8_lora_forward(
            x, x8.rows, x8.scale, dropped, weight.rows, weight.scale, bias, a, b, scaling, recipe.forward_fast
        )
        needs_x = ctx.needs_input_grad[4] and dropped is None
        layout = weight.rows if weight.columns is None else weight.columns
        layout = layout if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(x if needs_x else None, dropped, layout, weight.scale, a, b, down)
        ctx.scaling, ctx.recipe, ctx.transposed = scaling, recipe, weight.columns is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        need_x, need_dropped, _, _, need_a, need_b = ctx.needs_input_grad[:6]
        x, dropped, layout, *others = ctx.saved_tensors
        rows = scale = w_columns = None
        if need_x:
            w_columns = layout if ctx.transposed else float8_transpose(layout)
            dy8 = float8_cast(dy, ctx.recipe.gradient_dtype)
            rows, scale = dy8.rows, dy8.scale
        dx, d_dropped, da, db = _float8_lora_backward(
            dy, rows, scale, x, dropped, w_columns, *others, ctx.scaling, ctx.recipe.backward_fast, need_x,
            need_dropped, need_a, need_b,
        )  # fmt: skip
        return dx, d_dropped, None, None, da, db
