"""A linear layer with a low-rank update, `lora_linear`, whose weight is float8 and frozen.

All products read the float8 numbers of x and of the gradient of the result, each with a scale for each row: so the
layer needs its input in no other form, and keeps it for the backward pass in half of the bytes. With dropout, a
multiplies x after dropout, which is not cast. x a^T and the gradients of a and b are computed in the model's dtype;
what is added to the products of the weight is part of them, in float8, if there is a tail for it: see `tail`.
"""

import torch
from torch import Tensor

from ligermodels.errors import BackendError, InputError
from ligermodels.ops.float8.cast import float8_cast, float8_transpose
from ligermodels.ops.float8.linear import Float8Recipe, check_frozen, float8_unsupported
from ligermodels.ops.float8.low_rank import correlate, project
from ligermodels.ops.float8.mm import float8_mm
from ligermodels.ops.float8.tail import low_rank_sum
from ligermodels.ops.float8.tensor import Float8Tensor
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable, reject_dtensors
from ligermodels.ops.runtime.tensors import as_rows, autocast_dtype, check_tensor, empty_gradient, under_autocast


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
    """x weight^T + bias + scaling * x a^T b^T, the first product, and with it the gradient of x, in float8.

    x: (..., K), any floating dtype, or a Float8Tensor, whose producer has cast it. weight: (M, K), with rows and one
    scale; the gradient of x takes its columns, or transposes its rows. a: (r, K). b: (M, r). bias: (M,). a, b, bias and
    dropped are of x's dtype; under autocast all are cast to its dtype. dropped: x after dropout, (..., K), which a
    multiplies in place of x. Neither activations nor gradients are transposed: the weight has no gradient.
    If the weight's rows have a tail of `tail_of(r)` columns, which is overwritten, and so have x and the gradient of
    the result where these are Float8Tensors, what a and b add is part of the float8 products (see `tail`); else it is
    added in a pass of its own, in the model's dtype.
    Returns (..., M) of x's dtype, under autocast of its dtype. The gradient of the result may be a Float8Tensor too.
    Raises InputError if shapes, dtypes or devices do not fit, for a bias that needs a gradient, and for DTensors;
    BackendError on a GPU without float8.
    """
    name = "float8_lora_linear"
    if not isinstance(x, Float8Tensor):
        (x,) = under_autocast(x)
    a, b, bias, dropped = tensors = under_autocast(a, b, bias, dropped)
    reject_dtensors(name, x, *tensors)
    if (reason := float8_unsupported(x.device)) is not None:
        raise BackendError(f"{name}: {reason}")
    if x.dim() == 0:
        raise InputError(f"{name}: x must be of shape (..., K), got a single number")
    check_frozen(name, "weight", weight, (None, x.shape[-1]))
    M, K = weight.shape
    if weight.wide is None:
        raise InputError(f"{name}: weight must be a Float8Tensor with rows")
    dtype = autocast_dtype(x)
    check_tensor(name, "a", a, ("r", K), x.device, dtype)
    check_tensor(name, "b", b, (M, a.shape[0]), x.device, dtype)
    if bias is not None:
        check_tensor(name, "bias", bias, (M,), x.device, dtype)
        if bias.requires_grad:
            raise InputError(f"{name}: bias must need no gradient: the layer is frozen but for a and b")
    if dropped is not None:
        check_tensor(name, "dropped", dropped, x.shape, x.device, dtype)
    y: Tensor = _Float8LoRALinear.apply(x, dropped, weight, bias, a, b, scaling, recipe)
    return y


@custom_op(keep=lambda x, x_scale, dropped, w, w_scale, bias, a, *_: w.shape[0] >= a.shape[1])
def _float8_lora_forward(
    x: Tensor, x_scale: Tensor, dropped: Tensor | None, w: Tensor, w_scale: Tensor, bias: Tensor | None,
    a: Tensor, b: Tensor, scaling: float, fast: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x (N, K), w (M, K), with or without tails -> y (N, M), and x a^T (N, r) for the backward pass, in a's dtype.

    Tails are scratch memory, which the op writes before it reads them: so the schema declares no mutation."""
    down = a.new_empty(x.shape[0], a.shape[0])
    if is_fake(a):
        return a.new_empty(x.shape[0], w.shape[0]), down
    source, scale = (x[:, : a.shape[1]], x_scale) if dropped is None else (dropped, None)
    y = low_rank_sum(
        x, x_scale, w, w_scale, source, scale, a.t(), b, down, 1.0, scaling, a.dtype, bias, fast_accumulation=fast
    )
    return y, down


@custom_op()
def _float8_lora_backward(
    dy: Tensor, dy_scale: Tensor, x: Tensor | None, x_scale: Tensor | None, dropped: Tensor | None, w: Tensor | None,
    w_scale: Tensor, a: Tensor, b: Tensor, down: Tensor, scaling: float, fast: bool, dtype: torch.dtype,
    need_dropped: bool, need_a: bool, need_b: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, in `dtype`, dropped, a and b; empty if not needed. dy and x: with or without tails. w: the
    weight transposed, likewise; None if the gradient of x is not needed. x: None if that of a is not, or comes of
    dropped."""
    M, K = b.shape[0], a.shape[1]
    d_dropped = a.new_empty((dy.shape[0], K) if need_dropped else 0)
    da, db = empty_gradient(a, need_a, a), empty_gradient(b, need_b, a)
    dx = a.new_empty(0 if w is None else (dy.shape[0], K), dtype=dtype)
    if is_fake(a):
        return dx, d_dropped, da, db
    rows, d_down = dy[:, :M], torch.empty_like(down)
    if w is not None and dropped is None:
        dx = low_rank_sum(
            dy, dy_scale, w, w_scale, rows, dy_scale, b, a.t(), d_down, scaling, 1.0, dtype, fast_accumulation=fast
        )
    else:
        if w is not None:
            dx = float8_mm(rows.contiguous(), w, dy_scale, w_scale, dtype, fast_accumulation=fast)
        if need_a or need_dropped:
            project(rows, dy_scale, b, d_down, scaling)
    if need_dropped:
        torch.mm(d_down, a, out=d_dropped)
    if need_a and dropped is not None:
        correlate(dropped, None, d_down, da, transposed=True)
    elif need_a and x is not None:
        correlate(x[:, :K], x_scale, d_down, da, transposed=True)
    if need_b:
        correlate(rows, dy_scale, down, db, transposed=False, alpha=scaling)
    return dx, d_dropped, da, db


class _Float8LoRALinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dropped, weight, bias, a, b, scaling, recipe):
        x8 = float8_cast(x, recipe.dtype, by_row=True, tail=weight.tail)
        ctx.dropped_shape = None if dropped is None else dropped.shape
        dropped = None if dropped is None else as_rows(dropped)
        y, down = _float8_lora_forward(
            x8.wide, x8.scale, dropped, weight.wide, weight.scale, bias, a, b, scaling, recipe.forward_fast
        )
        keep_x = ctx.needs_input_grad[4] and dropped is None  # for the gradient of a
        layout = weight.wide if weight.columns is None else weight.columns
        layout = layout if ctx.needs_input_grad[0] else None
        kept = (x8.wide, x8.scale) if keep_x else (None, None)
        ctx.save_for_backward(*kept, dropped, layout, weight.scale, a, b, down)
        ctx.scaling, ctx.recipe, ctx.transposed = scaling, recipe, weight.columns is not None
        ctx.shape, ctx.dtype, ctx.tail = x.shape, x.dtype, weight.tail if dropped is None else 0
        # Here, not after it: the backward pass of a view would see a gradient in float8 as numbers.
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        need_x, need_dropped, _, _, need_a, need_b = ctx.needs_input_grad[:6]
        x, x_scale, dropped, layout, *others = ctx.saved_tensors
        dy8 = float8_cast(dy, ctx.recipe.gradient_dtype, by_row=True, tail=ctx.tail)
        w = None
        if need_x:
            tail = dy8.tail if dropped is None else 0
            w = layout if ctx.transposed else float8_transpose(layout[:, : ctx.shape[-1]], tail)
        dx, d_dropped, da, db = _float8_lora_backward(
            dy8.wide, dy8.scale, x, x_scale, dropped, w, *others, ctx.scaling, ctx.recipe.backward_fast, ctx.dtype,
            need_dropped, need_a, need_b,
        )  # fmt: skip
        dx = dx.view(ctx.shape) if need_x else None
        return dx, d_dropped.view(ctx.dropped_shape) if need_dropped else None, None, None, da, db
