"""Gated activations of an MLP: SwiGLU and GeGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202).

Each activation is g * p(g), where p is the part of the gate that passes; with s the logistic sigmoid:

    silu:       p(g) = s(g)
    gelu:       p(g) = (1 + erf(g / sqrt(2))) / 2                                    (https://arxiv.org/abs/1606.08415)
    gelu_tanh:  p(g) = (1 + tanh(z / 2)) / 2 = s(z), with z = sqrt(8 / pi) * (g + 0.044715 * g^3)
"""

from typing import Any, Literal

import torch
from torch.nn import functional

from ligermodels.errors import InputError
from ligermodels.ops.dispatch import power_of_2_above, tl, triton, use_kernels
from ligermodels.ops.launcher import after_previous_kernel, kernel
from ligermodels.ops.library import as_rows, empty_like, once_differentiable, opaque_op

MAX_BLOCK = 2048
GELU = {"none": "gelu", "tanh": "gelu_tanh"}
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up, with silu(g) = g * sigmoid(g).

    gate, up: (..., I), any floating dtype and strides; or gate alone, packed (..., 2*I): the gate half, then the up
    half, whose gradient is then one packed tensor. Returns a contiguous (..., I) of gate's dtype, rounded once: float32
    inside (float64 for float64). The backward pass recomputes from gate and up; nothing else is saved.
    Raises InputError if shapes, dtypes or devices do not fit.
    """
    return _glu("swiglu", gate, up, "silu")


def geglu(
    gate: torch.Tensor, up: torch.Tensor | None = None, approximate: Literal["none", "tanh"] = "tanh"
) -> torch.Tensor:
    """gelu(gate) * up, by the error function ("none") or its approximation by tanh, as `torch.nn.functional.gelu`.

    Arguments, result and errors otherwise as those of `swiglu`.
    """
    if approximate not in GELU:
        raise InputError(f'geglu: approximate must be "none" or "tanh", got {approximate!r}')
    return _glu("geglu", gate, up, GELU[approximate])


def glu_linear(
    gate_up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "silu"
) -> torch.Tensor:
    """`torch.nn.functional.linear(swiglu(gate_up), weight, bias)`, or geglu in its place, which keeps only gate_up.

    The backward pass computes the activated product again, in the pass over memory that computes its gradient: the
    weight's gradient needs it only then.

    gate_up: (..., 2*I), packed as for `swiglu`. weight: (N, I) and bias: (N,), of gate_up's dtype. activation: "silu",
    "gelu_tanh" or "gelu". Returns (..., N). The gradients are those of the two ops.
    Raises InputError if shapes, dtypes or devices do not fit.
    """
    if activation not in ACTIVATIONS:
        raise InputError(f"glu_linear: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    _check("glu_linear", gate_up, None)
    for name, t, shape in (
        ("weight", weight, (*weight.shape[:1], gate_up.shape[-1] // 2)),
        ("bias", bias, weight.shape[:1]),
    ):
        if t is not None and (t.shape != shape or t.dtype != gate_up.dtype or t.device != gate_up.device):
            raise InputError(
                f"glu_linear: {name} must be {gate_up.dtype} {tuple(shape)} on {gate_up.device}, to fit gate_up "
                f"{tuple(gate_up.shape)}; got {t.dtype} {tuple(t.shape)} on {t.device}"
            )
    return _GLULinear.apply(gate_up, weight, bias, activation)


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """The specification of `swiglu`, in plain torch."""
    return _glu_reference(gate, up, "silu")


def geglu_reference(
    gate: torch.Tensor, up: torch.Tensor | None = None, approximate: Literal["none", "tanh"] = "tanh"
) -> torch.Tensor:
    """The specification of `geglu`, in plain torch."""
    return _glu_reference(gate, up, GELU[approximate])


def _glu(op: str, gate: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
    _check(op, gate, up)
    if not use_kernels(gate, up):
        return _glu_reference(gate, up, activation)
    return _GLU.apply(gate, up, activation)


def _glu_reference(gate: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
    gate, up = _halves(gate, up)
    g = gate.to(torch.promote_types(gate.dtype, torch.float32))
    if activation == "silu":
        y = functional.silu(g)
    else:
        y = functional.gelu(g, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (y * up.to(y.dtype)).to(gate.dtype)


def _check(op: str, gate: torch.Tensor, up: torch.Tensor | None) -> None:
    if gate.dim() == 0 or not gate.is_floating_point():
        raise InputError(f"{op}: gate must be floating, of shape (..., I); got {gate.dtype} {tuple(gate.shape)}")
    if up is None:
        if gate.shape[-1] % 2:
            raise InputError(f"{op}: a packed gate must have an even last dimension, got {tuple(gate.shape)}")
    elif up.shape != gate.shape or up.dtype != gate.dtype or up.device != gate.device:
        raise InputError(
            f"{op}: up must be like gate, {gate.dtype} {tuple(gate.shape)} on {gate.device}; "
            f"got {up.dtype} {tuple(up.shape)} on {up.device}"
        )


def _halves(gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if up is not None:
        return gate, up
    size = gate.shape[-1] // 2
    return gate[..., :size], gate[..., size:]


@triton.jit
def _part(g, ACTIVATION: tl.constexpr):
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


@kernel
def _glu_forward_kernel(
    gate, gate_stride, up, up_stride, out, N, blocks, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    after_previous_kernel()
    row = tl.program_id(0).to(tl.int64) // blocks
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = col < N
    g = tl.load(gate + row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + col, mask=mask, other=0.0).to(tl.float32)
    p, _ = _part(g, ACTIVATION)
    tl.store(out + row * N + col, (g * p * u).to(out.dtype.element_ty), mask=mask)


@kernel
def _glu_backward_kernel(
    dy, dy_stride, gate, gate_stride, up, up_stride, dgate, dgate_stride, dup, dup_stride, out, N, blocks,
    ACTIVATION: tl.constexpr, NEED_GATE: tl.constexpr, NEED_UP: tl.constexpr, NEED_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    after_previous_kernel()
    row = tl.program_id(0).to(tl.int64) // blocks
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = col < N
    d = tl.load(dy + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
    p, slope = _part(g, ACTIVATION)
    if NEED_GATE or NEED_OUT:
        u = tl.load(up + row * up_stride + col, mask=mask, other=0.0).to(tl.float32)
    if NEED_OUT:
        tl.store(out + row * N + col, (g * p * u).to(out.dtype.element_ty), mask=mask)
    if NEED_GATE:
        value = d * u * (p + g * slope)
        tl.store(dgate + row * dgate_stride + col, value.to(dgate.dtype.element_ty), mask=mask)
    if NEED_UP:
        tl.store(dup + row * dup_stride + col, (d * g * p).to(dup.dtype.element_ty), mask=mask)


def _blocks(N: int) -> tuple[int, dict[str, int]]:
    """Blocks a row, and the launch options."""
    block = min(power_of_2_above(N), MAX_BLOCK)
    return -(-N // block), {"BLOCK": block, "num_warps": 4 if block > 512 else 1}


def _forward_fake(gate: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
    return gate.new_empty(*gate.shape[:-1], gate.shape[-1] // (2 if up is None else 1))


@opaque_op(_forward_fake)
def _glu_forward(gate: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
    out = _forward_fake(gate, up, activation)
    g, u = map(as_rows, _halves(gate, up))
    M, N = g.shape
    blocks, options = _blocks(N)
    _glu_forward_kernel[(M * blocks,)](
        g, g.stride(0), u, u.stride(0), out, N, blocks, ACTIVATION=activation, **options
    )  # fmt: skip
    return out


def _backward_fake(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    activation: str,
    need_gate: bool,
    need_up: bool,
    need_out: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dgate, dup = (empty_like(gate) if need else gate.new_empty(0) for need in (need_gate, need_up))
    return dgate, dup, _forward_fake(gate, up, activation) if need_out else gate.new_empty(0)


@opaque_op(_backward_fake)
def _glu_backward(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    activation: str,
    need_gate: bool,
    need_up: bool,
    need_out: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of gate (packed if up is None) and of up, and what the forward pass gave; not needed is empty."""
    dgate, dup, out = _backward_fake(dy, gate, up, activation, need_gate, need_up, need_out)
    d, g, u = map(as_rows, (dy, *_halves(gate, up)))
    to_gate, to_up = as_rows(dgate), as_rows(dup)
    if up is None:
        to_gate, to_up = _halves(to_gate, None)
    M, N = g.shape
    blocks, options = _blocks(N)
    _glu_backward_kernel[(M * blocks,)](
        d, d.stride(0), g, g.stride(0), u, u.stride(0), to_gate, to_gate.stride(0), to_up, to_up.stride(0), out,
        N, blocks, ACTIVATION=activation, NEED_GATE=need_gate, NEED_UP=need_up or up is None, NEED_OUT=need_out,
        **options,
    )  # fmt: skip
    return dgate, dup, out


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _glu_forward(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        need_gate, need_up = ctx.needs_input_grad[:2]
        dgate, dup, _ = _glu_backward(dy, gate, up, ctx.activation, need_gate, need_up, False)
        return dgate if need_gate else None, dup if need_up else None, None


class _GLULinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        ctx.save_for_backward(gate_up, weight)
        ctx.activation, ctx.kernels = activation, use_kernels(gate_up)
        run = _glu_forward if ctx.kernels else _glu_reference
        return functional.linear(run(gate_up, None, activation), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate_up, weight = ctx.saved_tensors
        need_gate_up, need_weight, need_bias = ctx.needs_input_grad[:3]
        dy = dy.reshape(-1, dy.shape[-1])
        dgate_up, out = None, None
        if need_gate_up:
            dout = torch.mm(dy, weight).view(*gate_up.shape[:-1], weight.shape[1])
            if ctx.kernels:
                dgate_up, _, out = _glu_backward(dout, gate_up, None, ctx.activation, True, False, need_weight)
            else:
                with torch.enable_grad():
                    again = gate_up.detach().requires_grad_()
                    out = _glu_reference(again, None, ctx.activation)
                    (dgate_up,) = torch.autograd.grad(out, again, dout)
        elif need_weight:
            out = (_glu_forward if ctx.kernels else _glu_reference)(gate_up, None, ctx.activation)
        dweight = None
        if need_weight and out is not None:
            dweight = torch.mm(dy.t(), out.detach().view(-1, weight.shape[1]))
        return dgate_up, dweight, dy.sum(0) if need_bias else None, None
