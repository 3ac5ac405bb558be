"""RMSNorm of each head, times silu of a gate: the norm after Gated DeltaNet (https://arxiv.org/abs/2412.06464).

Forward and backward pass read each value once; plain torch would write the gate alone twice as fp32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.ops.norm.norm_rows import backward_launch, forward_launch, load_rows, store_rows, sum_rows
from ligermodels.ops.runtime.dispatch import tl, triton, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable
from ligermodels.ops.runtime.signature import Signature
from ligermodels.ops.runtime.tensors import as_rows, contiguous, empty_gradient, empty_like

TENSORS = Signature(x="... heads N+", z="... heads N =x", weight="N")
MAX_KERNEL_WIDTH = 8192  # a row of each operand is held in registers; the reference serves wider ones


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * silu(z), over the last dimension.

    It computes in fp32 (fp64 for fp64), rounds once, and gives equal bits in every run. The backward pass recomputes
    from x and z; nothing else is saved.

    Args:
        x: (..., heads, N), any floating dtype and strides.
        z: the gate, (..., heads, N), of x's dtype, any strides.
        weight: (N,), any floating dtype.
        eps: added to the mean square.

    Returns:
        Contiguous (..., heads, N) of x's dtype.

    Raises:
        InputError: shapes, dtypes or devices do not fit.
    """
    TENSORS.check("gated_rms_norm", x, z, weight)
    if not use_kernels(x, weight) or x.shape[-1] > MAX_KERNEL_WIDTH:
        return gated_rms_norm_reference(x, z, weight, eps)
    return _GatedRMSNorm.apply(x, z, weight, eps)


def gated_rms_norm_reference(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The specification of `gated_rms_norm`, in plain torch, with the same arguments x, z, weight and eps."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.to(wide)
    return (y * F.silu(z.to(wide))).to(x.dtype).contiguous()


@triton.jit
def _load_gate(z, z_token, z_head, row, end, N, heads, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """silu of the gate and its slope, in float32: `load_rows` of z, with heads of tokens as rows."""
    rows, col = row + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (rows < end)[:, None] & (col < N)[None, :]
    place = z + rows // heads * z_token + rows % heads * z_head
    gate = tl.load(place[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)
    e = tl.exp(-tl.abs(gate))  # no overflow
    r = 1.0 / (1.0 + e)
    part = tl.where(gate < 0, e * r, r)
    return gate * part, part + gate * e * r * r


@kernel
def _forward_kernel(
    x, x_stride, z, z_token, z_head, weight, y, M, N, heads, eps, rows_per_program,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    end = tl.minimum(first + rows_per_program, M)
    col = tl.arange(0, BLOCK)
    w = tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32)
    for row in range(first, end, ROWS):
        v = load_rows(x, x_stride, row, end, N, ROWS, BLOCK).to(tl.float32)
        gate, _ = _load_gate(z, z_token, z_head, row, end, N, heads, ROWS, BLOCK)
        r = 1.0 / tl.sqrt(tl.sum(v * v, axis=1) / N + eps)
        store_rows(y, v * r[:, None] * w[None, :] * gate, row, end, N, ROWS, BLOCK)


@kernel
def _backward_kernel(
    dy, dy_stride, x, x_stride, z, z_token, z_head, weight, dx, dz, partial, M, N, heads, eps, rows_per_program,
    NEED_X: tl.constexpr, NEED_Z: tl.constexpr, NEED_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes rows_per_program consecutive rows, ROWS at a time in STAGES pipeline stages, and sums its own
    part of the weight's gradient: no atomics, so equal bits in every run."""
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    end = tl.minimum(first + rows_per_program, M)
    col = tl.arange(0, BLOCK)
    w = tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32)
    if NEED_WEIGHT:
        dw = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for row in tl.range(first, end, ROWS, num_stages=STAGES):
        d = load_rows(dy, dy_stride, row, end, N, ROWS, BLOCK).to(tl.float32)
        v = load_rows(x, x_stride, row, end, N, ROWS, BLOCK).to(tl.float32)
        gate, slope = _load_gate(z, z_token, z_head, row, end, N, heads, ROWS, BLOCK)
        r = 1.0 / tl.sqrt(tl.sum(v * v, axis=1) / N + eps)
        v = v * r[:, None]
        if NEED_WEIGHT:
            dw += d * v * gate
        if NEED_Z:
            store_rows(dz, d * v * w[None, :] * slope, row, end, N, ROWS, BLOCK)
        if NEED_X:
            g = d * gate * w[None, :]
            mean = tl.sum(g * v, axis=1) / N
            store_rows(dx, (g - v * mean[:, None]) * r[:, None], row, end, N, ROWS, BLOCK)
    if NEED_WEIGHT:
        total = tl.sum(dw, axis=0).to(partial.dtype.element_ty)
        tl.store(partial + tl.program_id(0) * N + col, total, mask=col < N)


def _rows(x: Tensor) -> tuple[Tensor, int]:
    rows = as_rows(x)
    return rows, rows.stride(0)


def _heads(z: Tensor) -> tuple[Tensor, int, int]:
    """z (..., heads, N) as (tokens, heads, N), and its strides: a view if the strides allow it, else a copy."""
    tokens = z.reshape(-1, *z.shape[-2:]) if z.numel() else z.new_empty(0, *z.shape[-2:])
    tokens = tokens if tokens.stride(2) == 1 or tokens.shape[2] == 1 else tokens.contiguous()
    return tokens, tokens.stride(0), tokens.stride(1)


@custom_op()
def _gated_rms_norm_forward(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = empty_like(x)
    if is_fake(y):
        return y
    M, N = x.shape[:-1].numel(), x.shape[-1]
    if M:
        launch = forward_launch(M, N)
        _forward_kernel[(launch.programs,)](
            *_rows(x), *_heads(z), contiguous(weight), y, M, N, x.shape[-2], eps, launch.rows_per_program,
            ROWS=launch.rows, BLOCK=launch.width, num_warps=launch.warps,
        )  # fmt: skip
    return y


@custom_op()
def _gated_rms_norm_backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, need_x: int, need_z: bool, need_weight: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, z and weight; a gradient that is not needed is empty."""
    dx, dz, dw = empty_gradient(x, need_x, x), empty_gradient(z, need_z, x), empty_gradient(weight, need_weight, weight)
    if is_fake(dx):
        return dx, dz, dw
    M, N = x.shape[:-1].numel(), x.shape[-1]
    if not M:
        return dx, dz, dw.zero_()
    launch = backward_launch(M, N, x.element_size(), 3, x.device)
    partial = dw
    if need_weight and launch.programs != 1:
        partial = x.new_empty((launch.programs, N), dtype=torch.float32)
    _backward_kernel[(launch.programs,)](
        *_rows(dy), *_rows(x), *_heads(z), contiguous(weight), dx, dz, partial, M, N, x.shape[-2], eps,
        launch.rows_per_program, NEED_X=bool(need_x), NEED_Z=need_z, NEED_WEIGHT=need_weight,
        ROWS=launch.rows, BLOCK=launch.width, STAGES=launch.stages, num_warps=min(2 * launch.warps, 32),
    )  # fmt: skip
    if partial is not dw:
        sum_rows(partial, dw)
    return dx, dz, dw


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, z, weight, eps):
        ctx.save_for_backward(x, z, weight)
        ctx.eps = eps
        return _gated_rms_norm_forward(x, z, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _gated_rms_norm_backward(dy, *ctx.saved_tensors, *ctx.needs_input_grad[:3], ctx.eps)
