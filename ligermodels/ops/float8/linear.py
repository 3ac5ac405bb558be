"""A linear layer in float8: y = x W^T, dx = dy W and dW = dy^T x, each a product of float8 operands.

Scales are tensor-wise: each tensor takes part in two products, in different layouts, with the same rounded numbers. If
the weight is frozen, there is no dW; then x and dy have a scale for each row, and are cast in one pass.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.arguments import check_flag
from ligermodels.errors import InputError
from ligermodels.ops.float8.cast import float8_cast, float8_transpose, with_layouts
from ligermodels.ops.float8.mm import OUTPUTS, float8_mm
from ligermodels.ops.float8.scaling import ALIGNMENT, E4M3, E5M2, check_float8_device
from ligermodels.ops.float8.tensor import Float8Tensor
from ligermodels.ops.runtime.checks import check_tensors
from ligermodels.ops.runtime.dispatch import refuse_batch_invariant
from ligermodels.ops.runtime.library import once_differentiable, reject_dtensors
from ligermodels.ops.runtime.tensors import autocast_dtype


class Float8Form(NamedTuple):
    """The form of the `Float8Tensor` that a linear layer with a frozen weight takes as its input from the previous op:
    in the row-major layout, with a scale for each row.

    Args:
        dtype: float8 format of the input.
        gradient_dtype: float8 format of gradients of outputs.
        tail: columns of memory after each row, for the input and for gradients of outputs: see `ops.float8.tail`.
            Default: 0.
    """

    dtype: torch.dtype
    gradient_dtype: torch.dtype
    tail: int = 0


@dataclass(frozen=True)
class Float8Recipe:
    """How linear layers compute in float8. Inputs and weights are E4M3.

    With a trained weight, inputs and gradients have one scale per tensor. With a frozen weight they have one scale per
    row.

    Args:
        gradient_dtype: format of gradients of outputs, E5M2 or E4M3. Default: E5M2.
        forward_fast: accumulate in the registers of tensor cores, with fewer bits than float32, in the forward pass.
            Default: True.
        backward_fast: the same for the backward pass. Default: True.

    Raises:
        InputError: a field has a wrong type or value; the message names it.
    """

    gradient_dtype: torch.dtype = E5M2
    forward_fast: bool = True
    backward_fast: bool = True

    dtype = E4M3

    def __post_init__(self) -> None:
        for name in ("forward_fast", "backward_fast"):
            check_flag(f"Float8Recipe: {name}", getattr(self, name))
        if self.gradient_dtype not in (E4M3, E5M2):
            raise InputError(
                f"Float8Recipe: gradient_dtype must be torch.float8_e4m3fn or torch.float8_e5m2, "
                f"got {self.gradient_dtype}"
            )

    def form(self, weight: Tensor, *, tail: int = 0) -> Float8Form | None:
        """The form of operands of this weight, with a tail; None if it is trained: then the layer casts its input."""
        return None if weight.requires_grad else Float8Form(self.dtype, self.gradient_dtype, tail)


@torch.compiler.disable  # compiled, an x that is a Float8Tensor would get no gradient
def float8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: Float8Recipe, frozen: Float8Tensor | None = None
) -> Tensor:
    """x weight^T + bias, with x, weight and the gradient of the result in float8.

    Gradients are computed only for operands that require one, in the dtypes of x, weight and bias.

    Args:
        x: (..., K), any floating dtype, or a `Float8Tensor` that the previous op has written. Any number of rows.
        weight: (N, K), any floating dtype. K and N are multiples of 16.
        bias: (N,), or None.
        recipe: formats and accumulation.
        frozen: the weight after `float8_cast`, with one scale, if it needs no gradient. `weight` is then not read. The
            gradient of x reads its columns, or transposes its rows. Default: None.

    Returns:
        (..., N), dtype of x, or autocast's dtype. The gradient of the result may be a `Float8Tensor` too.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or an operand is a DTensor.
        BackendError: a GPU without float8.
    """
    refuse_batch_invariant("float8_linear")
    dtype = _checked(x, weight, bias, frozen)
    by_row = not weight.requires_grad  # no product sums over rows
    recording = torch.is_grad_enabled()
    need_x, need_weight = recording and x.requires_grad, recording and weight.requires_grad
    x8 = _operand(x, recipe, need_weight, by_row)
    w8 = float8_cast(weight, recipe.dtype, columns=need_x) if frozen is None else with_layouts(frozen, True, False)
    transposed = w8.columns is not None
    layout = (w8.columns if transposed else w8.rows) if need_x else None
    saved = x8.columns if need_weight else None, x8.scale, layout, w8.scale
    y = _Gradients.apply(x, weight, bias, saved, dtype, recipe, transposed, by_row)
    detached = None if bias is None else bias.detach().to(dtype)
    product: Tensor = _Product.apply(y, _rows(x8), _rows(w8), x8.scale, w8.scale, detached, recipe.forward_fast)
    return product


def _checked(x: Tensor, weight: Tensor, bias: Tensor | None, frozen: Float8Tensor | None) -> torch.dtype:
    """The dtype of the result. Raises the errors of `float8_linear`."""
    check_tensors("float8_linear", x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    reject_dtensors("float8_linear", x, weight, bias)
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1] or x.device != weight.device:
        raise InputError(
            f"float8_linear: x (..., K) and weight (N, K) must fit and be on one device; got {tuple(x.shape)} on "
            f"{x.device} and {tuple(weight.shape)} on {weight.device}"
        )
    check_float8_sizes("float8_linear", *weight.shape)
    check_float8_device("float8_linear", x.device)
    if frozen is not None:
        check_frozen("float8_linear", "frozen", frozen, weight.shape)
    dtype = autocast_dtype(x)
    if dtype not in OUTPUTS:
        raise InputError(f"float8_linear: computes bfloat16, float16 or float32, not {dtype}; cast model and inputs")
    return dtype


def _operand(x: Tensor, recipe: Float8Recipe, need_weight: bool, by_row: bool) -> Float8Tensor:
    """x in float8, with columns if the weight needs a gradient."""
    if not isinstance(x, Float8Tensor):
        return float8_cast(x, recipe.dtype, columns=need_weight, by_row=by_row)
    if need_weight and x.scale.dim():  # products that sum over rows need one scale
        return float8_cast(x.dequantize(), recipe.dtype, columns=True, by_row=by_row)
    return with_layouts(x, True, need_weight)


def check_float8_sizes(name: str, out_features: int, in_features: int) -> None:
    """Raise InputError unless both sizes are multiples of 16, as float8 matrix products require.

    Args:
        name: name of the layer, for the message.
        out_features: rows of the weight.
        in_features: columns of the weight.
    """
    if out_features % ALIGNMENT or in_features % ALIGNMENT:
        raise InputError(
            f"{name}: in_features {in_features} and out_features {out_features} must be multiples of {ALIGNMENT} for "
            "float8; exclude the layer"
        )


def check_frozen(op: str, name: str, weight: Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise InputError unless a weight is a Float8Tensor with one scale and the given shape.

    Args:
        op: name of the op, for the message.
        name: name of its argument, for the message.
        weight: the argument.
        shape: its shape; None for any size.
    """
    fits = isinstance(weight, Float8Tensor) and weight.dim() == 2 and not weight.scale.dim()
    if not fits or any(expected not in (None, size) for expected, size in zip(shape, weight.shape, strict=True)):
        raise InputError(f"{op}: {name} must be a Float8Tensor of shape {tuple(shape)} with one scale")


def _rows(x: Float8Tensor) -> Tensor:
    rows = x.rows
    assert rows is not None
    return rows.contiguous()  # without a tail


def _columns(x: Float8Tensor) -> Tensor:
    assert x.columns is not None
    return x.columns


class _Gradients(torch.autograd.Function):
    """The backward pass. Forward returns a placeholder for the result: a shape without memory.

    The product is a separate function, after the tensors are saved here. Activation checkpointing recomputes only up to
    the last saved tensor, so it does not recompute the last product of a block."""

    @staticmethod
    def forward(ctx, x, weight, bias, saved, dtype, recipe, transposed, by_row):
        ctx.save_for_backward(*saved)  # plain tensors, for saved-tensor hooks
        ctx.recipe, ctx.dtypes = recipe, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.shape, ctx.transposed, ctx.by_row = x.shape, transposed, by_row
        return weight.new_empty((), dtype=dtype).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        x_columns, x_scale, layout, w_scale = ctx.saved_tensors
        fast = ctx.recipe.backward_fast
        dx = dw = db = None
        if need_x or need_weight:
            dtype = ctx.recipe.gradient_dtype
            dy8 = float8_cast(dy, dtype, rows=need_x, columns=need_weight, by_row=ctx.by_row)
        if need_x:
            w_columns = layout if ctx.transposed else float8_transpose(layout)
            dx = float8_mm(_rows(dy8), w_columns, dy8.scale, w_scale, ctx.dtypes[0], fast_accumulation=fast)
            dx = dx.view(ctx.shape)
        if need_weight:
            dw = float8_mm(_columns(dy8), x_columns, dy8.scale, x_scale, ctx.dtypes[1], fast_accumulation=fast)
        if need_bias:
            wide = dy.dequantize() if isinstance(dy, Float8Tensor) else dy
            db = wide.reshape(-1, wide.shape[-1]).sum(0, dtype=torch.float32).to(ctx.dtypes[2])
        return dx, dw, db


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, a, b, scale_a, scale_b, bias, fast):
        return float8_mm(a, b, scale_a, scale_b, y.dtype, bias, fast_accumulation=fast).view(y.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return (dy,)
