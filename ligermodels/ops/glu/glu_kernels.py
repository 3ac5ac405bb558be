"""Kernels of gated activations, and the functions of values within them: see `ops.glu.glu` for the formulas."""

from ligermodels.ops.runtime.dispatch import tl, triton
from ligermodels.ops.runtime.launcher import kernel, wait_for_previous


@triton.jit
def activation_part(g, ACTIVATION: tl.constexpr):
    """The part p of the gate that passes, and its slope p', in float32."""
    if ACTIVATION == "gelu":
        p = 0.5 + 0.5 * tl.erf(0.7071067811865476 * g)
        slope = 0.3989422804014327 * tl.exp(-0.5 * g * g)
    else:
        z = g
        if ACTIVATION == "gelu_tanh":
            z = g * (1.5957691216057308 + 0.07135481627260025 * g * g)
        e = tl.exp(-tl.abs(z))  # no overflow, and no loss where p nears 0 or 1
        r = 1.0 / (1.0 + e)
        p = tl.where(z < 0, e * r, r)
        slope = e * r * r
        if ACTIVATION == "gelu_tanh":
            slope = slope * (1.5957691216057308 + 0.21406444881780073 * g * g)
    return p, slope


@triton.jit
def _load_pairs(gate, up, first, N, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK values of gate and of up from column `first` of a row on, in float32, zeros from column N on."""
    if PACKED:  # one load of both: a thread has whole pairs, so that splitting them moves no data
        col = 2 * first + tl.arange(0, 2 * BLOCK)
        pairs = tl.reshape(tl.load(gate + col, mask=col < 2 * N, other=0.0), (BLOCK, 2))
        g, u = tl.split(pairs)
    else:
        col = first + tl.arange(0, BLOCK)
        g = tl.load(gate + col, mask=col < N, other=0.0)
        u = tl.load(up + col, mask=col < N, other=0.0)
    return g.to(tl.float32), u.to(tl.float32)


@triton.jit
def bounded(g, u, limit, up_offset, ACTIVATION: tl.constexpr):
    """g and u, values of gate and up, within the bounds of `limit`, and u with `up_offset` added; None for neither."""
    if limit is not None:
        if ACTIVATION != "clamped_silu":  # which bounds its result
            g = tl.minimum(g, limit, propagate_nan=tl.PropagateNan.ALL)
        u = tl.clamp(u, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    if up_offset is not None:
        u = u + up_offset
    return g, u


@triton.jit
def passed(g, p, limit, ACTIVATION: tl.constexpr):
    """The activation g * p, at most `limit` in "clamped_silu"."""
    y = g * p
    if ACTIVATION == "clamped_silu" and limit is not None:
        y = tl.minimum(y, limit, propagate_nan=tl.PropagateNan.ALL)
    return y


@triton.jit
def bounded_gradients(d, g, u, p, slope, g0, u0, limit, up_factor, ACTIVATION: tl.constexpr):
    """The gradients of gate and up, g0 and u0, for the gradient d of the result: g and u are the values that
    `bounded` returns, g with its multiplier, and p and slope are the parts of g. up_factor: factor of u in the gate's
    gradient, or None."""
    if up_factor is not None:
        u = u * up_factor
    of_gate = d * u * (p + g * slope)
    of_up = d * g * p
    if limit is not None:  # no gradient beyond the bounds; the bounds count as within, and NaN stays
        limited = g0
        if ACTIVATION == "clamped_silu":
            limited = g * p
            of_up = d * passed(g, p, limit, ACTIVATION)
        of_gate = tl.where(limited > limit, 0.0, of_gate)
        of_up = tl.where(tl.abs(u0) > limit, 0.0, of_up)
    return of_gate, of_up


@triton.jit
def gated_values(
    g, u, gate_multiplier, down_multiplier, limit, up_offset, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The gated activation of g and u, float32 values of gate and up. The options ACTIVATION, gate_multiplier,
    down_multiplier, limit and up_offset are a `GLUOptions`; a number that changes nothing is None."""
    g, u = bounded(g, u, limit, up_offset, ACTIVATION)
    if gate_multiplier is not None:
        g = g * gate_multiplier
    if down_multiplier is not None:
        u = u * down_multiplier
    p, _ = activation_part(g, ACTIVATION)
    return passed(g, p, limit, ACTIVATION) * u


@triton.jit
def gated_gradients(
    d, g0, u0, gate_multiplier, down_multiplier, limit, up_offset, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The gradients of g0 and u0, where d is the gradient of `gated_values` of them; the options are the same."""
    g, u = bounded(g0, u0, limit, up_offset, ACTIVATION)
    if gate_multiplier is not None:
        g = g * gate_multiplier
    if down_multiplier is not None:
        d = d * down_multiplier
    p, slope = activation_part(g, ACTIVATION)
    return bounded_gradients(d, g, u, p, slope, g0, u0, limit, gate_multiplier, ACTIVATION)


@kernel
def glu_forward_kernel(
    gate, gate_stride, up, up_stride, out, gate_multiplier, down_multiplier, limit, up_offset, N, blocks,
    ACTIVATION: tl.constexpr, PACKED: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Each program takes TILES tiles of BLOCK columns of a row. All loads come before the first store, because loads do
    not pass a store."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) // blocks
    first = tl.program_id(0) % blocks * (TILES * BLOCK)
    gate += row * gate_stride
    if not PACKED:
        up += row * up_stride
    tiles = ()
    for i in tl.static_range(TILES):
        tiles += (_load_pairs(gate, up, first + i * BLOCK, N, PACKED, BLOCK),)  # type: ignore[assignment]
    for i in tl.static_range(TILES):  # these loops are unrolled
        g, u = tiles[i]  # type: ignore[var-annotated]
        y = gated_values(g, u, gate_multiplier, down_multiplier, limit, up_offset, ACTIVATION)
        col = first + i * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + row * N + col, y.to(out.dtype.element_ty), mask=col < N)


@kernel
def glu_backward_kernel(
    dy, dy_stride, gate, gate_stride, up, up_stride, dgate, dup, gate_multiplier, down_multiplier,
    limit, up_offset, N, blocks,
    ACTIVATION: tl.constexpr, PACKED: tl.constexpr, NEED_GATE: tl.constexpr, NEED_UP: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The tiles are the same as in the forward kernel."""
    row = tl.program_id(0).to(tl.int64) // blocks
    first = tl.program_id(0) % blocks * (TILES * BLOCK)
    dy += row * dy_stride
    gate += row * gate_stride
    if not PACKED:
        up += row * up_stride
    tiles = ()
    for i in tl.static_range(TILES):
        col = first + i * BLOCK + tl.arange(0, BLOCK)
        d = tl.load(dy + col, mask=col < N, other=0.0).to(tl.float32)
        g, u = _load_pairs(gate, up, first + i * BLOCK, N, PACKED, BLOCK)
        tiles += ((d, g, u),)  # type: ignore[assignment]  # the loop is unrolled
    for i in tl.static_range(TILES):
        d, g0, u0 = tiles[i]  # type: ignore[var-annotated]
        of_gate, of_up = gated_gradients(
            d, g0, u0, gate_multiplier, down_multiplier, limit, up_offset, ACTIVATION
        )  # fmt: skip
        of_gate = of_gate.to(gate.dtype.element_ty)
        of_up = of_up.to(gate.dtype.element_ty)
        if PACKED:
            col = 2 * (first + i * BLOCK) + tl.arange(0, 2 * BLOCK)
            pairs = tl.reshape(tl.join(of_gate, of_up), (2 * BLOCK,))
            tl.store(dgate + row * (2 * N) + col, pairs, mask=col < 2 * N)
        else:
            col = first + i * BLOCK + tl.arange(0, BLOCK)
            if NEED_GATE:
                tl.store(dgate + row * N + col, of_gate, mask=col < N)
            if NEED_UP:
                tl.store(dup + row * N + col, of_up, mask=col < N)
