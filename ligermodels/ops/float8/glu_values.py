"""The values of gated activations with float8 results, for one tile, and their specification: see `ops.glu` for the
formulas."""

import torch
from torch import Tensor

from ligermodels.ops.glu.glu import GLUOptions, activation_part, bounded, glu_reference
from ligermodels.ops.runtime.dispatch import IN_INTERPRETER, tl, triton


@triton.jit
def load_pairs(gate_up, stride, dy, dy_stride, row, first, M, N, BACKWARD: tl.constexpr, COLUMNS: tl.constexpr):
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
def _part(g, ACTIVATION: tl.constexpr):
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
def glu_values(
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
    g, u = bounded(g0, u0, limit, up_offset)
    if gate_multiplier is not None:
        g = g * gate_multiplier
    p, slope = _part(g, ACTIVATION)
    if not BACKWARD:
        if down_multiplier is not None:
            u = u * down_multiplier
        values = g * p * u
    else:
        d = d.to(tl.float32)
        if down_multiplier is not None:
            d = d * down_multiplier
        if gate_multiplier is not None:
            u = u * gate_multiplier  # u occurs in the gate's gradient alone
        of_gate = d * u * (p + g * slope)
        of_up = d * g * p
        if limit is not None:  # no gradient beyond the bounds; the bounds count as within, and NaN stays
            of_gate = tl.where(g0 > limit, 0.0, of_gate)
            of_up = tl.where(tl.abs(u0) > limit, 0.0, of_up)
        values = tl.reshape(tl.join(of_gate, of_up), (QUADS, 2 * COLUMNS))
    return values


def values_reference(gate_up: Tensor, dy: Tensor | None, options: GLUOptions) -> Tensor:
    """The specification of the kernels, in float32: the activation of gate_up (..., 2*I) with `options`, (M, I); or
    with dy (..., I) the gradient of gate_up, (M, 2*I)."""
    wide = gate_up.detach().reshape(-1, gate_up.shape[-1]).float()
    if dy is None:
        return glu_reference(wide, None, options)
    with torch.enable_grad():
        wide.requires_grad_()
        return torch.autograd.grad(glu_reference(wide, None, options), wide, dy.reshape(-1, dy.shape[-1]).float())[0]
