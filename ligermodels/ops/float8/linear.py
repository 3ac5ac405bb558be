"""A linear layer in float8: y = x W^T, dx = dy W and dW = dy^T x, each a product of float8 operands.

Scales are tensor-wise, so that one rounding serves both products in which a tensor takes part, in either layout. Where
the weight is frozen there is no dW, and x and dy have a scale for each row: they are cast in one pass.
"""

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ligermodels.arguments import check_flag
from ligermodels.errors import BackendError, InputError
from ligermodels.ops.float8.cast import float8_cast, float8_transpose, with_layouts
from ligermodels.ops.float8.mm import OUTPUTS, float8_mm, widens
from ligermodels.ops.float8.scaling import ALIGNMENT, E4M3, E5M2, aligned
from ligermodels.ops.float8.tensor import Float8Tensor
from ligermodels.ops.runtime.library import once_differentiable, reject_dtensors
from ligermodels.ops.runtime.tensors import autocast_dtype

Computed = Literal["once", "first", "again"]
"""Which forward pass it is. Activation checkpointing runs a block twice: the "first" pass keeps nothing for the
backward pass; the one "again", before the backward pass, keeps what that reads, and takes the results of products that
the first has kept (`mm.widens`). A pass that computes all of it again is as good as "once"."""


class Float8Form(NamedTuple):
    """In which form a linear layer takes its input from what computes it.

    dtype: the format of the input. gradient_dtype: that of gradients of outputs. by_row: the weight is frozen, so that
    no product sums over rows: each row has a scale of its own, and there is no transposed layout. tail: columns of
    memory after each row, of the input and of gradients of outputs: see `tail`. rows, columns: the layouts wanted of
    the input, `columns` where gradients are recorded.
    """

    dtype: torch.dtype
    gradient_dtype: torch.dtype
    by_row: bool = False
    tail: int = 0
    rows: bool = True
    columns: bool = True

    @property
    def layouts(self) -> dict[str, Any]:
        """As ops take them that write float8."""
        return {name: getattr(self, name) for name in ("by_row", "tail", "rows", "columns")}


@dataclass(frozen=True)
class Float8Recipe:
    """How linear layers compute in float8. Scales of what meets a weight that is trained are tensor-wise, of the
    tensor's own maximum or of a bound of it; of what meets a frozen weight they are of each row.

    gradient_dtype: the format of gradients of outputs; inputs and weights are E4M3.
    forward_fast, backward_fast: whether the tensor cores' sums stay in their registers, of fewer bits than float32.
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

    def form(self, weight: Tensor, *, tail: int = 0, computed: Computed = "once") -> Float8Form:
        """The form of what meets this weight: with a tail, if it is frozen; else with the layouts that this pass
        reads."""
        if not weight.requires_grad:
            return Float8Form(self.dtype, self.gradient_dtype, by_row=True, tail=tail, columns=False)
        rows, columns = computed != "again", computed != "first"
        return Float8Form(self.dtype, self.gradient_dtype, rows=rows, columns=columns)


@torch.compiler.disable  # which would lose the gradient of an x that is a Float8Tensor
def float8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: Float8Recipe, frozen: Float8Tensor | None = None,
    computed: Computed = "once",
) -> Tensor:  # fmt: skip
    """x weight^T + bias, with x, weight and the gradient of the result in float8.

    x: (..., K), any floating dtype, or a Float8Tensor, whose producer has cast it. weight: (N, K), any floating dtype.
    bias: (N,). K and N are multiples of 16; the number of rows is any. frozen: a weight that needs no gradient, cast
    before by `float8_cast` with one scale; `weight` is then not read. The gradient of x takes its columns, or
    transposes its rows. computed: for activation checkpointing, whose "first" pass transposes nothing, and which
    "again" casts only what the backward pass needs, where it has kept the product (see `mm.widens`).
    Returns (..., N) of x's dtype, under autocast of its dtype. The gradient of the result may be a Float8Tensor too.
    Gradients are computed only for what requires one, in the dtypes of x, weight and bias.
    Raises InputError if shapes, dtypes or devices do not fit, and for DTensors; BackendError on a GPU without float8.
    """
    reject_dtensors("float8_linear", x, weight, bias)
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1] or x.device != weight.device:
        raise InputError(
            f"float8_linear: x (..., K) and weight (N, K) must fit and be on one device; got {tuple(x.shape)} on "
            f"{x.device} and {tuple(weight.shape)} on {weight.device}"
        )
    check_float8_sizes("float8_linear", *weight.shape)
    if (reason := float8_unsupported(x.device)) is not None:
        raise BackendError(f"float8_linear: {reason}")
    if frozen is not None:
        check_frozen("float8_linear", "frozen", frozen, weight.shape)
    dtype, by_row = autocast_dtype(x), recipe.form(weight).by_row
    if dtype not in OUTPUTS:
        raise InputError(f"float8_linear: computes bfloat16, float16 or float32, not {dtype}; cast model and inputs")
    recording = torch.is_grad_enabled()
    need_x, need_weight = recording and x.requires_grad, recording and weight.requires_grad
    rows, columns = computed != "again", computed != "first"
    x_rows, x_columns = rows or by_row or not need_weight, need_weight and columns
    if isinstance(x, Float8Tensor) and not (need_weight and x.scale.dim()):
        x8 = _with_layouts(x, x_rows, x_columns, computed)
    else:  # nor does a product sum over rows with scales of their own
        numbers = x.dequantize() if isinstance(x, Float8Tensor) else x
        x8 = float8_cast(numbers, recipe.dtype, rows=x_rows, columns=x_columns, by_row=by_row)
    if frozen is None:
        w8 = float8_cast(weight, recipe.dtype, rows=rows or not need_x, columns=need_x and columns)
    else:
        w8 = with_layouts(frozen, True, False)
    transposed = frozen is None or w8.columns is not None
    of_x = (x8.columns if columns else _absent(x8, transposed=True)) if need_weight else None
    of_w = None
    if need_x:
        of_w = w8.rows if not transposed else w8.columns if columns else _absent(w8, transposed=True)
    kept = of_x, x8.scale, of_w, w8.scale
    y = _Gradients.apply(x, weight, bias, kept, dtype, recipe, transposed, by_row)
    if computed == "again" and not widens(weight):
        x8, w8 = (_with_layouts(each, True, False, computed) for each in (x8, w8))
    operands = (_absent(each) if each.wide is None else _rows(each) for each in (x8, w8))
    added = None if bias is None else bias.detach().to(dtype)
    found: Tensor = _Product.apply(y, *operands, x8.scale, w8.scale, added, recipe.forward_fast)
    return found


def check_float8_sizes(name: str, out_features: int, in_features: int) -> None:
    """InputError, naming the layer, unless both sizes are multiples of 16, as float8 matrix products want them."""
    if out_features % ALIGNMENT or in_features % ALIGNMENT:
        raise InputError(
            f"{name}: in_features {in_features} and out_features {out_features} must be multiples of {ALIGNMENT} for "
            "float8; exclude the layer"
        )


def check_frozen(op: str, name: str, weight: Tensor, shape: tuple[int | None, ...]) -> None:
    """InputError unless the weight is a Float8Tensor with one scale and of this shape, in which None is any size."""
    fits = isinstance(weight, Float8Tensor) and weight.dim() == 2 and not weight.scale.dim()
    if not fits or any(wanted not in (None, size) for wanted, size in zip(shape, weight.shape, strict=True)):
        raise InputError(f"{op}: {name} must be a Float8Tensor of shape {tuple(shape)} with one scale")


def _with_layouts(x: Float8Tensor, rows: bool, columns: bool, computed: Computed) -> Float8Tensor:
    """`with_layouts`, which selective checkpointing does not see: it refuses ops that the first pass has not run."""
    with _disable_current_modes() if computed == "again" else nullcontext():
        return with_layouts(x, rows, columns)


def _absent(x: Float8Tensor, *, transposed: bool = False) -> Tensor:
    """What stands for rows, or columns, that are not there: their shape, and no elements of their own."""
    M, N = x.shape[:-1].numel(), x.shape[-1]
    there = x.columns if x.wide is None else x.wide
    assert there is not None
    return there.new_empty(1).expand((N, aligned(M)) if transposed else (M, N))


def _rows(x: Float8Tensor) -> Tensor:
    rows = x.rows
    assert rows is not None
    return rows.contiguous()  # without a tail


def _columns(x: Float8Tensor) -> Tensor:
    assert x.columns is not None
    return x.columns


class _Gradients(torch.autograd.Function):
    """The backward pass. Forward is what stands for the result: a shape that holds nothing.

    The product is a function of its own, after what is saved here: activation checkpointing, which computes again up to
    the last tensor that is saved, then leaves out the last product of a block."""

    @staticmethod
    def forward(ctx, x, weight, bias, kept, dtype, recipe, transposed, by_row):
        ctx.save_for_backward(*kept)  # plain tensors, which hooks on what is saved know
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


@functools.cache
def float8_unsupported(device: torch.device) -> str | None:
    """Why float8 linear layers cannot run on this device, or None: GPUs need compute capability 8.9 or higher. On the
    CPU they compute as the specification says, slowly."""
    if device.type in ("cpu", "meta"):
        return None
    if device.type != "cuda":
        return f"float8 needs a CUDA device, not {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {capability[0]}.{capability[1]}; float8 needs 8.9 or higher"
    return None
