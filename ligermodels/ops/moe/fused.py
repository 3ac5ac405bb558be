"""Experts in Triton kernels that gather rows as they load them: the backend "triton" of `mix_experts`.

N tokens of H channels, each sent to k of E experts of I channels, make R = N k rows. Bytes that each pass moves in 16
bits, beside the weights (6 E I H) once; rows gathered from N tokens come mostly from the L2 cache:

    gate_up         reads 2 R H (gathered), writes 4 R I (the pairs z, if there are gradients) and 2 R I (h)
    down            reads 2 R I, writes 2 R H; their weighted sum reads 2 R H, writes 2 N H
    gradient of h   reads 2 R H (gathered) and 4 R I (z), writes 4 R I (dz) and 2 R I (weight * h)
    gradient of x   reads 4 R I, writes 2 R H; their sum reads 2 R H, writes 2 N H
    of the weights  reads 6 R I and 4 R H (gathered), writes 6 E I H

The path through `grouped_mm` also writes and reads gathered rows of x, of the output and of their gradients (20 R H),
and moves 12 R I more for the activation and its gradient. Kept for the backward pass are x and z alone: h is computed
again from z, and the gradient of a routing weight is <gradient of h, h>, so the output of an expert is not kept
(SonicMoE, https://arxiv.org/abs/2512.14080).

Each product adds in float32 and rounds once, in a fixed order: results are the same in every run.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.ops.glu.glu import GLUOptions, glu_numbers
from ligermodels.ops.moe.fused_kernels import (
    combine_kernel,
    down_gradient_kernel,
    expert_sum_kernel,
    gate_up_kernel,
    outer_kernel,
    product_kernel,
)
from ligermodels.ops.moe.fused_tiles import Tiles, launch_tiles, programs
from ligermodels.ops.runtime.dispatch import power_of_2_above
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable
from ligermodels.ops.runtime.tensors import as_rows, contiguous

COMBINE_BLOCK = 1024
"""Columns that a program of `combine_kernel` adds."""
SUM_BLOCK = 128
"""Columns that a program of `expert_sum_kernel` adds."""


class Rows(NamedTuple):
    """The rows of experts.

    offsets: int32 (E,), the end of each expert's rows.
    tokens: int32 (R,), the token of each row; None where row r is token r.
    places: long (R,), the place of each row among the choices of all tokens, n * k + j; None where row r is token r.
    copies: number k of rows of a token.
    """

    offsets: Tensor
    tokens: Tensor | None = None
    places: Tensor | None = None
    copies: int = 1


def fused_experts(
    x: Tensor, weights: Tensor | None, rows: Rows, activation: GLUOptions, gate_up: Tensor, down: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """The outputs of experts: with routing weights (N, k) their weighted sum (N, H); with None one per row (R, H).

    Args:
        x: (N, H).
        weights: float32 (N, k), or None.
        rows: the rows of the experts.
        activation: the gated activation.
        gate_up: (E, 2 * I, H), pairs of gate and up rows, any strides.
        down: (E, H, I), any strides.
        gate_up_bias: (E, 2 * I), or None.
        down_bias: (E, H), or None.
    """
    return _FusedExperts.apply(x, weights, gate_up, down, gate_up_bias, down_bias, rows, activation)


class _FusedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, gate_up, down, gate_up_bias, down_bias, rows, activation):
        keep = any(ctx.needs_input_grad[:5])  # the gradient of the last bias does not need the pairs
        z, h = _experts_gate_up(x, gate_up, gate_up_bias, rows.offsets, rows.tokens, *activation, keep)
        ctx.save_for_backward(x, weights, gate_up, down, down_bias, z, *rows[:3])
        ctx.copies, ctx.activation = rows.copies, activation
        return _experts_product(h, down, down_bias, rows.offsets, rows.places, weights, rows.copies)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weights, gate_up, down, down_bias, z, offsets, tokens, places = ctx.saved_tensors
        need_x, need_weights, need_gate_up, need_down, need_gate_up_bias, need_down_bias = ctx.needs_input_grad[:6]
        need_z = need_x or need_gate_up or need_gate_up_bias
        dx = dweights = dgate_up = ddown = dgate_up_bias = ddown_bias = None
        if need_down_bias:
            ddown_bias = _experts_sum(dy, tokens, places, weights, offsets)
        if need_z or need_weights or need_down:
            dz, hw, dweights = _experts_down_gradient(
                dy, z, weights, down, down_bias, offsets, tokens, places, *ctx.activation, need_z, need_down,
                need_weights,
            )  # fmt: skip
        if need_down:
            ddown = _experts_outer(dy, tokens, hw, None, offsets)
            del hw
        if need_x:
            dx = _experts_product(dz, gate_up.transpose(1, 2), None, offsets, places, None, ctx.copies)
        if need_gate_up:
            dgate_up = _experts_outer(dz, None, x, tokens, offsets)
        if need_gate_up_bias:
            dgate_up_bias = _experts_sum(dz, None, None, None, offsets)
        return dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias


def combine(rows: Tensor, weights: Tensor, copies: int) -> Tensor:
    """The weighted sums (N, H) of the rows (N * copies, H) of each token, in float32, without gradients.

    Args:
        rows: (N * copies, H), in the order of the tokens.
        weights: float32 (N, copies).
        copies: rows of a token.
    """
    out: Tensor = _combine(rows, weights, copies)
    return out


def _keeps_pairs(x: Tensor, gate_up: Tensor, *_: Any) -> bool:
    """Selective activation checkpointing keeps products that are at least as wide as their input."""
    return gate_up.shape[1] >= gate_up.shape[2]


def _is_output(a: Tensor, w: Tensor, bias: Any, offsets: Any, places: Any, weights: Tensor | None, copies: int) -> bool:
    """The weighted sum is kept, so that its product, of k times as many rows, is not computed again."""
    return weights is not None


@custom_op(keep=_keeps_pairs)
def _experts_gate_up(
    x: Tensor, gate_up: Tensor, bias: Tensor | None, offsets: Tensor, tokens: Tensor | None, activation: str,
    gate_multiplier: float, down_multiplier: float, limit: float | None, up_offset: float, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """z (R, 2 I), without elements unless `keep`, and h (R, I)."""
    R, N, K = (x if tokens is None else tokens).shape[0], gate_up.shape[1], x.shape[1]
    z, h = x.new_empty((R, N) if keep else (0,)), x.new_empty(R, N // 2)
    if not is_fake(x) and R:
        x = as_rows(x)
        arguments = (
            x, x.stride(0), None, tokens, gate_up, *gate_up.stride(), None, contiguous(bias), offsets,
            z if keep else None, h, None, *glu_numbers(gate_multiplier, down_multiplier, limit, up_offset),
            N, K, len(offsets),
        )  # fmt: skip
        launch_product("gate_up", gate_up_kernel, lambda tiles: arguments, (R, N, K), offsets, x, ACTIVATION=activation)
    return z, h


@custom_op(keep=_is_output)
def _experts_product(
    a: Tensor, w: Tensor, bias: Tensor | None, offsets: Tensor, places: Tensor | None, weights: Tensor | None,
    copies: int,
) -> Tensor:  # fmt: skip
    """a (R, K), w (E, N, K) -> (R, N) without `places`, else the (weighted) sums of each token's rows, (R / k, N)."""
    R, N, K = a.shape[0], w.shape[1], a.shape[1]
    out = a.new_empty(R // copies, N)
    if is_fake(a) or not R:
        return out
    a = a.contiguous()
    summed = places is not None and (copies > 1 or weights is not None)
    products = a.new_empty(R, N) if summed else out
    arguments = a, None, w, *w.stride(), None, contiguous(bias), places, offsets, products, N, K, len(offsets)
    name = "product" if w.stride(2) == 1 else "transposed_product"
    launch_product(name, product_kernel, lambda tiles: arguments, (R, N, K), offsets, a)
    if summed:
        combine_into(out, products, weights, copies)
    return out


def combine_into(out: Tensor, rows: Tensor, weights: Tensor | None, copies: int) -> None:
    combine_kernel[(out.shape[0], -(-out.shape[1] // COMBINE_BLOCK))](
        rows, contiguous(weights), out, out.shape[1], COPIES=copies, BLOCK=COMBINE_BLOCK, num_warps=4
    )


@custom_op()
def _combine(rows: Tensor, weights: Tensor, copies: int) -> Tensor:
    """The (weighted) sums (N, H) of the `copies` rows (N * copies, H) of each token."""
    out = rows.new_empty(rows.shape[0] // copies, rows.shape[1])
    if not is_fake(rows) and len(rows):
        combine_into(out, rows.contiguous(), weights, copies)
    return out


@custom_op()
def _experts_down_gradient(
    dy: Tensor, z: Tensor, weights: Tensor | None, down: Tensor, bias: Tensor | None, offsets: Tensor,
    tokens: Tensor | None, places: Tensor | None, activation: str, gate_multiplier: float, down_multiplier: float,
    limit: float | None, up_offset: float, need_z: bool, need_down: bool, need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dz (R, 2 I), weight * h (R, I), and the gradient of the routing weights (N, k); without elements if not needed.

    dy: (N, H), the gradient of the outputs."""
    R, N, K = z.shape[0], down.shape[2], down.shape[1]
    dz, hw = dy.new_empty((R, 2 * N) if need_z else (0,)), dy.new_empty((R, N) if need_down else (0,))
    dweights = dy.new_empty(weights.shape if need_weights and weights is not None else (0,), dtype=torch.float32)
    if is_fake(dy) or not R:
        return dz, hw, dweights
    dy, parts = as_rows(dy), dweights

    def arguments(tiles: Tiles) -> tuple[Any, ...]:
        nonlocal parts
        parts = dweights.new_empty(-(-N // tiles.columns) if need_weights else 0, R)
        return (
            dy, dy.stride(0), None, tokens, places, down, down.stride(0), down.stride(2), down.stride(1), None,
            contiguous(bias), offsets, z, contiguous(weights), dz if need_z else None, None, None,
            hw if need_down else None, parts if need_weights else None,
            *glu_numbers(gate_multiplier, down_multiplier, limit, up_offset),
            R, N, K, len(offsets),
        )  # fmt: skip

    options = {"ACTIVATION": activation, "GRADIENT_EXPONENT": 0}
    launch_product("down_gradient", down_gradient_kernel, arguments, (R, N, K), offsets, dy, **options)
    if need_weights:
        torch.sum(parts, 0, out=dweights.view(-1))
    return dz, hw, dweights


@custom_op()
def _experts_outer(
    a: Tensor, a_index: Tensor | None, b: Tensor, b_index: Tensor | None, offsets: Tensor
) -> Tensor:  # fmt: skip
    """(E, M, N): for each expert the sum of outer products of its rows of a[a_index] (R, M) and b[b_index] (R, N)."""
    M, N = a.shape[1], b.shape[1]
    out = a.new_empty(offsets.shape[0], M, N)
    if is_fake(a):
        return out
    if not (a.shape[0] and b.shape[0]):
        return out.zero_()
    a, b = as_rows(a), as_rows(b)

    def launch(tiles: Tiles) -> None:
        count = len(offsets) * -(-M // tiles.rows) * -(-N // tiles.columns)
        outer_kernel[programs(tiles, count, a)](
            a, a.stride(0), a_index, b, b.stride(0), b_index, offsets, out, M, N, len(offsets), BLOCK_M=tiles.rows,
            BLOCK_N=tiles.columns, BLOCK_K=tiles.step, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip

    is_gathered = a_index is not None or b_index is not None
    launch_tiles("outer" if is_gathered else "product", launch, a, (M, N))
    return out


@custom_op()
def _experts_sum(
    a: Tensor, tokens: Tensor | None, places: Tensor | None, weights: Tensor | None, offsets: Tensor
) -> Tensor:
    """(E, N): for each expert the sum of its rows of a[tokens], times their routing weights."""
    E, N = offsets.shape[0], a.shape[1]
    out = a.new_empty(E, N)
    if not is_fake(a):
        a = as_rows(a)
        expert_sum_kernel[(E, -(-N // SUM_BLOCK))](
            a, a.stride(0), tokens, places, contiguous(weights), offsets, out, N, BLOCK_K=32, BLOCK_N=SUM_BLOCK,
            num_warps=4,
        )  # fmt: skip
    return out


def launch_product(
    name: str, kernel: Any, arguments: Callable[[Tiles], tuple[Any, ...]], sizes: tuple[int, int, int],
    offsets: Tensor, like: Tensor, **constants: Any,
) -> None:  # fmt: skip
    """Launch a product of rows (R, K) and weights (E, N, K), `sizes` R, N and K.

    Args:
        name: name of the product in the table of tiles.
        kernel: the kernel.
        arguments: its positional arguments, by tiles.
        sizes: R, N and K.
        offsets: int32 (E,), where the rows of each expert end.
        like: a tensor on the device, of the dtype of the product.
    """
    (R, N, K), E = sizes, len(offsets)

    def launch(tiles: Tiles) -> None:
        count = (R // tiles.rows + min(R, E)) * -(
            -N // tiles.columns
        )  # each expert has at most one tile that is not full
        kernel[programs(tiles, count, like)](
            *arguments(tiles), **constants, IN_K=K % tiles.step == 0, IN_N=N % tiles.columns == 0,
            BLOCK_E=power_of_2_above(E), BLOCK_M=tiles.rows, BLOCK_N=tiles.columns, BLOCK_K=tiles.step,
            GROUP=tiles.group, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip

    launch_tiles(name, launch, like, (N, K), R // E)
