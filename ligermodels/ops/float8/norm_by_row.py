"""The kernel of RMSNorm that writes float8 with one scale per row: one pass, with rows held in registers."""

import torch
from torch import Tensor

from ligermodels.ops.float8.cast_by_row import empty_rows, rows_reference, scale_of_rows
from ligermodels.ops.float8.scaling import MAX_EXPONENT, store_row
from ligermodels.ops.norm.norm_rows import MAX_KERNEL_WIDTH, forward_launch, load_rows, store_rows
from ligermodels.ops.runtime.dispatch import tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_fake
from ligermodels.ops.runtime.tensors import empty_like, rows_and_stride


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
def float8_rms_norm_rows(
    x: Tensor, residual: Tensor | None, weight: Tensor, dtype: torch.dtype, tail: int, eps: float, offset: float,
    cast_before: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`float8_add_rms_norm` with one scale per row, of x, residual, weight, dtype, tail, eps, offset and cast_before
    ("llama"): rows of the result with a tail, and their scales; the sum (empty without a residual); 1 / rms of each
    row."""
    M, N = x.shape[:-1].numel(), x.shape[-1]
    if not use_kernels(x, weight) or N > MAX_KERNEL_WIDTH:
        total = x if residual is None else (x + residual).contiguous()
        y, rstd = normalized_reference(total, weight, eps, offset, cast_before)
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


def normalized_reference(
    x: Tensor, weight: Tensor, eps: float, offset: float, cast_before: bool
) -> tuple[Tensor, Tensor]:
    """RMSNorm of x (..., N) with weight, eps, offset and cast_before ("llama"): float32 (M, N), and 1 / rms of each
    row, (...)."""
    wide = x.reshape(-1, x.shape[-1]).float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = wide * rstd
    return (y.to(x.dtype).float() if cast_before else y) * (weight.float() + offset), rstd.reshape(x.shape[:-1])
