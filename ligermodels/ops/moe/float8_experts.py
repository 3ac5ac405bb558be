"""Experts in float8: `mix_experts` with float8 operands in the products that compute outputs and gradients of inputs.

Casts are fused where they can be. Tokens x (N, H), and the gradients dy (N, H) of their outputs, are cast once each,
with a scale for each row, before the gathers. Activations h and gradients dz of the pairs are written in float8 by the
kernels that compute them, with a scale for each block of 128 columns of a row. Weights are cast with one scale, in the
layout of each product. Weights' own gradients are products in the dtype of x: they sum over rows, for which float8
would need x, dy, h and dz in a transposed layout too.

Scales are powers of two, see `ops.float8.scaling`. With blocks, each block is added in float32.
"""

from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.float8.cast import float8_cast, float8_transpose, with_layouts
from ligermodels.ops.float8.linear import Float8Recipe, check_float8_sizes
from ligermodels.ops.float8.scaling import E4M3, MAX_EXPONENT, check_float8_device
from ligermodels.ops.float8.tensor import Float8Tensor
from ligermodels.ops.glu.glu import GLUOptions, glu_numbers
from ligermodels.ops.moe.experts import _grouped_outer, expert_order
from ligermodels.ops.moe.float8_reference import (
    BLOCK,
    down_gradient_reference,
    gate_up_reference,
    product_reference,
    to_blocks,
)
from ligermodels.ops.moe.fused import Rows, _experts_outer, _experts_sum, combine_into, launch_product
from ligermodels.ops.moe.fused_kernels import down_gradient_kernel, gate_up_kernel, product_kernel
from ligermodels.ops.moe.fused_tiles import Tiles
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable, reject_dtensors
from ligermodels.ops.runtime.signature import Signature
from ligermodels.ops.runtime.tensors import contiguous, under_autocast

_MIX = Signature(
    x="N H+", weights="N k+", experts="N k int64 int32", gate_up="E+ M+ H", down="E H I+",
    gate_up_bias="E M =gate_up ?", down_bias="E H =gate_up ?",
)  # fmt: skip


@torch.compiler.disable  # as `float8_linear`: one break of the graph for each layer
def float8_mix_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: GLUOptions,
    recipe: Float8Recipe,
    frozen: tuple[Float8Tensor | None, Float8Tensor | None] = (None, None),
) -> Tensor:
    """`mix_experts` with its operands in float8. Weights' own gradients are computed in the dtype of x.

    Args:
        x: tokens (N, H), bfloat16, float16 or float32.
        weights: (N, k), weights of the chosen experts, floating.
        experts: (N, k), integers in [0, E), the chosen experts.
        gate_up: (E, 2 * I, H), of x's dtype: pairs of a gate and an up row. Under autocast x, the experts' weights and
            biases are cast to the dtype of autocast. H and I are multiples of 16.
        down: (E, H, I), of x's dtype.
        gate_up_bias: (E, 2 * I), of x's dtype; None for none.
        down_bias: (E, H), of x's dtype; None for none.
        activation: the gated activation of the pairs.
        recipe: `gradient_dtype` is the format of dy and dz; products accumulate in the registers of tensor cores.
        frozen: `float8_cast` of gate_up (E * 2 * I, H) and of down (E * H, I) by rows, for weights without gradients;
            None: they are cast in this call. Default: none.

    Returns:
        (N, H), of x's dtype, or of the dtype of autocast.

    Raises:
        InputError: shapes, dtypes or devices do not fit, sizes are not multiples of 16, or an operand is a DTensor.
        BackendError: a GPU without float8.
    """
    op = "float8_mix_experts"
    _MIX.check(op, x, weights, experts, gate_up, down, gate_up_bias, down_bias)
    reject_dtensors(op, x, weights, gate_up, down, gate_up_bias, down_bias)
    check_float8_device(op, x.device)
    x, gate_up, down, gate_up_bias, down_bias = under_autocast(x, gate_up, down, gate_up_bias, down_bias)
    (E, M, H), size = gate_up.shape, down.shape[2]
    check_float8_sizes(op, size, H)
    if x.dtype == torch.float64 or gate_up.dtype != x.dtype or down.dtype != x.dtype or 2 * size != M:
        raise InputError(
            f"{op}: x, gate_up (E, 2 * I, H) and down (E, H, I) must have one dtype of 4 bytes or fewer, got {x.dtype} "
            f"{tuple(x.shape)}, {gate_up.dtype} {tuple(gate_up.shape)} and {down.dtype} {tuple(down.shape)}"
        )
    order, offsets = expert_order(experts, E)
    rows = Rows(offsets, (order // experts.shape[1]).int(), order, experts.shape[1])
    need_x = torch.is_grad_enabled()
    cast = [
        float8_cast(weight.flatten(0, 1), recipe.dtype, columns=need_x)
        if own is None
        else with_layouts(own, True, False)
        for weight, own in zip((gate_up, down), frozen, strict=True)
    ]
    y: Tensor = _Float8Experts.apply(
        x, weights.float(), gate_up, down, gate_up_bias, down_bias, rows, activation, recipe, cast
    )
    return y


class _Float8Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, gate_up, down, gate_up_bias, down_bias, rows, activation, recipe, cast):
        E, (gate_up8, down8) = len(gate_up), cast
        x8 = float8_cast(x, recipe.dtype, by_row=True)
        z, h, h_scales = _float8_experts_gate_up(
            x8.rows, x8.scale, gate_up8.rows.unflatten(0, (E, -1)), gate_up8.scale, gate_up_bias, rows.offsets,
            rows.tokens, x.dtype, *activation,
        )  # fmt: skip
        need_gate_up = ctx.needs_input_grad[2]
        kept = [c.columns if c.columns is not None else c.rows for c in cast]
        ctx.save_for_backward(
            x if need_gate_up else None, weights, down_bias, z, *rows[:3], *kept, gate_up8.scale, down8.scale
        )
        ctx.copies, ctx.activation, ctx.recipe = rows.copies, activation, recipe
        ctx.transposed = [c.columns is not None for c in cast]
        down_rows = down8.rows.unflatten(0, (E, -1))
        return _float8_experts_product(
            h, h_scales, down_rows, down8.scale, down_bias, rows.offsets, rows.places, weights, rows.copies, x.dtype
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weights, down_bias, z, offsets, tokens, places, *layouts, gate_up_scale, down_scale = ctx.saved_tensors
        need_x, need_weights, need_gate_up, need_down, need_gate_up_bias, need_down_bias = ctx.needs_input_grad[:6]
        need_z = need_gate_up or need_gate_up_bias
        dx = dweights = dgate_up = ddown = dgate_up_bias = ddown_bias = None
        dtype = ctx.recipe.gradient_dtype
        if need_down_bias:
            ddown_bias = _sum(dy, tokens, places, weights, offsets)
        if need_x or need_z or need_weights or need_down:
            dy8 = float8_cast(dy, dtype, by_row=True)
            dz, dz8, dz_scales, hw, dweights = _float8_experts_down_gradient(
                dy8.rows, dy8.scale, z, weights, _of_experts(layouts[1], ctx.transposed[1], len(offsets)), down_scale,
                down_bias, offsets, tokens, places, *ctx.activation, need_x, need_z, need_down,
            )  # fmt: skip
        if need_down:
            ddown = _outer(dy, tokens, hw, None, offsets)
            del hw
        if need_x:
            wide = _of_experts(layouts[0], ctx.transposed[0], len(offsets))
            dx = _float8_experts_product(
                dz8, dz_scales, wide, gate_up_scale, None, offsets, places, None, ctx.copies, z.dtype
            )
        if need_gate_up:
            dgate_up = _outer(dz, None, x, tokens, offsets)
        if need_gate_up_bias:
            dgate_up_bias = _sum(dz, None, None, None, offsets)
        return dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias, None, None, None, None


def _outer(a: Tensor, a_index: Tensor | None, b: Tensor, b_index: Tensor | None, offsets: Tensor) -> Tensor:
    """(E, M, N): for each expert the sum of outer products of its rows of a[a_index] (R, M) and b[b_index] (R, N)."""
    if use_kernels(a, b):
        return _experts_outer(a, a_index, b, b_index, offsets)
    a, b = (rows if index is None else rows[index] for rows, index in ((a, a_index), (b, b_index)))
    return _grouped_outer(a, b, offsets, False)


def _sum(
    a: Tensor, tokens: Tensor | None, places: Tensor | None, weights: Tensor | None, offsets: Tensor
) -> Tensor:  # fmt: skip
    """(E, N): for each expert the sum of its rows of a[tokens], times their routing weights."""
    if use_kernels(a):
        return _experts_sum(a, tokens, places, weights, offsets)
    rows = (a if tokens is None else a[tokens]).float()
    factors = rows.new_ones(len(rows), 1) if weights is None else weights.view(-1)[places][:, None]
    return _grouped_outer(rows, factors, offsets, False)[..., 0].to(a.dtype)


def _of_experts(layout: Tensor, transposed: bool, experts: int) -> Tensor:
    """The transposed weights of experts (E, K, N), contiguous along N, from a layout of the weight (E * N, K): its
    columns if `transposed`, else its rows."""
    columns = layout if transposed else float8_transpose(layout.contiguous())
    return columns.unflatten(1, (experts, -1)).transpose(0, 1)


def _blocks(columns: int) -> int:
    return -(-columns // BLOCK)


@custom_op(keep=lambda x, scale, gate_up, *_: gate_up.shape[1] >= gate_up.shape[2])
def _float8_experts_gate_up(
    x: Tensor, x_scale: Tensor, gate_up: Tensor, scale: Tensor, bias: Tensor | None, offsets: Tensor, tokens: Tensor,
    dtype: torch.dtype, activation: str, gate_multiplier: float, down_multiplier: float, limit: float | None,
    up_offset: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """z (R, 2 I) of `dtype`, and h (R, I) in float8 with its scales (R, blocks)."""
    R, N, K = tokens.shape[0], gate_up.shape[1], x.shape[1]
    z, h = x.new_empty(R, N, dtype=dtype), x.new_empty(R, N // 2, dtype=E4M3)
    h_scales = x_scale.new_empty(R, _blocks(N // 2))
    if is_fake(x) or not R:
        return z, h, h_scales
    if not use_kernels(x, gate_up):
        options = GLUOptions(activation, gate_multiplier, down_multiplier, limit, up_offset)
        return gate_up_reference(x, x_scale, gate_up, scale, bias, offsets, tokens, dtype, options)
    numbers = glu_numbers(gate_multiplier, down_multiplier, limit, up_offset)
    arguments = (
        x, x.stride(0), x_scale, tokens, gate_up, *gate_up.stride(), scale, contiguous(bias), offsets, z,
        h.view(torch.int32), h_scales, *numbers, N, K, len(offsets),
    )  # fmt: skip
    launch_product(
        "float8_gate_up", gate_up_kernel, lambda tiles: arguments, (R, N, K), offsets, x, ACTIVATION=activation
    )
    return z, h, h_scales


@custom_op(keep=lambda a, a_scales, w, scale, bias, offsets, places, weights, *_: weights is not None)
def _float8_experts_product(
    a: Tensor, a_scales: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, offsets: Tensor, places: Tensor,
    weights: Tensor | None, copies: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """a (R, K) with scales (R, blocks), w (E, N, K) -> the (weighted) sums of each token's rows, (R / k, N)."""
    R, N, K = a.shape[0], w.shape[1], a.shape[1]
    out = a.new_empty(R // copies, N, dtype=dtype)
    if is_fake(a) or not R:
        return out
    if not use_kernels(a, w):
        return product_reference(a, a_scales, w, scale, bias, offsets, places, weights, copies, dtype)
    products = a.new_empty(R, N, dtype=dtype)
    arguments = a, a_scales, w, *w.stride(), scale, contiguous(bias), places, offsets, products, N, K, len(offsets)
    launch_product("float8_product", product_kernel, lambda tiles: arguments, (R, N, K), offsets, a)
    combine_into(out, products, weights, copies)
    return out


@custom_op()
def _float8_experts_down_gradient(
    dy: Tensor, dy_scale: Tensor, z: Tensor, weights: Tensor, down: Tensor, scale: Tensor, bias: Tensor | None,
    offsets: Tensor, tokens: Tensor, places: Tensor, activation: str, gate_multiplier: float, down_multiplier: float,
    limit: float | None, up_offset: float, need_x: bool, need_z: bool, need_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """From dy (N, H) with a scale for each row, z (R, 2 I), and down (E, I, H): dz (R, 2 I); dz in the format of dy
    with scales (R, blocks); weight * h (R, I); and the gradient of the routing weights (N, k). All but the last without
    elements if not needed."""
    R, N, K = z.shape[0], down.shape[1], down.shape[2]
    dz, hw = z.new_empty((R, 2 * N) if need_z else (0,)), z.new_empty((R, N) if need_down else (0,))
    dz8 = dy.new_empty((R, 2 * N) if need_x else (0,))
    dz_scales = dy_scale.new_empty((R, _blocks(2 * N)) if need_x else (0,))
    dweights = weights.new_empty(weights.shape)
    if is_fake(dy) or not R:
        return dz, dz8, dz_scales, hw, dweights
    if not use_kernels(dy, z):
        options = GLUOptions(activation, gate_multiplier, down_multiplier, limit, up_offset)
        wide, part, of_rows = down_gradient_reference(
            dy, dy_scale, z, weights, down, scale, bias, offsets, tokens, places, options
        )
        dweights.view(-1)[places] = part
        blocks = to_blocks(wide, dy.dtype) if need_x else (dz8, dz_scales)
        return wide.to(z.dtype) if need_z else dz, *blocks, of_rows.to(z.dtype) if need_down else hw, dweights
    parts = dweights

    def arguments(tiles: Tiles) -> tuple[Any, ...]:
        nonlocal parts
        parts = dweights.new_empty(-(-N // tiles.columns), R)
        return (
            dy, dy.stride(0), dy_scale, tokens, places, down, *down.stride(), scale, contiguous(bias), offsets, z,
            contiguous(weights), dz if need_z else None, dz8.view(torch.int32) if need_x else None,
            dz_scales if need_x else None, hw if need_down else None, parts,
            *glu_numbers(gate_multiplier, down_multiplier, limit, up_offset), R, N, K, len(offsets),
        )  # fmt: skip

    constants = {"ACTIVATION": activation, "GRADIENT_EXPONENT": MAX_EXPONENT[dy.dtype]}
    launch_product("float8_down_gradient", down_gradient_kernel, arguments, (R, N, K), offsets, dy, **constants)
    torch.sum(parts, 0, out=dweights.view(-1))
    return dz, dz8, dz_scales, hw, dweights
