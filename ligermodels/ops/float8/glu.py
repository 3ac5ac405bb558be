"""Gated activations with float8 results, and their gradients in float8, for frozen weights: see `ops.glu` for the
formulas.

Results and gradients have one scale per row. Like casts by row, a program goes through its row twice; the second time
it reads from the caches. Layers with trained weights need one scale per tensor: they cast their inputs themselves.
"""

import torch
from torch import Tensor

from ligermodels.ops.float8.cast import check_last
from ligermodels.ops.float8.cast_by_row import check_tail, empty_rows, of_rows, rows_reference, scale_of_rows
from ligermodels.ops.float8.scaling import ALIGNMENT, MAX_EXPONENT, check_float8_dtype, store_row
from ligermodels.ops.float8.tensor import Float8Tensor
from ligermodels.ops.glu.glu import GLUOptions, check_options, glu_numbers, glu_reference
from ligermodels.ops.glu.glu_kernels import activation_part, bounded, bounded_gradients, passed
from ligermodels.ops.runtime.devices import power_of_2_above
from ligermodels.ops.runtime.dispatch import IN_INTERPRETER, tl, triton, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable, reject_dtensors
from ligermodels.ops.runtime.tensors import count_rows, rows_and_stride

BLOCK = 2048  # pairs of a row at a time


def float8_gated_activation(
    gate_up: Tensor, options: GLUOptions, dtype: torch.dtype, gradient_dtype: torch.dtype, *, tail: int = 0
) -> Float8Tensor:
    """`gated_activation` as float8 with one scale per row, rounded once from float32, between layers with frozen
    weights.

    Args:
        gate_up: (..., 2*I), any floating dtype and strides, I a multiple of 16: pairs of a gate and an up value.
        options: the activation, multipliers and limits.
        dtype: float8 dtype of the result.
        gradient_dtype: float8 dtype of the gradient of gate_up, a Float8Tensor too.
        tail: columns of memory after each row of the result and of the gradient, a multiple of 16: see
            `ops.float8.tail`.

    Returns:
        A Float8Tensor (..., I) in the row-major layout.

    Raises:
        InputError: shapes do not fit, a wrong tail, dtype, activation or limit, or a DTensor.
        BackendError: a GPU without float8.
    """
    check_tail("float8_gated_activation", tail)
    reject_dtensors("float8_gated_activation", gate_up)
    check_last("float8_gated_activation", "gate_up", gate_up, 2 * ALIGNMENT)
    check_options("float8_gated_activation", options)
    for name, given in (("dtype", dtype), ("gradient_dtype", gradient_dtype)):
        check_float8_dtype("float8_gated_activation", name, given)
    y: Float8Tensor = _Float8GLU.apply(gate_up, dtype, gradient_dtype, tail, options)
    return y


@triton.jit
def _load_pairs(gate_up, stride, dy, dy_stride, row, first, M, N, BACKWARD: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads COLUMNS pairs of gate_up from pair `first` on, and with BACKWARD as many values of dy, for the rows `row`
    of a tensor of M rows of N pairs. stride, dy_stride: elements from row to row."""
    col = first + tl.arange(0, COLUMNS)
    pair = 2 * first + tl.arange(0, 2 * COLUMNS)
    inside = (row < M)[:, None]
    pairs = tl.load(gate_up + row[:, None] * stride + pair[None, :], mask=inside & (pair < 2 * N)[None, :], other=0.0)
    d = 0.0
    if BACKWARD:
        d = tl.load(dy + row[:, None] * dy_stride + col[None, :], mask=inside & (col < N)[None, :], other=0.0)
    return pairs, d


@triton.jit
def _reciprocal(x):
    """1 / x to a unit in the last place, by one instruction: 0 below 1e-38. Triton's interpreter has no assembly."""
    if IN_INTERPRETER:
        r = 1.0 / x
    else:
        r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return r


@triton.jit
def _gate_part(g, ACTIVATION: tl.constexpr):
    """`activation_part` to a few float32 units in the last place, far more precise than float8, in half as many
    instructions, which limit the kernels by row. If p is near 1, 1 - p loses digits, but g p' is then small compared to
    p."""
    if ACTIVATION == "gelu":
        p, slope = activation_part(g, ACTIVATION)
    else:
        z = g
        if ACTIVATION == "gelu_tanh":
            z = g * (1.5957691216057308 + 0.07135481627260025 * g * g)
        p = _reciprocal(1.0 + tl.exp2(z * -1.4426950408889634))
        slope = p * (1.0 - p)
        if ACTIVATION == "gelu_tanh":
            slope = slope * (1.5957691216057308 + 0.21406444881780073 * g * g)
    return p, slope


@triton.jit
def _glu_values(
    pairs, d, gate_multiplier, down_multiplier, limit, up_offset,
    ACTIVATION: tl.constexpr, BACKWARD: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """activation(gate) * up, (QUADS, COLUMNS), or with BACKWARD the gradients of the pairs, (QUADS, 2 COLUMNS),
    float32.

    pairs: (QUADS, 2 COLUMNS). d: with BACKWARD, gradient of the activation. ACTIVATION, gate_multiplier,
    down_multiplier, limit, up_offset: a `GLUOptions`, None for numbers without effect."""
    g0, u0 = tl.split(tl.reshape(pairs, (QUADS, COLUMNS, 2)))
    g0 = g0.to(tl.float32)
    u0 = u0.to(tl.float32)
    g, u = bounded(g0, u0, limit, up_offset, ACTIVATION)
    if gate_multiplier is not None:
        g = g * gate_multiplier
    p, slope = _gate_part(g, ACTIVATION)
    if not BACKWARD:
        if down_multiplier is not None:
            u = u * down_multiplier
        values = passed(g, p, limit, ACTIVATION) * u
    else:
        d = d.to(tl.float32)
        if down_multiplier is not None:
            d = d * down_multiplier
        of_gate, of_up = bounded_gradients(d, g, u, p, slope, g0, u0, limit, gate_multiplier, ACTIVATION)
        values = tl.reshape(tl.join(of_gate, of_up), (QUADS, 2 * COLUMNS))
    return values


@triton.jit
def _part(
    gate_up, stride, dy, dy_stride, row, first, gate_multiplier, down_multiplier, limit, up_offset, M, N,
    ACTIVATION: tl.constexpr, BACKWARD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pairs, d = _load_pairs(gate_up, stride, dy, dy_stride, row, first, M, N, BACKWARD, BLOCK)
    return _glu_values(pairs, d, gate_multiplier, down_multiplier, limit, up_offset, ACTIVATION, BACKWARD, ROWS, BLOCK)


@kernel
def _glu_rows_kernel(
    gate_up, stride, dy, dy_stride, rows, pitch, scales, gate_multiplier, down_multiplier, limit, up_offset, M, N,
    ACTIVATION: tl.constexpr, BACKWARD: tl.constexpr, MAX_EXPONENT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of N pairs per program, BLOCK pairs at a time; in the forward pass each pair gives one number."""
    PER_PAIR: tl.constexpr = 2 if BACKWARD else 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    v = _part(
        gate_up, stride, dy, dy_stride, row, 0, gate_multiplier, down_multiplier, limit, up_offset, M, N,
        ACTIVATION, BACKWARD, ROWS, BLOCK,
    )  # fmt: skip
    most = tl.abs(v)
    for first in range(BLOCK, N, BLOCK):
        more = _part(
            gate_up, stride, dy, dy_stride, row, first, gate_multiplier, down_multiplier, limit, up_offset, M, N,
            ACTIVATION, BACKWARD, ROWS, BLOCK,
        )  # fmt: skip
        most = tl.maximum(most, tl.abs(more))
    inverse = scale_of_rows(most, scales, row, M, MAX_EXPONENT)
    store_row(rows, v, inverse, row, 0, M, PER_PAIR * N // 4, pitch, MAX_EXPONENT, ROWS, PER_PAIR * BLOCK)
    for first in range(BLOCK, N, BLOCK):
        v = _part(
            gate_up, stride, dy, dy_stride, row, first, gate_multiplier, down_multiplier, limit, up_offset, M, N,
            ACTIVATION, BACKWARD, ROWS, BLOCK,
        )  # fmt: skip
        store_row(
            rows, v, inverse, row, PER_PAIR * first, M, PER_PAIR * N // 4, pitch, MAX_EXPONENT, ROWS, PER_PAIR * BLOCK
        )


@custom_op()
def _float8_glu(
    gate_up: Tensor, dy: Tensor | None, dtype: torch.dtype, tail: int, activation: str, gate_multiplier: float,
    down_multiplier: float, limit: float | None, up_offset: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Float8 rows with a tail, and their scales, of the activation; or with dy of the gradient of gate_up.

    Args:
        gate_up: (..., 2*I), pairs of gate and up values.
        dy: (..., I), gradient of the activation, or None.
        dtype: float8 dtype of the result.
        tail: columns of memory after each row.
        activation, gate_multiplier, down_multiplier, limit, up_offset: a `GLUOptions`.
    """
    options = GLUOptions(activation, gate_multiplier, down_multiplier, limit, up_offset)
    if not use_kernels(gate_up):
        return rows_reference(_reference(gate_up, dy, options), dtype, tail)
    M, N = count_rows(gate_up), gate_up.shape[-1] // 2
    rows, scale = empty_rows(gate_up, M, N if dy is None else 2 * N, dtype, tail)
    if is_fake(rows) or not rows.numel():
        return rows, scale
    block = min(power_of_2_above(N), BLOCK)
    at_once = BLOCK // block
    _glu_rows_kernel[(-(-M // at_once),)](
        *rows_and_stride(gate_up), *rows_and_stride(dy), rows.view(torch.int32), rows.shape[1] // 4, scale,
        *glu_numbers(*options[1:]), M, N, ACTIVATION=activation, BACKWARD=dy is not None,
        MAX_EXPONENT=MAX_EXPONENT[dtype], ROWS=at_once, BLOCK=block, num_warps=16,
    )  # fmt: skip
    return rows, scale


def _reference(gate_up: Tensor, dy: Tensor | None, options: GLUOptions) -> Tensor:
    """The specification of the kernels, in float32: the activation of gate_up (..., 2*I) with `options`, (M, I); or
    with dy (..., I) the gradient of gate_up, (M, 2*I)."""
    wide = gate_up.detach().reshape(-1, gate_up.shape[-1]).float()
    if dy is None:
        return glu_reference(wide, None, options)
    with torch.enable_grad():
        wide.requires_grad_()
        return torch.autograd.grad(glu_reference(wide, None, options), wide, dy.reshape(-1, dy.shape[-1]).float())[0]


class _Float8GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, dtype, gradient_dtype, tail, options):
        ctx.save_for_backward(gate_up)
        ctx.options, ctx.dtype, ctx.tail = options, gradient_dtype, tail
        shape = torch.Size((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
        return of_rows(_float8_glu(gate_up, None, dtype, tail, *options), shape, gate_up.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (gate_up,) = ctx.saved_tensors
        parts = _float8_glu(gate_up, dy, ctx.dtype, ctx.tail, *ctx.options)
        return of_rows(parts, gate_up.shape, gate_up.dtype), None, None, None, None
