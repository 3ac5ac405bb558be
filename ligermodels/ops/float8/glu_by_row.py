"""The kernel of gated activations and of their gradients that writes float8 with one scale per row.

Like casts by row, a program goes through its row twice; the second time it reads from the caches.
"""

import torch
from torch import Tensor

from ligermodels.ops.float8.cast_by_row import empty_rows, rows_reference, scale_of_rows
from ligermodels.ops.float8.glu_values import glu_values, load_pairs, values_reference
from ligermodels.ops.float8.scaling import MAX_EXPONENT, store_row
from ligermodels.ops.glu.glu import GLUOptions, glu_numbers
from ligermodels.ops.runtime.devices import power_of_2_above
from ligermodels.ops.runtime.dispatch import tl, triton, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_fake
from ligermodels.ops.runtime.tensors import rows_and_stride

BLOCK = 2048  # pairs of a row at a time


@triton.jit
def _part(
    gate_up, stride, dy, dy_stride, row, first, gate_multiplier, down_multiplier, limit, up_offset, M, N,
    ACTIVATION: tl.constexpr, BACKWARD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pairs, d = load_pairs(gate_up, stride, dy, dy_stride, row, first, M, N, BACKWARD, BLOCK)
    return glu_values(pairs, d, gate_multiplier, down_multiplier, limit, up_offset, ACTIVATION, BACKWARD, ROWS, BLOCK)


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
def float8_glu_rows(
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
        return rows_reference(values_reference(gate_up, dy, options), dtype, tail)
    M, N = gate_up.shape[:-1].numel(), gate_up.shape[-1] // 2
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
