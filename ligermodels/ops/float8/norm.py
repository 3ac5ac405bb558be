"""RMSNorm with a float8 result, alone or after a residual addition: see `ops.norm.rms_norm` for the formulas.

One scale per tensor needs no pass for the maximum: |x| / rms(x) is at most sqrt(N), so the result is at most
sqrt(N) max|offset + weight|. One scale per row comes from the row's maximum: see `norm_by_row`.
"""

import math

import torch
from torch import Tensor

from ligermodels.ops.float8.cast import as_float8, check_last, empty_layouts, outputs, quantized_reference, tiles
from ligermodels.ops.float8.cast_by_row import check_tail, of_rows
from ligermodels.ops.float8.norm_by_row import float8_rms_norm_rows, normalized_reference
from ligermodels.ops.float8.scaling import (
    MAX_EXPONENT,
    TILE,
    aligned,
    bits_of_max,
    scale_and_inverse,
    scale_reference,
    store_float8,
    use_float8_kernels,
)
from ligermodels.ops.float8.tensor import Float8Tensor
from ligermodels.ops.norm.norm_rows import MAX_KERNEL_WIDTH, forward_launch, load_rows, store_rows
from ligermodels.ops.norm.rms_norm import CastingMode, check_casting_mode, rms_norm_backward, rms_norm_reference
from ligermodels.ops.runtime.checks import Signature
from ligermodels.ops.runtime.dispatch import tl, triton
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable
from ligermodels.ops.runtime.tensors import empty_like, rows_and_stride

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
    by_row: bool = False,
    tail: int = 0,
    rows: bool = True,
    columns: bool = True,
) -> tuple[Float8Tensor, Tensor]:
    """`add_rms_norm` with the normalised sum as float8, for a float8 linear layer.

    Args:
        x: (..., N), any floating dtype and strides, N a multiple of 16.
        residual: (..., N), of x's dtype, any strides; None for no sum.
        weight: (N,), any floating dtype.
        eps: added to the mean square.
        dtype: float8 dtype of y.
        offset: added to the weight: 1 for norms that store weight - 1 (Gemma).
        casting_mode: "llama" rounds the normalised value to x's dtype before the product with the weight, "gemma" does
            not.
        by_row: one scale per row, for a next layer with a frozen weight. Then y has only the row-major layout.
        tail: with by_row, columns of memory after each row of y, a multiple of 16: see `ops.float8.tail`.
        rows: False if activation checkpointing does not use the row-major layout of y. Without gradients y always has
            it.
        columns: False if activation checkpointing does not use the transposed layout of y, which the gradient of the
            next layer's weight needs. It is only written if gradients are recorded.

    Returns:
        (y, sum): y a Float8Tensor, and x + residual, rounded to x's dtype (x itself without a residual).

    Raises:
        InputError: shapes, dtypes or devices do not fit, a wrong tail, or a DTensor.
        BackendError: a GPU without float8.
    """
    check_tail("float8_add_rms_norm", tail, by_row)
    TENSORS.check("float8_add_rms_norm", x, residual, weight)
    check_casting_mode("float8_add_rms_norm", casting_mode)
    check_last("float8_add_rms_norm", "x", x)
    columns = columns and torch.is_grad_enabled()
    layouts = by_row, tail, rows or not columns, columns
    y, total = _Float8RMSNorm.apply(x, residual, weight, eps, dtype, offset, casting_mode == "llama", *layouts)
    return y, total


@kernel
def _rms_kernel(
    x, x_stride, residual, residual_stride, weight, total, rstd, bound, M, N, eps, offset, root,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows per program: writes x + residual with ADD, and 1 / rms of each row; and to `bound` the bits of
    root max|offset + weight|."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    v = load_rows(x, x_stride, first, M, N, ROWS, BLOCK).to(tl.float32)
    if ADD:
        v += load_rows(residual, residual_stride, first, M, N, ROWS, BLOCK).to(tl.float32)
        rounded = v.to(total.dtype.element_ty)
        store_rows(total, rounded, first, M, N, ROWS, BLOCK)
        v = rounded.to(tl.float32)
    row = first + tl.arange(0, ROWS)
    tl.store(rstd + row, 1.0 / tl.sqrt(tl.sum(v * v, axis=1) / N + eps), mask=row < M)
    if tl.program_id(0) == 0:
        col = tl.arange(0, BLOCK)
        w = tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32) + offset
        tl.store(bound, bits_of_max(tl.where(col < N, w, 0.0) * root))


@triton.jit
def _normalized(x, stride, rstd, row, w, col, M, N, CAST_BEFORE: tl.constexpr):
    """Rows of a tile of the result, float32, zeros beyond M and N."""
    inside = (row < M)[:, None] & (col < N)[None, :]
    v = tl.load(x + row[:, None] * stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    v = v * tl.load(rstd + row, mask=row < M, other=0.0)[:, None]
    if CAST_BEFORE:
        v = v.to(x.dtype.element_ty).to(tl.float32)
    return tl.where(inside, v * w[None, :], 0.0)  # 0 * w may be -0


@kernel
def _normalize_kernel(
    x, stride, rstd, weight, bound, rows, words, scale, M, N, W, offset, across,
    CAST_BEFORE: tl.constexpr, MAX_EXPONENT: tl.constexpr, STORE_ROWS: tl.constexpr, WORDS: tl.constexpr,
    QUADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of 4 QUADS rows and COLUMNS columns per program."""
    program = tl.program_id(0)
    first_row = (program // across).to(tl.int64) * (4 * QUADS)
    quad = first_row + 4 * tl.arange(0, QUADS)
    first_col = program % across * COLUMNS
    col = first_col + tl.arange(0, COLUMNS)
    w = tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32) + offset
    s, inverse = scale_and_inverse(tl.load(bound), MAX_EXPONENT)
    v0 = _normalized(x, stride, rstd, quad, w, col, M, N, CAST_BEFORE)
    v1 = _normalized(x, stride, rstd, quad + 1, w, col, M, N, CAST_BEFORE)
    v2 = _normalized(x, stride, rstd, quad + 2, w, col, M, N, CAST_BEFORE)
    v3 = _normalized(x, stride, rstd, quad + 3, w, col, M, N, CAST_BEFORE)
    if program == 0:
        tl.store(scale, s)
    store_float8(
        v0, v1, v2, v3, inverse, rows, N // 4, words, first_row, first_col, M, N, W,
        MAX_EXPONENT, STORE_ROWS, WORDS, QUADS, COLUMNS,
    )  # fmt: skip


@custom_op()
def _float8_rms_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, dtype: torch.dtype, need_rows: bool, need_columns: bool,
    eps: float, offset: float, cast_before: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Rows, columns and scale of the result; the sum (empty without a residual), and 1 / rms of each row."""
    M, N = x.shape[:-1].numel(), x.shape[-1]
    if not use_float8_kernels(x, weight) or N > MAX_KERNEL_WIDTH:
        return _reference(x, residual, weight, dtype, need_rows, need_columns, eps, offset, cast_before)
    rows, columns = empty_layouts(x, M, N, dtype, need_rows, need_columns)
    scale, rstd = x.new_empty((), dtype=torch.float32), x.new_empty(x.shape[:-1], dtype=torch.float32)
    total = x.new_empty(0) if residual is None else empty_like(x)
    if is_fake(scale):
        return rows, columns, scale, total, rstd
    weight, bound = weight.contiguous(), x.new_empty((), dtype=torch.int32)
    launch = forward_launch(M, N)
    source = rows_and_stride(x)
    _rms_kernel[(max(launch.programs, 1),)](
        *source, *rows_and_stride(residual), weight, total, rstd, bound, M, N, eps, offset, math.sqrt(N),
        ADD=residual is not None, ROWS=launch.rows, BLOCK=launch.width, num_warps=launch.warps,
    )  # fmt: skip
    programs, across = tiles(M, N)
    _normalize_kernel[(max(programs, 1),)](
        *(source if residual is None else rows_and_stride(total)), rstd, weight, bound, *outputs(rows, columns), scale,
        M, N, aligned(M) // 4, offset, across, CAST_BEFORE=cast_before, MAX_EXPONENT=MAX_EXPONENT[dtype],
        STORE_ROWS=need_rows, WORDS=need_columns, **TILE | {"num_warps": 8},
    )  # fmt: skip
    return rows, columns, scale, total, rstd


def _reference(x, residual, weight, dtype, need_rows, need_columns, eps, offset, cast_before):
    total = x if residual is None else (x + residual).contiguous()
    y, rstd = normalized_reference(total, weight, eps, offset, cast_before)
    scale = scale_reference((weight.float() + offset).abs().max() * math.sqrt(x.shape[-1]), dtype)
    nothing = x.new_empty(0) if residual is None else total
    return *quantized_reference(y, scale, dtype, need_rows, need_columns), nothing, rstd


class _Float8RMSNorm(torch.autograd.Function):
    """(y, sum) of `float8_add_rms_norm`."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps, dtype, offset, cast_before, by_row, tail, rows, columns):
        ctx.eps, ctx.offset, ctx.cast_before = eps, offset, cast_before
        options = eps, offset, cast_before
        if by_row:
            *parts, total, rstd = float8_rms_norm_rows(x, residual, weight, dtype, tail, *options)
            y = of_rows(tuple(parts), x.shape, x.dtype)
        else:
            *parts, total, rstd = _float8_rms_norm_forward(x, residual, weight, dtype, rows, columns, *options)
            y = as_float8(tuple(parts), x.shape, x.dtype)
        total = x if residual is None else total
        ctx.save_for_backward(total, weight, rstd)
        ctx.set_materialize_grads(False)  # an unused sum costs nothing
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dtotal=None):
        x, weight, rstd = ctx.saved_tensors
        if dy is None:
            return dtotal, dtotal, None
        need_x, need_residual, need_weight = ctx.needs_input_grad[:3]
        if use_float8_kernels(x, weight) and x.shape[-1] <= MAX_KERNEL_WIDTH:
            dx, dw = rms_norm_backward(dy, dtotal, x, weight, rstd, need_x or need_residual, need_weight, ctx.offset)
            return dx, dx, dw
        with torch.enable_grad():
            inputs = x.detach().requires_grad_(), weight.detach().requires_grad_()
            y = rms_norm_reference(*inputs, ctx.eps, offset=ctx.offset, casting_mode="gemma")
            dx, dw = torch.autograd.grad(y, inputs, dy)
        dx = dx if dtotal is None else dx + dtotal
        return dx, dx, dw
