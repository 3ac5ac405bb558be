"""Layer normalisation (Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450)."""

import torch
from torch import Tensor

from ligermodels.ops.norm.norm_rows import (
    MAX_KERNEL_WIDTH,
    backward_launch,
    forward_launch,
    load_rows,
    store_rows,
    sum_rows,
)
from ligermodels.ops.runtime.checks import Signature, check_eps
from ligermodels.ops.runtime.dispatch import tl, triton, use_kernels
from ligermodels.ops.runtime.launcher import kernel, wait_for_previous
from ligermodels.ops.runtime.library import Rows, custom_op, is_fake, once_differentiable
from ligermodels.ops.runtime.tensors import contiguous, empty_gradient, empty_like, rows_and_stride

FAR, FAR_FLOAT32 = 16.0, 0.25  # squared deviation from the mean, in variances, beyond which rounding shows
TENSORS = Signature(dtensors="replicated", x="... N+", weight="N ?", bias="N ?")
WIDE = 2**14  # from this width on, only the most warps have registers for the parts of both gradients


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension, as `torch.nn.functional.layer_norm`.

    It computes in float32 (float64 for float64) and rounds once.

    Args:
        x: (..., N), any floating dtype and strides.
        weight: (N,), any floating dtype; None for no product at all.
        bias: (N,), any floating dtype; None for no sum at all.
        eps: added to the variance.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or `eps` is negative.
    """
    x, weight, bias = TENSORS.check("layer_norm", x, weight, bias)
    check_eps("layer_norm", eps)
    if not use_kernels(x, weight, bias) or x.shape[-1] > MAX_KERNEL_WIDTH:
        return layer_norm_reference(x, weight, bias, eps)
    return _LayerNorm.apply(x, weight, bias, eps)


def layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The specification of `layer_norm`, in plain torch, with the same arguments x, weight, bias and eps."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = x.to(dtype)
    y = y - y.mean(-1, keepdim=True)
    y = y - y.mean(-1, keepdim=True)  # the rounding error of the first mean is large for rows far from 0
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(dtype)
    if bias is not None:
        y = y + bias.to(dtype)
    return y.to(x.dtype).contiguous()


@triton.jit
def _both_sums(a, b):
    """The sums of two tiles over their rows, in one reduction."""
    return tl.split(tl.sum(tl.join(a, b), axis=1))


@triton.jit
def _moments(x, x_stride, row, level, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Rows minus `level`, 0 beyond N; the mean of each such row, and its mean squared deviation from that mean."""
    v = load_rows(x, x_stride, row, M, N, ROWS, BLOCK).to(tl.float32) - level[:, None]
    if not WHOLE:
        v = tl.where((tl.arange(0, BLOCK) < N)[None, :], v, 0.0)
    total, squares = _both_sums(v, v * v)
    mean = total / N
    return v, mean, tl.maximum(squares / N - mean * mean, 0.0, propagate_nan=tl.PropagateNan.ALL)


@kernel
def _layer_norm_forward_kernel(
    x, x_stride, weight, bias, y, mean, rstd, M, N, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, FAR: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Each program normalises ROWS rows. One reduction gives mean and variance of the deviations from the row's first
    value. The farther that value is from the mean, the more digits are lost, up to squares beyond float32. If too many
    are lost, a second reduction uses the deviations from the mean."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS
    rows = row + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    level = tl.load(x + rows * x_stride, mask=rows < M, other=0.0).to(tl.float32)
    v, rest, variance = _moments(x, x_stride, row, level, M, N, ROWS, BLOCK, WHOLE)
    near = (rest * rest <= variance * FAR) & (variance < float("inf"))
    if tl.min(near.to(tl.int32), axis=0) == 0:
        level += tl.where(near, 0.0, rest)  # a row's result does not depend on others
        v, rest, variance = _moments(x, x_stride, row, level, M, N, ROWS, BLOCK, WHOLE)
    r = tl.rsqrt(variance + eps)
    tl.store(mean + rows, level + rest, mask=rows < M)
    tl.store(rstd + rows, r, mask=rows < M)
    v = v * r[:, None] - (rest * r)[:, None]
    if HAS_WEIGHT:
        v = v * tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        v = v + tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    store_rows(y, v, row, M, N, ROWS, BLOCK)


@kernel
def _layer_norm_backward_kernel(
    dy, dy_stride, x, x_stride, weight, mean, rstd, dx, dw, db, M, N, rows_per_program,
    HAS_WEIGHT: tl.constexpr, NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr, NEED_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes rows_per_program consecutive rows, ROWS at a time in STAGES pipeline stages, and sums
    its own parts of the gradients of weight and bias, next to each other if both are needed: no atomics, so equal bits
    in every run."""
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    end = tl.minimum(first + rows_per_program, M)
    col = tl.arange(0, BLOCK)
    if HAS_WEIGHT:
        w = tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32)
    if NEED_WEIGHT:
        of_weight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    if NEED_BIAS:
        of_bias = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for row in tl.range(first, end, ROWS, num_stages=STAGES):
        rows = row + tl.arange(0, ROWS)
        m = tl.load(mean + rows, mask=rows < end, other=0.0)
        r = tl.load(rstd + rows, mask=rows < end, other=0.0)
        xhat = (load_rows(x, x_stride, row, end, N, ROWS, BLOCK).to(tl.float32) - m[:, None]) * r[:, None]
        g = load_rows(dy, dy_stride, row, end, N, ROWS, BLOCK).to(tl.float32)  # 0 where xhat belongs to no row
        if NEED_WEIGHT:
            of_weight += g * xhat
        if NEED_BIAS:
            of_bias += g
        if NEED_X:
            if HAS_WEIGHT:
                g = g * w[None, :]
            level, along = _both_sums(g, g * xhat)
            g = (g - (level / N)[:, None] - xhat * (along / N)[:, None]) * r[:, None]
            store_rows(dx, g, row, end, N, ROWS, BLOCK)
    part = tl.program_id(0) * N * (NEED_WEIGHT + NEED_BIAS) + col
    if NEED_WEIGHT:
        tl.store(dw + part, tl.sum(of_weight, axis=0).to(dw.dtype.element_ty), mask=col < N)
    if NEED_BIAS:
        tl.store(db + part, tl.sum(of_bias, axis=0).to(db.dtype.element_ty), mask=col < N)


@custom_op(rows=Rows())
def _layer_norm_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x normalised; for the backward pass, the mean and 1 / standard deviation of each row."""
    y, (mean, rstd) = empty_like(x), (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    if is_fake(y):
        return y, mean, rstd
    M, N = rstd.numel(), x.shape[-1]
    launch = forward_launch(M, N)
    _layer_norm_forward_kernel[(launch.programs,)](
        *rows_and_stride(x), contiguous(weight), contiguous(bias), y, mean, rstd, M, N, eps,
        HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, FAR=FAR_FLOAT32 if x.dtype == torch.float32 else FAR,
        ROWS=launch.rows, BLOCK=launch.width, WHOLE=launch.width == N,
        num_warps=min(max(launch.width // 1024, 4), 32),  # fewer than RMSNorm takes
    )  # fmt: skip
    return y, mean, rstd


@custom_op(rows=Rows())
def _layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, need_x: int,
    need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, weight and bias; a gradient that is not needed is empty."""
    needs = (x, need_x), (weight, need_weight), (bias, need_bias)
    dx, dw, db = (empty_gradient(t, needed, x) for t, needed in needs)
    if is_fake(dx):
        return dx, dw, db
    M, N = rstd.numel(), x.shape[-1]
    launch = backward_launch(M, N, x.element_size(), 2, x.device)
    sums = [total for total, needed in ((dw, need_weight), (db, need_bias)) if needed]
    partial, parts = None, sums
    if sums and launch.programs != 1:
        partial = x.new_empty((launch.programs, len(sums), N), dtype=torch.float32)
        parts = list(partial.unbind(1))
    _layer_norm_backward_kernel[(launch.programs,)](
        *rows_and_stride(dy), *rows_and_stride(x), contiguous(weight), mean, rstd, dx,
        parts[0] if need_weight else None, parts[-1] if need_bias else None, M, N, launch.rows_per_program,
        HAS_WEIGHT=weight is not None, NEED_X=bool(need_x), NEED_WEIGHT=need_weight, NEED_BIAS=need_bias,
        ROWS=launch.rows, BLOCK=launch.width, STAGES=launch.stages,
        num_warps=32 if launch.width >= WIDE else launch.warps,
    )  # fmt: skip
    if partial is not None:
        sum_rows(partial, *sums)
    return dx, dw, db


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y, mean, rstd = _layer_norm_forward(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _layer_norm_backward(dy, *ctx.saved_tensors, *ctx.needs_input_grad[:3])
