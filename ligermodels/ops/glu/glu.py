"""Gated activations of an MLP: SwiGLU and GeGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202).

Each activation is g * p(g), where p(g) is the part of the gate that passes; with s the logistic sigmoid:

    silu:       p(g) = s(g)
    gelu:       p(g) = (1 + erf(g / sqrt(2))) / 2                                    (https://arxiv.org/abs/1606.08415)
    gelu_tanh:  p(g) = (1 + tanh(z / 2)) / 2 = s(z), with z = sqrt(8 / pi) * (g + 0.044715 * g^3)

With multipliers (Falcon-H1, https://arxiv.org/abs/2507.22448) the result is
down_multiplier * activation(gate_multiplier * gate) * up. With a `limit`, gate is first bounded to at most limit and up
to [-limit, limit]; then `up_offset` is added to up (gpt-oss, https://arxiv.org/abs/2508.10925). "clamped_silu" bounds
silu(gate_multiplier * gate) to at most limit, in place of gate (Ling 3.0: `SwigluStepAndMul` of vLLM).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ligermodels.arguments import check_flags, is_number
from ligermodels.errors import InputError, short
from ligermodels.ops.glu.glu_kernels import glu_backward_kernel, glu_forward_kernel
from ligermodels.ops.runtime.checks import Signature
from ligermodels.ops.runtime.devices import power_of_2_above
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import Rows, custom_op, is_fake, once_differentiable
from ligermodels.ops.runtime.tensors import as_dtype, count_rows, elementwise, empty_gradient, rows_and_stride

_TENSORS = Signature(dtensors="replicated", gate="... I", up="... I =gate ?")
MAX_TILES = 4  # tiles of a row that a program takes
GELU = {"none": "gelu", "tanh": "gelu_tanh"}
CLAMPED_SILU = "clamped_silu"
NAMES = "silu", CLAMPED_SILU, *GELU.values()
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    CLAMPED_SILU: functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


class GLUOptions(NamedTuple):
    """An activation ("silu", "clamped_silu", "gelu" or "gelu_tanh") and its numbers, in the order of the registered
    ops."""

    activation: str
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0


def swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    limit_activation: bool = False,
) -> Tensor:
    """down_multiplier * silu(gate_multiplier * gate) * (up + up_offset), with silu(g) = g * sigmoid(g).

    It computes in float32 (float64 for float64) and rounds once. The backward pass recomputes from gate and up; nothing
    else is saved. The gradient of a packed gate is one packed tensor.

    Args:
        gate: (..., I), any floating dtype and strides. Without `up` it is packed, (..., 2*I): pairs of a gate and an up
            value, g0, u0, g1, u1, ..., as computed by a projection with interleaved gate and up rows.
        up: (..., I), of gate's dtype, any strides; None if gate is packed.
        gate_multiplier: factor on the gate before the activation (Falcon-H1).
        down_multiplier: factor on the result.
        limit: upper bound of the gate, and bound of |up|, before all else (gpt-oss); None for no bounds.
        up_offset: added to up after the bounds (gpt-oss).
        limit_activation: whether `limit` is the upper bound of silu(gate_multiplier * gate), in place of gate's (Ling
            3.0).

    Returns:
        Contiguous (..., I) of gate's dtype.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or `limit` is not above 0.

    Examples:
        >>> swiglu(torch.randn(2, 5, 64), torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """
    check_flags("swiglu", limit_activation=limit_activation)
    activation = CLAMPED_SILU if limit_activation else "silu"
    return _glu("swiglu", gate, up, GLUOptions(activation, gate_multiplier, down_multiplier, limit, up_offset))


def geglu(
    gate: Tensor,
    up: Tensor | None = None,
    approximate: Literal["none", "tanh"] = "tanh",
    *,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Tensor:
    """down_multiplier * gelu(gate_multiplier * gate) * (up + up_offset).

    It computes in float32 (float64 for float64) and rounds once. The backward pass recomputes from gate and up; nothing
    else is saved. The gradient of a packed gate is one packed tensor.

    Args:
        gate: (..., I), any floating dtype and strides. Without `up` it is packed, (..., 2*I): pairs of a gate and an up
            value, g0, u0, g1, u1, ..., as computed by a projection with interleaved gate and up rows.
        up: (..., I), of gate's dtype, any strides; None if gate is packed.
        approximate: "none" for gelu with the error function, "tanh" for its tanh approximation, as in
            `torch.nn.functional.gelu`.
        gate_multiplier: factor on the gate before the activation (Falcon-H1).
        down_multiplier: factor on the result.
        limit: upper bound of the gate, and bound of |up|, before all else (gpt-oss); None for no bounds.
        up_offset: added to up after the bounds (gpt-oss).

    Returns:
        Contiguous (..., I) of gate's dtype.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or `limit` is not above 0, or
            `approximate` is unknown.
    """
    if approximate not in GELU:
        raise InputError(f'geglu: approximate must be "none" or "tanh", got {approximate!r}')
    return _glu("geglu", gate, up, GLUOptions(GELU[approximate], gate_multiplier, down_multiplier, limit, up_offset))


def gated_activation(gate_up: Tensor, options: GLUOptions | None) -> Tensor:
    """`swiglu` or `geglu` of pairs of channels, such as the result of a linear layer, as `options` say.

    Args:
        gate_up: (..., 2*I), pairs of a gate and an up value.
        options: the activation, multipliers and limits; None for none: `gate_up` is returned.

    Returns (..., I) of the dtype of `gate_up`. Raises InputError for an odd number of channels.
    """
    return gate_up if options is None else _glu("gated_activation", gate_up, None, options)


def check_pairs(op: str, channels: int) -> None:
    """Raises InputError, naming `op`, if the number of channels before a gated activation is odd."""
    if channels % 2:
        raise InputError(f"{op}: a gated activation needs pairs of channels, and the layer before it has {channels}")


def check_options(op: str, options: GLUOptions) -> None:
    """Raises InputError, naming `op`, for an unknown activation, or a limit that is not above 0."""
    if not isinstance(options, GLUOptions):
        raise InputError(f"{op}: the activation must be GLUOptions, got {short(options)}")
    if options.activation not in NAMES:
        raise InputError(f"{op}: activation must be one of {', '.join(NAMES)}, got {short(options.activation)}")
    limit = options.limit
    known = limit is None or torch.compiler.is_compiling() or is_number(limit)  # compiled, a number may be a symbol
    if not known or (limit is not None and not limit > 0):
        raise InputError(f"{op}: limit must be above 0, got {short(limit)}")


def swiglu_reference(
    gate: Tensor, up: Tensor | None = None, *, limit_activation: bool = False, **options: Any
) -> Tensor:
    """The specification of `swiglu`, in plain torch, with the same arguments gate, up and options."""
    return glu_reference(gate, up, GLUOptions(CLAMPED_SILU if limit_activation else "silu", **options))


def geglu_reference(
    gate: Tensor, up: Tensor | None = None, approximate: Literal["none", "tanh"] = "tanh", **options: Any
) -> Tensor:
    """The specification of `geglu`, in plain torch, with the same arguments gate, up, approximate and options."""
    return glu_reference(gate, up, GLUOptions(GELU[approximate], **options))


def _glu(op: str, gate: Tensor, up: Tensor | None, options: GLUOptions) -> Tensor:
    gate, up = _TENSORS.check(op, gate, up)
    if up is None:
        check_pairs(op, gate.shape[-1])
    check_options(op, options)
    return _GLU.apply(gate, up, options) if use_kernels(gate, up) else glu_reference(gate, up, options)


def glu_reference(gate: Tensor, up: Tensor | None, options: GLUOptions) -> Tensor:
    """The specification of `swiglu` and `geglu` with `options`: gate and up (..., I), or a packed gate (..., 2*I)."""
    if up is None:  # contiguous: on a CPU an activation of strided values is slow
        gate, up = gate[..., ::2].contiguous(), gate[..., 1::2]
    dtype, wide = gate.dtype, torch.promote_types(gate.dtype, torch.float32)
    gate, up = as_dtype(gate, wide), as_dtype(up, wide)
    clamps_silu = options.activation == CLAMPED_SILU
    if options.limit is not None:
        gate, up = gate if clamps_silu else gate.clamp(max=options.limit), up.clamp(-options.limit, options.limit)
    if options.up_offset:
        up = up + options.up_offset
    activated = elementwise(ACTIVATIONS[options.activation], _times(gate, options.gate_multiplier))
    if clamps_silu and options.limit is not None:
        activated = activated.clamp(max=options.limit)
    return as_dtype(_times(activated * up, options.down_multiplier), dtype)


def _times(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1 else x * multiplier


def _blocks(gate: Tensor, N: int, packed: bool) -> tuple[int, dict[str, Any]]:
    """Number of programs per row of N columns, and launch options: a thread loads 16 bytes of each tile at once."""
    num_warps = 4 if N > 512 else 1
    block = num_warps * 32 * 16 // (gate.element_size() * (2 if packed else 1))
    tiles = min(power_of_2_above(-(-N // block)), MAX_TILES)
    return -(-N // (tiles * block)), {"PACKED": packed, "TILES": tiles, "BLOCK": block, "num_warps": num_warps}


def _unless(value: float | None, neutral: float | None) -> float | None:
    """The value, or None if it is neutral: it changes nothing."""
    return None if value is None or value == neutral else float(value)


def glu_numbers(gate_multiplier: float, down_multiplier: float, limit: float | None, up_offset: float) -> list[Any]:
    """gate_multiplier, down_multiplier, limit and up_offset as kernels take them: None for a number without effect."""
    return [_unless(gate_multiplier, 1), _unless(down_multiplier, 1), _unless(limit, None), _unless(up_offset, 0)]


def _cut_pairs(gate: Any, up: Any, **_: Any) -> int:
    """For `Rows`: columns may be sharded too, where no pair is cut in two."""
    parts = math.prod(gate.mesh.shape) * (2 if up is None else 1)
    return 0 if gate.shape[-1] % parts == 0 else 1


@custom_op(rows=Rows(_cut_pairs))
def _glu_forward(
    gate: Tensor, up: Tensor | None, activation: str, gate_multiplier: float, down_multiplier: float,
    limit: float | None, up_offset: float,
) -> Tensor:  # fmt: skip
    out = gate.new_empty(*gate.shape[:-1], gate.shape[-1] // (2 if up is None else 1))
    if is_fake(out):
        return out
    M, N = count_rows(out), out.shape[-1]
    blocks, options = _blocks(gate, N, up is None)
    glu_forward_kernel[(M * blocks,)](
        *rows_and_stride(gate), *rows_and_stride(up), out,
        *glu_numbers(gate_multiplier, down_multiplier, limit, up_offset), N, blocks, ACTIVATION=activation, **options,
    )  # fmt: skip
    return out


@custom_op(rows=Rows(_cut_pairs))
def _glu_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, need_gate: int, need_up: bool, activation: str,
    gate_multiplier: float, down_multiplier: float, limit: float | None, up_offset: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of gate (packed if up is None) and of up; a gradient that is not needed is empty."""
    dgate, dup = empty_gradient(gate, need_gate, gate), empty_gradient(up, need_up, gate)
    if is_fake(dgate):
        return dgate, dup
    M, N = count_rows(dy), dy.shape[-1]
    blocks, options = _blocks(gate, N, up is None)
    glu_backward_kernel[(M * blocks,)](
        *rows_and_stride(dy), *rows_and_stride(gate), *rows_and_stride(up), dgate, dup,
        *glu_numbers(gate_multiplier, down_multiplier, limit, up_offset), N, blocks,
        ACTIVATION=activation, NEED_GATE=bool(need_gate), NEED_UP=need_up, **options,
    )  # fmt: skip
    return dgate, dup


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, options):
        ctx.save_for_backward(gate, up)
        ctx.options = options
        return _glu_forward(gate, up, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _glu_backward(dy, *ctx.saved_tensors, *ctx.needs_input_grad[:2], *ctx.options)
