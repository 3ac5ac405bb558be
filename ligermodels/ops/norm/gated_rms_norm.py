"""RMSNorm of each head, times silu of a gate: the norm after Gated DeltaNet (https://arxiv.org/abs/2412.06464), and
after Mamba2 (https://arxiv.org/abs/2405.21060), mostly with the gate before the norm; times its sigmoid after Kimi
Delta Attention (https://arxiv.org/abs/2510.26692).

Forward and backward pass read each value once; plain torch would write the gate alone twice as fp32."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.arguments import check_flags
from ligermodels.errors import InputError
from ligermodels.ops.norm.norm_rows import backward_launch, forward_launch, load_rows, sum_rows
from ligermodels.ops.runtime.checks import Signature, check_eps, check_tensors
from ligermodels.ops.runtime.dispatch import tl, triton, use_kernels
from ligermodels.ops.runtime.launcher import kernel, wait_for_previous
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable
from ligermodels.ops.runtime.tensors import contiguous, count_rows, empty_gradient, empty_like, rows_and_stride

TENSORS = Signature(x="... heads N+", z="... heads N =x", weight="N")
TENSORS_OF_HEADS = Signature(x="... heads N+", z="... heads N =x", weight="heads N")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
MAX_KERNEL_WIDTH = 8192  # a row of each operand is held in registers; the reference serves wider ones


def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, norm_before_gate: bool = True, activation: str = "silu"
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * silu(z), over the last dimension; or, with the gate before the norm,
    y / sqrt(mean(y^2) + eps) * weight of y = x * silu(z). The activation "sigmoid" puts sigmoid(z) in place of silu(z).

    It computes in fp32 (fp64 for fp64), rounds once, and gives equal bits in every run. The backward pass recomputes
    from x and z; nothing else is saved.

    Args:
        x: (..., heads, N), any floating dtype and strides.
        z: the gate, (..., heads, N), of x's dtype, any strides.
        weight: (N,), or (heads, N) where each head has its own, any floating dtype.
        eps: added to the mean square.
        norm_before_gate: whether the norm comes before the gate. Default: True.
        activation: activation of the gate, "silu" or "sigmoid". Default: "silu".

    Returns:
        Contiguous (..., heads, N) of x's dtype.

    Raises:
        InputError: shapes, dtypes or devices do not fit, the activation is unknown, or `eps` is negative.
    """
    if activation not in ACTIVATIONS:
        raise InputError(f"gated_rms_norm: activation {activation!r} is unknown; there are: {', '.join(ACTIVATIONS)}")
    check_tensors("gated_rms_norm", weight=weight)
    check_flags("gated_rms_norm", norm_before_gate=norm_before_gate)
    (TENSORS_OF_HEADS if weight.dim() == 2 else TENSORS).check("gated_rms_norm", x, z, weight)
    check_eps("gated_rms_norm", eps)
    if not use_kernels(x, weight) or x.shape[-1] > MAX_KERNEL_WIDTH:
        return gated_rms_norm_reference(x, z, weight, eps, norm_before_gate, activation)
    return _GatedRMSNorm.apply(x, z, weight, eps, norm_before_gate, activation == "sigmoid")


def gated_rms_norm_reference(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, norm_before_gate: bool = True, activation: str = "silu"
) -> Tensor:
    """The specification of `gated_rms_norm`, in plain torch, with the same arguments x, z, weight, eps,
    norm_before_gate and activation."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y, gate = x.to(wide), ACTIVATIONS[activation](z.to(wide))
    y = y if norm_before_gate else y * gate
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.to(wide)
    return (y * gate if norm_before_gate else y).to(x.dtype).contiguous()


@triton.jit
def _load_gate(
    z, z_token, z_head, row, end, N, heads, SIGMOID: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """silu of the gate (or its sigmoid) and its slope, in float32: `load_rows` of z, with heads of tokens as rows."""
    rows, col = row + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (rows < end)[:, None] & (col < N)[None, :]
    place = z + rows // heads * z_token + rows % heads * z_head
    gate = tl.load(place[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)
    e = tl.exp(-tl.abs(gate))  # no overflow
    r = 1.0 / (1.0 + e)
    part = tl.where(gate < 0, e * r, r)
    slope = e * r * r  # of the sigmoid
    if not SIGMOID:
        slope = part + gate * slope
        part = gate * part
    return part, slope


@triton.jit
def _store_rows(destination, stride, values, row, end, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Stores what `load_rows` loads, with the same arguments."""
    rows, col = row + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (rows < end)[:, None] & (col < N)[None, :]
    place = destination + rows[:, None] * stride + col[None, :]
    tl.store(place, values.to(destination.dtype.element_ty), mask=inside)


@kernel
def _forward_kernel(
    x, x_stride, z, z_token, z_head, weight, y, M, N, heads, weights, eps, rows_per_program,
    NORM_BEFORE_GATE: tl.constexpr, SIGMOID: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Each program takes rows_per_program consecutive rows of the M rows that share one of the `weights`; heads: heads
    of a token that share it."""
    wait_for_previous(PDL)
    own = (tl.program_id(0) % weights).to(tl.int64)
    first = (tl.program_id(0) // weights).to(tl.int64) * rows_per_program
    end = tl.minimum(first + rows_per_program, M)
    col = tl.arange(0, BLOCK)
    x += own * x_stride
    z += own * z_head
    y += own * N
    w = tl.load(weight + own * N + col, mask=col < N, other=0.0).to(tl.float32)
    for row in range(first, end, ROWS):
        v = load_rows(x, x_stride * weights, row, end, N, ROWS, BLOCK).to(tl.float32)
        gate, _ = _load_gate(z, z_token, z_head, row, end, N, heads, SIGMOID, ROWS, BLOCK)
        if not NORM_BEFORE_GATE:
            v = v * gate
        r = 1.0 / tl.sqrt(tl.sum(v * v, axis=1) / N + eps)
        v = v * r[:, None] * w[None, :]
        if NORM_BEFORE_GATE:
            v = v * gate
        _store_rows(y, N * weights, v, row, end, N, ROWS, BLOCK)


@kernel
def _backward_kernel(
    dy, dy_stride, x, x_stride, z, z_token, z_head, weight, dx, dz, partial, M, N, heads, weights, eps,
    rows_per_program,
    NORM_BEFORE_GATE: tl.constexpr, SIGMOID: tl.constexpr, NEED_X: tl.constexpr, NEED_Z: tl.constexpr,
    NEED_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes the rows that it takes in the forward kernel, ROWS at a time in STAGES pipeline stages, and
    sums its own part of the weight's gradient: no atomics, so equal bits in every run."""
    own = (tl.program_id(0) % weights).to(tl.int64)
    first = (tl.program_id(0) // weights).to(tl.int64) * rows_per_program
    end = tl.minimum(first + rows_per_program, M)
    col = tl.arange(0, BLOCK)
    dy += own * dy_stride
    x += own * x_stride
    z += own * z_head
    dx += own * N
    dz += own * N
    w = tl.load(weight + own * N + col, mask=col < N, other=0.0).to(tl.float32)
    if NEED_WEIGHT:
        dw = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for row in tl.range(first, end, ROWS, num_stages=STAGES):
        d = load_rows(dy, dy_stride * weights, row, end, N, ROWS, BLOCK).to(tl.float32)
        v = load_rows(x, x_stride * weights, row, end, N, ROWS, BLOCK).to(tl.float32)
        gate, slope = _load_gate(z, z_token, z_head, row, end, N, heads, SIGMOID, ROWS, BLOCK)
        inner = slope  # of the gate's result before the norm; with the norm before the gate it is never used
        if not NORM_BEFORE_GATE:
            inner = v * slope
            v = v * gate
        r = 1.0 / tl.sqrt(tl.sum(v * v, axis=1) / N + eps)
        v = v * r[:, None]
        g = d * w[None, :]
        if NORM_BEFORE_GATE:
            if NEED_Z:
                _store_rows(dz, N * weights, g * v * slope, row, end, N, ROWS, BLOCK)
            g = g * gate
            d = d * gate
        if NEED_WEIGHT:
            dw += d * v
        if NEED_X or (NEED_Z and not NORM_BEFORE_GATE):
            mean = tl.sum(g * v, axis=1) / N
            g = (g - v * mean[:, None]) * r[:, None]
        if NORM_BEFORE_GATE:
            if NEED_X:
                _store_rows(dx, N * weights, g, row, end, N, ROWS, BLOCK)
        else:
            if NEED_X:
                _store_rows(dx, N * weights, g * gate, row, end, N, ROWS, BLOCK)
            if NEED_Z:
                _store_rows(dz, N * weights, g * inner, row, end, N, ROWS, BLOCK)
    if NEED_WEIGHT:
        total = tl.sum(dw, axis=0).to(partial.dtype.element_ty)
        tl.store(partial + tl.program_id(0) * N + col, total, mask=col < N)


def _heads(z: Tensor) -> tuple[Tensor, int, int]:
    """z (..., heads, N) as (tokens, heads, N), and its strides: a view if the strides allow it, else a copy."""
    tokens = z.reshape(-1, *z.shape[-2:]) if z.numel() else z.new_empty(0, *z.shape[-2:])
    tokens = tokens if tokens.stride(2) == 1 or tokens.shape[2] == 1 else tokens.contiguous()
    return tokens, tokens.stride(0), tokens.stride(1)


def _sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int, int]:
    """Rows that share a weight, their channels, heads of a token that share a weight, and number of weights."""
    weights, heads = 1 if weight.dim() == 1 else max(len(weight), 1), x.shape[-2]
    return count_rows(x) // weights, x.shape[-1], heads // weights, weights


@custom_op()
def _gated_rms_norm_forward(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, norm_before_gate: bool, sigmoid: bool
) -> Tensor:
    y = empty_like(x)
    if is_fake(y):
        return y
    M, N, heads, weights = _sizes(x, weight)
    if M:
        launch = forward_launch(M, N)
        _forward_kernel[(launch.programs * weights,)](
            *rows_and_stride(x), *_heads(z), contiguous(weight), y, M, N, heads, weights, eps, launch.rows_per_program,
            NORM_BEFORE_GATE=norm_before_gate, SIGMOID=sigmoid, ROWS=launch.rows, BLOCK=launch.width,
            num_warps=launch.warps,
        )  # fmt: skip
    return y


@custom_op()
def _gated_rms_norm_backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, need_x: int, need_z: bool, need_weight: bool, eps: float,
    norm_before_gate: bool, sigmoid: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, z and weight; a gradient that is not needed is empty."""
    dx, dz, dw = empty_gradient(x, need_x, x), empty_gradient(z, need_z, x), empty_gradient(weight, need_weight, weight)
    if is_fake(dx):
        return dx, dz, dw
    M, N, heads, weights = _sizes(x, weight)
    if not M:
        return dx, dz, dw.zero_()
    launch = backward_launch(M, N, x.element_size(), 3, x.device)
    partial = dw
    if need_weight and launch.programs != 1:
        partial = x.new_empty((launch.programs, weight.numel()), dtype=torch.float32)
    _backward_kernel[(launch.programs * weights,)](
        *rows_and_stride(dy), *rows_and_stride(x), *_heads(z), contiguous(weight), dx, dz, partial, M, N, heads,
        weights, eps, launch.rows_per_program, NORM_BEFORE_GATE=norm_before_gate, SIGMOID=sigmoid, NEED_X=bool(need_x),
        NEED_Z=need_z, NEED_WEIGHT=need_weight, ROWS=launch.rows, BLOCK=launch.width, STAGES=launch.stages,
        num_warps=min(2 * launch.warps, 32),
    )  # fmt: skip
    if partial is not dw:
        sum_rows(partial, dw.view(-1))
    return dx, dz, dw


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, z, weight, *options):
        ctx.save_for_backward(x, z, weight)
        ctx.options = options
        return _gated_rms_norm_forward(x, z, weight, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _gated_rms_norm_backward(dy, *ctx.saved_tensors, *ctx.needs_input_grad[:3], *ctx.options)
