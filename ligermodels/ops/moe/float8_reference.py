"""The specification of the products of `float8_experts`, in plain torch and float32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.ops.float8.scaling import E4M3, scale_reference
from ligermodels.ops.glu.glu import ACTIVATIONS, GLUOptions, glu_reference
from ligermodels.ops.moe.experts import grouped_mm_reference

BLOCK = 128
"""Columns of activations and of gradients that share a scale."""


def to_blocks(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Float32 values (R, N) as float8 of `dtype`, and the scales (R, blocks)."""
    blocks = F.pad(values, (0, -values.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    scales, most = scale_reference(blocks.abs().amax(2), dtype), torch.finfo(dtype).max
    q = (blocks / scales.nan_to_num(1.0)[..., None]).clamp(-most, most).flatten(1)[:, : values.shape[1]]
    return q.contiguous().to(dtype), scales


def from_blocks(q: Tensor, scales: Tensor) -> Tensor:
    """Float32 (R, N): the numbers of float8 q (R, N) with scales (R, blocks)."""
    return q.float() * scales.repeat_interleave(BLOCK, 1)[:, : q.shape[1]]


def _product(rows: Tensor, w: Tensor, scale: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    return grouped_mm_reference(rows, w.float() * scale, offsets, None if bias is None else bias.float())


def gate_up_reference(
    x: Tensor, x_scale: Tensor, gate_up: Tensor, scale: Tensor, bias: Tensor | None, offsets: Tensor, tokens: Tensor,
    dtype: torch.dtype, options: GLUOptions,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `_float8_experts_gate_up`."""
    z = _product((x.float() * x_scale[:, None])[tokens], gate_up, scale, offsets, bias).to(dtype)
    return z, *to_blocks(glu_reference(z.float(), None, options), E4M3)


def product_reference(
    a: Tensor, a_scales: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, offsets: Tensor, places: Tensor,
    weights: Tensor | None, copies: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """See `_float8_experts_product`."""
    rows = _product(from_blocks(a, a_scales), w, scale, offsets, bias).to(dtype).float()
    in_order = torch.empty_like(rows).index_copy_(0, places, rows).unflatten(0, (-1, copies))
    return (in_order if weights is None else in_order * weights[..., None]).sum(1).to(dtype)


def _activation_gradient(dh: Tensor, z: Tensor, options: GLUOptions) -> Tensor:
    """The gradient of the pairs z (R, 2 I). Autograd records nothing within an op."""
    limit = torch.inf if options.limit is None else options.limit
    gate, up = z[:, ::2], z[:, 1::2]
    v = gate.clamp(max=limit) * options.gate_multiplier
    dh = dh * options.down_multiplier
    of_activation = dh * (up.clamp(-limit, limit) + options.up_offset)
    if options.activation == "silu":
        dv = torch.ops.aten.silu_backward(of_activation, v)
    else:
        tanh = "tanh" if options.activation == "gelu_tanh" else "none"
        dv = torch.ops.aten.gelu_backward(of_activation, v, approximate=tanh)
    of_gate = dv * options.gate_multiplier * (gate <= limit)
    return torch.stack((of_gate, dh * ACTIVATIONS[options.activation](v) * (up.abs() <= limit)), 2).flatten(1)


def down_gradient_reference(
    dy: Tensor, dy_scale: Tensor, z: Tensor, weights: Tensor, down: Tensor, scale: Tensor, bias: Tensor | None,
    offsets: Tensor, tokens: Tensor, places: Tensor, options: GLUOptions,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Float32 dz (R, 2 I), the gradient of each row's routing weight (R,), and weight * h (R, I)."""
    rows = (dy.float() * dy_scale[:, None])[tokens]
    d, weight = _product(rows, down, scale, offsets, None), weights.view(-1)[places][:, None]
    h, dz = glu_reference(z.float(), None, options), _activation_gradient(d * weight, z.float(), options)
    part = (d * h).sum(1)
    if bias is not None:
        group = torch.bucketize(torch.arange(len(rows), device=z.device), offsets, right=True)
        part += (rows * bias.float()[group]).sum(1)
    return dz, part, h * weight
