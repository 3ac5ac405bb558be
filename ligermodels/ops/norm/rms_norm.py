"""Root-mean-square normalisation (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

from typing import Any, Literal

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.norm.norm_rows import (
    MAX_KERNEL_WIDTH,
    backward_launch,
    forward_launch,
    load_rows,
    store_rows,
    sum_rows,
)
from ligermodels.ops.runtime.checks import Signature, check_eps
from ligermodels.ops.runtime.dispatch import tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel, wait_for_previous
from ligermodels.ops.runtime.library import Rows, custom_op, is_fake, is_plain, mark_constants, once_differentiable
from ligermodels.ops.runtime.tensors import contiguous, empty_gradient, empty_like, rows_and_stride

CastingMode = Literal["llama", "gemma"]
TENSORS = Signature(dtensors="replicated", x="... N+", residual="... N =x ?", weight="N ?")
EXACT = torch.float32, torch.float64  # dtypes that the computation does not round to


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    casting_mode: CastingMode = "llama",
    residual: Tensor | None = None,
) -> Tensor:
    """x / rms(x) * (offset + weight), with rms(x) = sqrt(mean(x^2) + eps) over the last dimension.

    It computes in float32 (float64 for float64).

    Args:
        x: (..., N), any floating dtype and strides.
        weight: (N,), any floating dtype; None for no product at all.
        eps: added to the mean square.
        offset: added to the weight: 1 for norms that store weight - 1 (Gemma).
        casting_mode: "llama" rounds the normalised value to x's dtype before the product with the weight, "gemma"
            rounds the product only. Gradients ignore the rounding.
        residual: (..., N), of x's dtype, any strides: added to the result, as after a layer with an output norm
            (Gemma 2). The result and the sum are each rounded.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        InputError: shapes, dtypes or devices do not fit, `casting_mode` is unknown, or `eps` is negative.

    Examples:
        >>> x, weight = torch.randn(2, 5, 64), torch.ones(64)
        >>> rms_norm(x, weight, 1e-6).shape
        torch.Size([2, 5, 64])
    """
    return _rms_norm("rms_norm", x, residual, weight, eps, offset, casting_mode, False)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    casting_mode: CastingMode = "llama",
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of x + residual, and x + residual itself, rounded to x's dtype before it is normalised.

    The backward pass writes one gradient for both x and residual.

    Args:
        x: (..., N), any floating dtype and strides.
        residual: (..., N), of x's dtype, any strides; None for no sum. Then x itself is returned as the sum, so that
            its two gradients are added in this op.
        weight: (N,), any floating dtype; None for no product at all.
        eps: added to the mean square.
        offset: added to the weight: 1 for norms that store weight - 1 (Gemma).
        casting_mode: "llama" rounds the normalised value to x's dtype before the product with the weight, "gemma"
            rounds the product only.

    Returns:
        (y, sum), both of x's shape and dtype, contiguous except for x itself.

    Raises:
        InputError: shapes, dtypes or devices do not fit, `casting_mode` is unknown, or `eps` is negative.
    """
    return _rms_norm("add_rms_norm", x, residual, weight, eps, offset, casting_mode, True)


def _rms_norm(
    op: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float,
    casting_mode: CastingMode, return_sum: bool,
) -> Any:  # fmt: skip
    """`add_rms_norm` if `return_sum`, else `rms_norm`."""
    x, residual, weight = TENSORS.check(op, x, residual, weight)
    check_casting_mode(op, casting_mode)
    check_eps(op, eps)
    if use_kernels(x, weight) and x.shape[-1] <= MAX_KERNEL_WIDTH:
        return _RMSNorm.apply(x, residual, weight, eps, offset, casting_mode == "llama", return_sum)
    if return_sum:
        return add_rms_norm_reference(x, residual, weight, eps, offset=offset, casting_mode=casting_mode)
    return rms_norm_reference(x, weight, eps, offset=offset, casting_mode=casting_mode, residual=residual)


def rms_norm_reference(
    x: Tensor, weight: Tensor | None, eps: float, *, offset: float = 0.0, casting_mode: CastingMode = "llama",
    residual: Tensor | None = None, mean_square: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The specification of `rms_norm`, in plain torch, with the same arguments x, weight, eps, offset, casting_mode and
    residual. mean_square: (..., 1), float32 (float64 for float64): the mean square of the whole row, if x has only some
    of the row's channels."""
    # Where nothing is rounded, torch's own op computes the same. It has no rule for all DTensors.
    if mean_square is None and weight is not None and x.dtype == weight.dtype in EXACT and is_plain(x, weight):
        y = torch.rms_norm(x, x.shape[-1:], weight + offset if offset else weight, eps).contiguous()
        return y if residual is None else (y + residual).contiguous()
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = x.to(dtype)
    y = y * torch.rsqrt((y.square().mean(-1, keepdim=True) if mean_square is None else mean_square) + eps)
    if weight is not None:
        if casting_mode == "llama":
            y = y.to(x.dtype).to(dtype)
        weight = weight.to(dtype)
        y = y * (weight + offset if offset else weight)
    y = y.to(x.dtype).contiguous()
    return y if residual is None else (y + residual).contiguous()


def add_rms_norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, *, offset: float = 0.0,
    casting_mode: CastingMode = "llama",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The specification of `add_rms_norm`, in plain torch, with the same arguments x, residual, weight, eps, offset and
    casting_mode."""
    total = x if residual is None else (x + residual).contiguous()
    return rms_norm_reference(total, weight, eps, offset=offset, casting_mode=casting_mode), total


def check_casting_mode(op: str, casting_mode: str) -> None:
    """Raises InputError unless it is a `CastingMode`."""
    if casting_mode not in ("llama", "gemma"):
        raise InputError(f'{op}: casting_mode must be "llama" or "gemma", got {casting_mode!r}')


@kernel
def _rms_norm_forward_kernel(
    x, x_stride, residual, residual_stride, weight, y, total, rstd, M, N, eps, offset, rows_per_program,
    ADD: tl.constexpr, ADD_AFTER: tl.constexpr, HAS_WEIGHT: tl.constexpr, CAST_BEFORE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Each program normalises rows_per_program consecutive rows, ROWS at a time: rows of x or, with ADD, of
    x + residual. With ADD_AFTER it adds the residual to the normalised rows. It loads the next rows before it computes
    the current ones, so that memory is never idle."""
    wait_for_previous(PDL)
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    end = tl.minimum(first + rows_per_program, M)
    col = tl.arange(0, BLOCK)
    if HAS_WEIGHT:
        w = tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32) + offset
    values = load_rows(x, x_stride, first, end, N, ROWS, BLOCK)
    if ADD or ADD_AFTER:
        addend = load_rows(residual, residual_stride, first, end, N, ROWS, BLOCK)
    for row in range(first, end, ROWS):
        v = values.to(tl.float32)
        values = load_rows(x, x_stride, row + ROWS, end, N, ROWS, BLOCK)
        if ADD or ADD_AFTER:
            more = addend.to(tl.float32)
            addend = load_rows(residual, residual_stride, row + ROWS, end, N, ROWS, BLOCK)
        if ADD:
            rounded = (v + more).to(total.dtype.element_ty)
            store_rows(total, rounded, row, end, N, ROWS, BLOCK)
            v = rounded.to(tl.float32)
        r = 1.0 / tl.sqrt(tl.sum(v * v, axis=1) / N + eps)
        rows = row + tl.arange(0, ROWS)
        tl.store(rstd + rows, r, mask=rows < end)
        v = v * r[:, None]
        if HAS_WEIGHT:
            if CAST_BEFORE:
                v = v.to(x.dtype.element_ty).to(tl.float32)
            v = v * w[None, :]
        if ADD_AFTER:
            v = v.to(y.dtype.element_ty).to(tl.float32) + more
        store_rows(y, v, row, end, N, ROWS, BLOCK)


@kernel
def _rms_norm_backward_kernel(
    dy, dy_stride, dx_more, dx_more_stride, x, x_stride, weight, rstd, dx, partial, M, N, offset, rows_per_program,
    ADD: tl.constexpr, HAS_WEIGHT: tl.constexpr, NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes rows_per_program consecutive rows, ROWS at a time in STAGES pipeline stages, and sums its
    own part of the weight's gradient: no atomics, so equal bits in every run. ADD: adds dx_more, a further gradient of
    x."""
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    end = tl.minimum(first + rows_per_program, M)
    col = tl.arange(0, BLOCK)
    if HAS_WEIGHT:
        w = tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32) + offset
    if NEED_WEIGHT:
        dw = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for row in tl.range(first, end, ROWS, num_stages=STAGES):
        rows = row + tl.arange(0, ROWS)
        r = tl.load(rstd + rows, mask=rows < end, other=0.0)
        xhat = load_rows(x, x_stride, row, end, N, ROWS, BLOCK).to(tl.float32) * r[:, None]
        g = load_rows(dy, dy_stride, row, end, N, ROWS, BLOCK).to(tl.float32)
        if ADD and NEED_X:
            more = load_rows(dx_more, dx_more_stride, row, end, N, ROWS, BLOCK)
        if NEED_WEIGHT:
            dw += g * xhat
        if NEED_X:
            if HAS_WEIGHT:
                g = g * w[None, :]
            mean = tl.sum(g * xhat, axis=1) / N
            g = (g - xhat * mean[:, None]) * r[:, None]
            if ADD:
                g += more.to(tl.float32)
            store_rows(dx, g, row, end, N, ROWS, BLOCK)
    if NEED_WEIGHT:
        total = tl.sum(dw, axis=0).to(partial.dtype.element_ty)
        tl.store(partial + tl.program_id(0) * N + col, total, mask=col < N)


@custom_op(rows=Rows(results=lambda residual, after, **_: (True, residual is not None and not after, True)))
def _rms_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, after: int, eps: float, offset: float, cast_before: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y, x + residual and 1 / rms of each row. y is x + residual normalised, or with `after` x normalised, plus
    residual. The sum is empty without a residual and with `after`."""
    y, rstd = empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    total = x.new_empty(0) if residual is None or after else empty_like(x)
    if is_fake(y):
        return y, total, rstd
    M, N = rstd.numel(), x.shape[-1]
    launch = forward_launch(M, N)
    _rms_norm_forward_kernel[(launch.programs,)](
        *rows_and_stride(x), *rows_and_stride(residual), contiguous(weight), y, total, rstd,
        M, N, eps, offset, launch.rows_per_program, ADD=residual is not None and not after, ADD_AFTER=bool(after),
        HAS_WEIGHT=weight is not None, CAST_BEFORE=cast_before,
        ROWS=launch.rows, BLOCK=launch.width, num_warps=launch.warps,
    )  # fmt: skip
    return y, total, rstd


@custom_op(rows=Rows())
def rms_norm_backward(
    dy: Tensor, dx_more: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, need_x: int,
    need_weight: bool, offset: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x (with need_x) and of the weight (with need_weight), empty if not needed.

    Args:
        dy: gradient of the normalised rows, of x's shape.
        dx_more: a further gradient of x, added to it, or None.
        x: (..., N), the rows that were normalised.
        weight: (N,), or None.
        rstd: (...), float32, 1 / rms of each row.
        need_x, need_weight: which gradients are needed.
        offset: added to the weight.
    """
    dx, dw = empty_gradient(x, need_x, x), empty_gradient(weight, need_weight, x)
    if is_fake(dx):
        return dx, dw
    M, N = rstd.numel(), x.shape[-1]
    launch = backward_launch(M, N, x.element_size(), 2 if dx_more is None else 3, x.device)
    partial = dw
    if need_weight and launch.programs != 1:
        partial = x.new_empty((launch.programs, N), dtype=torch.float32)
    _rms_norm_backward_kernel[(launch.programs,)](
        *rows_and_stride(dy), *rows_and_stride(dx_more), *rows_and_stride(x), contiguous(weight), rstd, dx, partial,
        M, N, offset, launch.rows_per_program, ADD=dx_more is not None, HAS_WEIGHT=weight is not None,
        NEED_X=bool(need_x), NEED_WEIGHT=need_weight, ROWS=launch.rows, BLOCK=launch.width, STAGES=launch.stages,
        num_warps=launch.warps,
    )  # fmt: skip
    if partial is not dw:
        sum_rows(partial, dw)
    return dx, dw


class _RMSNorm(torch.autograd.Function):
    """`add_rms_norm`, (y, sum), if `return_sum`; else `rms_norm`, y, with the residual added to y."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset, cast_before, return_sum):
        ctx.offset, ctx.after = offset, residual is not None and not return_sum
        y, total, rstd = _rms_norm_forward(x, residual, weight, ctx.after, eps, offset, cast_before)
        total = x if residual is None or ctx.after else total
        ctx.save_for_backward(total, weight, rstd)
        ctx.set_materialize_grads(False)  # an unused sum costs nothing
        if not return_sum:
            return y
        mark_constants(ctx, (y, range(3)), (total, range(2)))
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dtotal=None):
        x, weight, rstd = ctx.saved_tensors
        need_x, need_residual, need_weight = ctx.needs_input_grad[:3]
        dx, dw = dtotal, None
        if dy is not None:
            need_sum = need_x or (need_residual and not ctx.after)
            dx, dw = rms_norm_backward(dy, dtotal, x, weight, rstd, need_sum, need_weight, ctx.offset)
        return dx, dy if ctx.after else dx, dw
