"""RMSNorm with a float8 result, alone or after a residual addition, for a next layer with a frozen weight: see
`ops.norm.rms_norm` for the formulas.

The result has one scale per row, from the row's maximum. Rows are held in registers, so there is one pass. Layers with
trained weights need one scale per tensor: they cast their inputs themselves.
"""

import torch
from torch import Tensor

from ligermodels.ops.float8.cast import check_last
from ligermodels.ops.float8.cast_by_row import check_tail, empty_rows, of_rows, rows_reference, scale_of_rows
from ligermodels.ops.float8.scaling import MAX_EXPONENT, check_float8_dtype, store_row
from ligermodels.ops.float8.tensor import Float8Tensor
from ligermodels.ops.norm.norm_rows import MAX_KERNEL_WIDTH, forward_launch, load_rows, store_rows
from ligermodels.ops.norm.rms_norm import CastingMode, check_casting_mode, rms_norm_backward, rms_norm_reference
from ligermodels.ops.runtime.checks import Signature, check_eps
from ligermodels.ops.runtime.dispatch import tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_fake, mark_constants, once_differentiable
from ligermodels.ops.runtime.tensors import count_rows, empty_like, rows_and_stride

TENSORS = Signature(x="... N+", residual="... N =x ?", weight="N")


def float8_add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    offset: float = 0.0,
    casting_mode: CastingMode = "llama",
    tail: int = 0,
) -> tuple[Float8Tensor, Tensor]:
    """`add_rms_norm` with the normalised sum as float8 with one scale per row, for a float8 linear layer with a frozen
    weight.

    Args:
        x: (..., N), any floating dtype and strides, N a multiple of 16.
        residual: (..., N), of x's dtype, any strides; None for no sum.
        weight: (N,), any floating dtype.
        eps: added to the mean square.
        dtype: float8 dtype of y.
        offset: added to the weight: 1 for norms that store weight - 1 (Gemma).
        casting_mode: "llama" rounds the normalised value to x's dtype before the product with the weight, "gemma" does
            not.
        tail: columns of memory after each row of y, a multiple of 16: see `ops.float8.tail`.

    Returns:
        (y, sum): y a Float8Tensor in the row-major layout, and x + residual, rounded to x's dtype (x itself without a
        residual).

    Raises:
        InputError: shapes, dtypes or devices do not fit, a wrong tail or dtype, a negative `eps`, or a
            DTensor.
        BackendError: a GPU without float8.
    """
    check_tail("float8_add_rms_norm", tail)
    TENSORS.check("float8_add_rms_norm", x, residual, weight)
    check_casting_mode("float8_add_rms_norm", casting_mode)
    check_eps("float8_add_rms_norm", eps)
    check_float8_dtype("float8_add_rms_norm", "dtype", dtype)
    check_last("float8_add_rms_norm", "x", x)
    y, total = _Float8RMSNorm.apply(x, residual, weight, eps, dtype, offset, casting_mode == "llama", tail)
    return y, total


@kernel
def _rms_norm_rows_kernel(
    x, x_stride, residual, residual_stride, weight, total, rstd, rows, pitch, scales, M, N, eps, offset,
    ADD: tl.constexpr, CAST_BEFORE: tl.constexpr, MAX_EXPONENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows per program: writes x + residual with ADD, 1 / rms of each row, and the result."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    v = load_rows(x, x_stride, first, M, N, ROWS, BLOCK).to(tl.float32)
    if ADD:
        v += load_rows(residual, residual_stride, first, M, N, ROWS, BLOCK).to(tl.float32)
        rounded = v.to(total.dtype.element_ty)
        store_rows(total, rounded, first, M, N, ROWS, BLOCK)
        v = rounded.to(tl.float32)
    row = first + tl.arange(0, ROWS)
    inverse_rms = 1.0 / tl.sqrt(tl.sum(v * v, axis=1) / N + eps)
    tl.store(rstd + row, inverse_rms, mask=row < M)
    y = v * inverse_rms[:, None]
    if CAST_BEFORE:
        y = y.to(x.dtype.element_ty).to(tl.float32)
    col = tl.arange(0, BLOCK)
    y *= (tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32) + offset)[None, :]
    inverse = scale_of_rows(tl.abs(y), scales, row, M, MAX_EXPONENT)
    store_row(rows, y, inverse, row, 0, M, N // 4, pitch, MAX_EXPONENT, ROWS, BLOCK)


@custom_op()
def _float8_rms_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, dtype: torch.dtype, tail: int, eps: float, offset: float,
    cast_before: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Rows of the result with a tail, and their scales; the sum (empty without a residual); 1 / rms of each row.
    cast_before: casting mode "llama"."""
    M, N = count_rows(x), x.shape[-1]
    if not use_kernels(x, weight) or N > MAX_KERNEL_WIDTH:
        total = x if residual is None else (x + residual).contiguous()
        y, rstd = _reference(total, weight, eps, offset, cast_before)
        return *rows_reference(y, dtype, tail), x.new_empty(0) if residual is None else total, rstd
    rows, scale = empty_rows(x, M, N, dtype, tail)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    total = x.new_empty(0) if residual is None else empty_like(x)
    if is_fake(rows) or not rows.numel():
        return rows, scale, total, rstd
    launch = forward_launch(M, N)
    _rms_norm_rows_kernel[(launch.programs,)](
        *rows_and_stride(x), *rows_and_stride(residual), weight.contiguous(), total, rstd, rows.view(torch.int32),
        (N + tail) // 4, scale, M, N, eps, offset, ADD=residual is not None, CAST_BEFORE=cast_before,
        MAX_EXPONENT=MAX_EXPONENT[dtype], ROWS=launch.rows, BLOCK=launch.width, num_warps=launch.warps,
    )  # fmt: skip
    return rows, scale, total, rstd


def _reference(x: Tensor, weight: Tensor, eps: float, offset: float, cast_before: bool) -> tuple[Tensor, Tensor]:
    """RMSNorm of x (..., N) with weight, eps, offset and cast_before ("llama"): float32 (M, N), and 1 / rms of each
    row, (...)."""
    wide = x.reshape(-1, x.shape[-1]).float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = wide * rstd
    return (y.to(x.dtype).float() if cast_before else y) * (weight.float() + offset), rstd.reshape(x.shape[:-1])


class _Float8RMSNorm(torch.autograd.Function):
    """(y, sum) of `float8_add_rms_norm`."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps, dtype, offset, cast_before, tail):
        ctx.eps, ctx.offset = eps, offset
        *parts, total, rstd = _float8_rms_norm_forward(x, residual, weight, dtype, tail, eps, offset, cast_before)
        total = x if residual is None else total
        ctx.save_for_backward(total, weight, rstd)
        ctx.set_materialize_grads(False)  # an unused sum costs nothing
        y = of_rows(tuple(parts), x.shape, x.dtype)
        mark_constants(ctx, (y, range(3)), (total, range(2)))
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dtotal=None):
        x, weight, rstd = ctx.saved_tensors
        if dy is None:
            return dtotal, dtotal, None
        need_x, need_residual, need_weight = ctx.needs_input_grad[:3]
        if use_kernels(x, weight) and x.shape[-1] <= MAX_KERNEL_WIDTH:
            dx, dw = rms_norm_backward(dy, dtotal, x, weight, rstd, need_x or need_residual, need_weight, ctx.offset)
            return dx, dx, dw
        with torch.enable_grad():
            inputs = x.detach().requires_grad_(), weight.detach().requires_grad_()
            y = rms_norm_reference(*inputs, ctx.eps, offset=ctx.offset, casting_mode="gemma")
            dx, dw = torch.autograd.grad(y, inputs, dy)
        dx = dx if dtotal is None else dx + dtotal
        return dx, dx, dw
