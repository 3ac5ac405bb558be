"""Root-mean-square normalisation (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from ligermodels.errors import InputError
from ligermodels.ops.dispatch import power_of_2_above, processors, tl, triton, use_kernels
from ligermodels.ops.library import as_rows, opaque_op

MAX_KERNEL_WIDTH = 32768  # a row is held in registers; the reference serves wider ones
BLOCK_ELEMENTS = 2048  # narrow rows are taken several at once, up to about this many elements


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    cast: Literal["before", "after"] = "before",
) -> torch.Tensor:
    """x / rms(x) * (offset + weight), with rms(x) = sqrt(mean(x^2) + eps) over the last dimension.

    x: (..., N), any floating dtype and strides. weight: (N,), any floating dtype, or None for no product at all.
    Returns a contiguous tensor of x's shape and dtype. float32 inside (float64 for float64).
    cast: where the normalised value is rounded to x's dtype: "before" the product with the weight, as Llama does it, or
        "after", as Gemma does it. The gradients are those of the unrounded value.
    Raises InputError if shapes, dtypes or devices do not fit.
    """
    _check("rms_norm", x, weight, cast)
    if not use_kernels(x, weight) or x.shape[-1] > MAX_KERNEL_WIDTH:
        return rms_norm_reference(x, weight, eps, offset=offset, cast=cast)
    return _RMSNorm.apply(x, None, weight, eps, offset, cast == "before")


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    cast: Literal["before", "after"] = "before",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of x + residual, and x + residual itself, rounded to their dtype before it is normalised.

    x, residual: (..., N), of one floating dtype, any strides; otherwise as `rms_norm`. Returns (y, sum), both
    contiguous. The backward pass writes one gradient, which serves x and residual alike.
    Raises InputError if shapes, dtypes or devices do not fit.
    """
    _check("add_rms_norm", x, weight, cast)
    if residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device:
        raise InputError(
            f"add_rms_norm: residual must be like x, {x.dtype} {tuple(x.shape)} on {x.device}; "
            f"got {residual.dtype} {tuple(residual.shape)} on {residual.device}"
        )
    if not use_kernels(x, weight) or x.shape[-1] > MAX_KERNEL_WIDTH:
        return add_rms_norm_reference(x, residual, weight, eps, offset=offset, cast=cast)
    return _RMSNorm.apply(x, residual, weight, eps, offset, cast == "before")


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    cast: Literal["before", "after"] = "before",
) -> torch.Tensor:
    """The specification of `rms_norm`, in plain torch."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = x.to(dtype)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        if cast == "before":
            y = y.to(x.dtype).to(dtype)
        y = y * (weight.to(dtype) + offset)
    return y.to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    cast: Literal["before", "after"] = "before",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification of `add_rms_norm`, in plain torch."""
    total = (x + residual).contiguous()
    return rms_norm_reference(total, weight, eps, offset=offset, cast=cast), total


def _check(op: str, x: torch.Tensor, weight: torch.Tensor | None, cast: str) -> None:
    if x.dim() == 0 or x.shape[-1] == 0 or not x.is_floating_point():
        raise InputError(f"{op}: x must be floating, of shape (..., N) with N > 0; got {x.dtype} {tuple(x.shape)}")
    check_norm(op, x, x.shape[-1], "weight", weight, cast)


def check_norm(op: str, x: torch.Tensor, size: int, name: str, weight: torch.Tensor | None, cast: str) -> None:
    """Raises InputError unless the weight, called `name`, can scale rows of x that are `size` long."""
    if cast not in ("before", "after"):
        raise InputError(f'{op}: cast must be "before" or "after", got {cast!r}')
    if weight is not None:
        if weight.shape != (size,) or not weight.is_floating_point():
            raise InputError(
                f"{op}: {name} must be floating, of shape ({size},); got {weight.dtype} {tuple(weight.shape)}"
            )
        if weight.device != x.device:
            raise InputError(f"{op}: {name} is on {weight.device}, the rest on {x.device}")


@triton.jit
def _forward_kernel(
    x, x_stride, residual, residual_stride, weight, y, total, rstd, M, N, eps, offset,
    ADD: tl.constexpr, HAS_WEIGHT: tl.constexpr, CAST_BEFORE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program normalises ROWS whole rows: of x or, with ADD, of x + residual."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < M)[:, None] & (col < N)[None, :]
    values = tl.load(x + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    if ADD:
        addend = tl.load(residual + row[:, None] * residual_stride + col[None, :], mask=mask, other=0.0)
        rounded = (values + addend.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row[:, None] * N + col[None, :], rounded, mask=mask)
        values = rounded.to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / N + eps)
    tl.store(rstd + row, r, mask=row < M)
    values = values * r[:, None]
    if HAS_WEIGHT:
        w = tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32) + offset
        if CAST_BEFORE:
            values = values.to(x.dtype.element_ty).to(tl.float32)
        values = values * w[None, :]
    tl.store(y + row[:, None] * N + col[None, :], values.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy, dy_stride, dx_more, dx_more_stride, x, x_stride, weight, rstd, dx, partial, M, N, offset, rows_per_program,
    ADD: tl.constexpr, HAS_WEIGHT: tl.constexpr, NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes rows_per_program consecutive rows, ROWS at a time, and sums its own part of the weight's
    gradient: no atomics, so equal bits in every run. With ADD, x has a gradient from elsewhere, dx_more, as well."""
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    col = tl.arange(0, BLOCK)
    if HAS_WEIGHT:
        w = tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32) + offset
    if NEED_WEIGHT:
        dw = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, rows_per_program, ROWS):
        row = first + start + tl.arange(0, ROWS)
        mask = (row < M)[:, None] & (col < N)[None, :]
        xhat = tl.load(x + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy + row[:, None] * dy_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        r = tl.load(rstd + row, mask=row < M, other=0.0)
        if ADD and NEED_X:
            more = tl.load(dx_more + row[:, None] * dx_more_stride + col[None, :], mask=mask, other=0.0)
        xhat = xhat * r[:, None]
        if NEED_WEIGHT:
            dw += g * xhat
        if NEED_X:
            if HAS_WEIGHT:
                g = g * w[None, :]
            mean = tl.sum(g * xhat, axis=1) / N
            g = (g - xhat * mean[:, None]) * r[:, None]
            if ADD:
                g += more.to(tl.float32)
            tl.store(dx + row[:, None] * N + col[None, :], g.to(dx.dtype.element_ty), mask=mask)
    if NEED_WEIGHT:
        tl.store(partial + tl.program_id(0) * N + col, tl.sum(dw, axis=0), mask=col < N)


def _blocks(N: int) -> tuple[int, int, int]:
    """Rows a block, padded width, warps."""
    width = power_of_2_above(N)
    rows = max(1, BLOCK_ELEMENTS // width)
    return rows, width, min(max(rows * width // 512, 4), 32)


def _forward_fake(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    cast_before: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = x.new_empty(x.shape if residual is not None else (0,))
    return x.new_empty(x.shape), total, x.new_empty(x.shape[:-1], dtype=torch.float32)


@opaque_op(_forward_fake)
def _rms_norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    cast_before: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x or x + residual normalised, the sum (empty if there is none), and 1 / rms of each row for the backward pass."""
    y, total, rstd = _forward_fake(x, residual, weight, eps, offset, cast_before)
    rows, weight = as_rows(x), None if weight is None else weight.contiguous()
    others = None if residual is None else as_rows(residual)
    M, N = rows.shape
    ROWS, BLOCK, warps = _blocks(N)
    _forward_kernel[(-(-M // ROWS),)](
        rows, rows.stride(0), others, 0 if others is None else others.stride(0), weight, y, total, rstd,
        M, N, eps, offset, ADD=others is not None, HAS_WEIGHT=weight is not None, CAST_BEFORE=cast_before,
        ROWS=ROWS, BLOCK=BLOCK, num_warps=warps,
    )  # fmt: skip
    return y, total, rstd


def _backward_fake(
    dy: torch.Tensor,
    dx_more: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    need_x: bool,
    need_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if weight is not None else x.new_empty(0)
    return x.new_empty(x.shape if need_x else (0,)), dw if need_weight else x.new_empty(0)


@opaque_op(_backward_fake)
def _rms_norm_backward(
    dy: torch.Tensor,
    dx_more: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    need_x: bool,
    need_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x, dx_more added if given, and of the weight; those not needed are empty."""
    g, rows, weight = as_rows(dy), as_rows(x), None if weight is None else weight.contiguous()
    more = None if dx_more is None else as_rows(dx_more)
    M, N = rows.shape
    ROWS, BLOCK, warps = _blocks(N)
    programs = min(-(-M // ROWS), processors(x.device) * min(max(32 // warps, 1), 4))
    rows_per_program = -(-M // (max(programs, 1) * ROWS)) * ROWS
    programs = -(-M // max(rows_per_program, 1))  # leaves out those that the rounding left without rows
    dx = x.new_empty(x.shape if need_x else (0,))
    partial = torch.empty((programs, N) if need_weight else (0,), dtype=torch.float32, device=x.device)
    _backward_kernel[(programs,)](
        g, g.stride(0), more, 0 if more is None else more.stride(0), rows, rows.stride(0), weight, rstd, dx, partial,
        M, N, offset, rows_per_program, ADD=more is not None, HAS_WEIGHT=weight is not None,
        NEED_X=need_x, NEED_WEIGHT=need_weight, ROWS=ROWS, BLOCK=BLOCK, num_warps=warps,
    )  # fmt: skip
    dw = partial.sum(0).to(weight.dtype) if need_weight and weight is not None else x.new_empty(0)
    return dx, dw


class _RMSNorm(torch.autograd.Function):
    """y or, with a residual, y and the sum."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
        offset: float,
        cast_before: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        y, total, rstd = _rms_norm_forward(x, residual, weight, eps, offset, cast_before)
        ctx.save_for_backward(x if residual is None else total, weight, rstd)
        ctx.offset = offset
        ctx.set_materialize_grads(False)  # a sum that nobody uses costs nothing
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: torch.Tensor | None, dtotal: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        need_x, need_residual, need_weight = ctx.needs_input_grad[:3]
        dx, dw = dtotal, None
        if dy is not None:
            need_sum = need_x or need_residual
            dx, dw = _rms_norm_backward(dy, dtotal, x, weight, rstd, ctx.offset, need_sum, need_weight)
        return dx if need_x else None, dx if need_residual else None, dw if need_weight else None, None, None, None
