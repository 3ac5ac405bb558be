"""A linear layer with a frozen float8 weight and a low-rank update, as `lora_linear` computes it.

All products read x and the gradient of the result in float8, with a scale for each row. So the layer needs its input in
float8 only, and saves half of the bytes for the backward pass. With dropout, a multiplies the input after dropout, in
the model's dtype. x a^T and the gradients of a and b are computed in the model's dtype. The update is part of
the float8 products with the weight if the rows have tails (`ops.float8.tail`).
"""

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.float8.cast import float8_cast, float8_transpose
from ligermodels.ops.float8.linear import Float8Recipe, check_frozen
from ligermodels.ops.float8.low_rank import correlate, project
from ligermodels.ops.float8.mm import float8_mm
from ligermodels.ops.float8.scaling import check_float8_device
from ligermodels.ops.float8.tail import low_rank_sum
from ligermodels.ops.float8.tensor import Float8Tensor
from ligermodels.ops.runtime.checks import check_tensor
from ligermodels.ops.runtime.dispatch import refuse_batch_invariant
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable, reject_dtensors
from ligermodels.ops.runtime.tensors import as_rows, autocast_dtype, empty_gradient, under_autocast


@torch.compiler.disable  # selective activation checkpointing cannot trace ops that overwrite operands
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
    """x weight^T + bias + scaling * x a^T b^T, with x weight^T and the gradient of x in float8.

    If the rows of the weight have a tail of `tail_of(r)` columns, and so do x and the gradient of the result where they
    are Float8Tensors, the update is part of the float8 products (`ops.float8.tail`), and the tails are overwritten.
    Otherwise a separate pass adds the update in the model's dtype. Neither activations nor gradients are transposed:
    the weight has no gradient.

    Args:
        x: (..., K), any floating dtype, or a Float8Tensor that the previous op has written.
        weight: (M, K), with rows and one scale. The gradient of x reads its columns, or transposes its rows.
        a: (r, K), dtype of x.
        b: (M, r), dtype of x.
        bias: (M,), dtype of x, without a gradient; or None.
        recipe: formats and accumulation.
        scaling: factor of the update. Default: 1.
        dropped: x after dropout, (..., K), dtype of x: a multiplies it in place of x. Default: None.

    Returns:
        (..., M), of the dtype of x. Under autocast all operands and the result have autocast's dtype. The gradient of
        the result may be a Float8Tensor too.

    Raises:
        InputError: shapes, dtypes or devices do not fit; the bias needs a gradient; or an operand is a DTensor.
        BackendError: a GPU without float8.
    """
    refuse_batch_invariant("float8_lora_linear")
    name = "float8_lora_linear"
    if not isinstance(x, Float8Tensor):
        (x,) = under_autocast(x)
    a, b, bias, dropped = tensors = under_autocast(a, b, bias, dropped)
    reject_dtensors(name, x, *tensors)
    check_float8_device(name, x.device)
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


@custom_op(("x", "w"), keep=lambda x, x_scale, dropped, w, w_scale, bias, a, *_: w.shape[0] >= a.shape[1])
def _float8_lora_forward(
    x: Tensor, x_scale: Tensor, dropped: Tensor | None, w: Tensor, w_scale: Tensor, bias: Tensor | None,
    a: Tensor, b: Tensor, scaling: float, fast: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x (N, K), w (M, K), with or without tails -> y (N, M), and x a^T (N, r) for the backward pass, in the dtype of a.

    Tails of x and w are overwritten."""
    down = a.new_empty(x.shape[0], a.shape[0])
    if is_fake(a):
        return a.new_empty(x.shape[0], w.shape[0]), down
    source, scale = (x[:, : a.shape[1]], x_scale) if dropped is None else (dropped, None)
    y = low_rank_sum(
        x, x_scale, w, w_scale, source, scale, a.t(), b, down, 1.0, scaling, a.dtype, bias, fast_accumulation=fast
    )
    return y, down


@custom_op(("dy", "w"))
def _float8_lora_backward(
    dy: Tensor, dy_scale: Tensor, x: Tensor | None, x_scale: Tensor | None, dropped: Tensor | None, w: Tensor | None,
    w_scale: Tensor, a: Tensor, b: Tensor, down: Tensor, scaling: float, fast: bool, dtype: torch.dtype,
    need_dropped: bool, need_a: bool, need_b: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x (in `dtype`), dropped, a and b; a gradient that is not needed is empty.

    dy and x have tails or none; so has w, the transposed weight. w is None if the gradient of x is not needed. x is
    None if the gradient of a is not needed, or is computed from `dropped`. Tails of dy and w are overwritten."""
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


def _overwritten(wide: Tensor | None) -> Tensor | None:
    """`wide`, for an op that overwrites its tail.

    Autograd may have saved `wide` for its rows, which do not change: the result has a version counter of its own."""
    return None if wide is None else wide.data


class _Float8LoRALinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dropped, weight, bias, a, b, scaling, recipe):
        x8 = float8_cast(x, recipe.dtype, by_row=True, tail=weight.tail)
        ctx.dropped_shape = None if dropped is None else dropped.shape
        dropped = None if dropped is None else as_rows(dropped)
        y, down = _float8_lora_forward(
            _overwritten(x8.wide), x8.scale, dropped, _overwritten(weight.wide), weight.scale, bias, a, b, scaling,
            recipe.forward_fast,
        )  # fmt: skip
        keep_x = ctx.needs_input_grad[4] and dropped is None  # for the gradient of a
        layout = weight.wide if weight.columns is None else weight.columns
        layout = layout if ctx.needs_input_grad[0] else None
        kept = (x8.wide, x8.scale) if keep_x else (None, None)
        ctx.save_for_backward(*kept, dropped, layout, weight.scale, a, b, down)
        ctx.scaling, ctx.recipe, ctx.transposed = scaling, recipe, weight.columns is not None
        ctx.shape, ctx.dtype, ctx.tail = x.shape, x.dtype, weight.tail if dropped is None else 0
        # Within this function: the backward pass of a view outside would dequantise a Float8Tensor gradient.
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
            _overwritten(dy8.wide), dy8.scale, x, x_scale, dropped, _overwritten(w), *others, ctx.scaling,
            ctx.recipe.backward_fast, ctx.dtype, need_dropped, need_a, need_b,
        )  # fmt: skip
        dx = dx.view(ctx.shape) if need_x else None
        return dx, d_dropped.view(ctx.dropped_shape) if need_dropped else None, None, None, da, db
