"""Gated activations with float8 results, and their gradients in float8: see `ops.glu` for the formulas.

Each is computed twice from its inputs, first for its maximum and then to write it. This moves fewer bytes than writing
bf16 and casting it, and allocates no bf16 at all. With one scale per row, one pass suffices: see `glu_by_row`.
"""

from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.float8.cast import (
    amax_reference,
    as_float8,
    check_last,
    empty_layouts,
    outputs,
    quantized_reference,
    scale_of_bits,
    tiles,
)
from ligermodels.ops.float8.cast_by_row import check_tail, of_rows
from ligermodels.ops.float8.glu_by_row import float8_glu_rows
from ligermodels.ops.float8.glu_values import glu_values, load_pairs, values_reference
from ligermodels.ops.float8.scaling import (
    ALIGNMENT,
    E4M3,
    MAX_EXPONENT,
    TILE,
    aligned,
    bits_of_max,
    scale_and_inverse,
    store_float8,
    use_float8_kernels,
)
from ligermodels.ops.float8.tensor import Float8Tensor
from ligermodels.ops.glu.glu import GELU, GLUOptions, glu_numbers
from ligermodels.ops.runtime.dispatch import tl
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import always, custom_op, is_fake, once_differentiable, reject_dtensors
from ligermodels.ops.runtime.tensors import rows_and_stride


def float8_swiglu(
    gate_up: Tensor,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    *,
    by_row: bool = False,
    tail: int = 0,
    rows: bool = True,
    columns: bool = True,
    **options: Any,
) -> Float8Tensor:
    """`swiglu` of packed pairs as float8, rounded once from float32.

    Args:
        gate_up: (..., 2*I), any floating dtype and strides, I a multiple of 16: pairs of a gate and an up value.
        dtype: float8 dtype of the result.
        gradient_dtype: float8 dtype of the gradient of gate_up, a Float8Tensor too.
        by_row: one scale per row, for the layers before and after if their weights are frozen. Then the result and the
            gradient have only the row-major layout.
        tail: with by_row, columns of memory after each row of the result and of the gradient, a multiple of 16: see
            `ops.float8.tail`.
        rows: False if activation checkpointing does not use the row-major layout of the result. Without gradients the
            result always has it.
        columns: False if activation checkpointing does not use the transposed layout of the result, which the gradient
            of the next layer's weight needs. It is only written if gradients are recorded.
        options: gate_multiplier, down_multiplier, limit and up_offset of `swiglu`.

    Returns:
        A Float8Tensor (..., I).

    Raises:
        InputError: shapes do not fit, a wrong tail, or a DTensor.
        BackendError: a GPU without float8.
    """
    return _glu(
        "float8_swiglu", gate_up, dtype, gradient_dtype, (by_row, tail, rows, columns), GLUOptions("silu", **options)
    )


def float8_geglu(
    gate_up: Tensor,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    approximate: str = "tanh",
    *,
    by_row: bool = False,
    tail: int = 0,
    rows: bool = True,
    columns: bool = True,
    **options: Any,
) -> Float8Tensor:
    """`geglu` of packed pairs as float8, rounded once from float32.

    Args:
        gate_up: (..., 2*I), any floating dtype and strides, I a multiple of 16: pairs of a gate and an up value.
        dtype: float8 dtype of the result.
        gradient_dtype: float8 dtype of the gradient of gate_up, a Float8Tensor too.
        approximate: "none" for gelu with the error function, "tanh" for its tanh approximation.
        by_row: one scale per row, for the layers before and after if their weights are frozen. Then the result and the
            gradient have only the row-major layout.
        tail: with by_row, columns of memory after each row of the result and of the gradient, a multiple of 16: see
            `ops.float8.tail`.
        rows: False if activation checkpointing does not use the row-major layout of the result. Without gradients the
            result always has it.
        columns: False if activation checkpointing does not use the transposed layout of the result, which the gradient
            of the next layer's weight needs. It is only written if gradients are recorded.
        options: gate_multiplier, down_multiplier, limit and up_offset of `geglu`.

    Returns:
        A Float8Tensor (..., I).

    Raises:
        InputError: shapes do not fit, a wrong tail, an unknown `approximate`, or a DTensor.
        BackendError: a GPU without float8.
    """
    if approximate not in GELU:
        raise InputError(f'float8_geglu: approximate must be "none" or "tanh", got {approximate!r}')
    layouts = by_row, tail, rows, columns
    return _glu("float8_geglu", gate_up, dtype, gradient_dtype, layouts, GLUOptions(GELU[approximate], **options))


def _glu(
    op: str, gate_up: Tensor, dtype: torch.dtype, gradient_dtype: torch.dtype, layouts: tuple[bool, int, bool, bool],
    options: GLUOptions,
) -> Float8Tensor:  # fmt: skip
    by_row, tail, rows, columns = layouts
    check_tail(op, tail, by_row)
    columns = columns and torch.is_grad_enabled()
    layouts = by_row, tail, rows or not columns, columns
    reject_dtensors(op, gate_up)
    check_last(op, "gate_up", gate_up, 2 * ALIGNMENT)
    y: Float8Tensor = _Float8GLU.apply(gate_up, dtype, gradient_dtype, *layouts, options)
    return y


@kernel
def _glu_kernel(
    gate_up, stride, dy, dy_stride, amax, rows, words, scale, gate_multiplier, down_multiplier, limit, up_offset,
    M, N, W, across,
    ACTIVATION: tl.constexpr, BACKWARD: tl.constexpr, AMAX: tl.constexpr, MAX_EXPONENT: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, QUADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of 4 QUADS rows and COLUMNS pairs per program, like `_cast_kernel`."""
    program = tl.program_id(0)
    first_row = (program // across).to(tl.int64) * (4 * QUADS)
    quad = first_row + 4 * tl.arange(0, QUADS)
    first = program % across * COLUMNS
    p0, d0 = load_pairs(gate_up, stride, dy, dy_stride, quad, first, M, N, BACKWARD, COLUMNS)
    p1, d1 = load_pairs(gate_up, stride, dy, dy_stride, quad + 1, first, M, N, BACKWARD, COLUMNS)
    p2, d2 = load_pairs(gate_up, stride, dy, dy_stride, quad + 2, first, M, N, BACKWARD, COLUMNS)
    p3, d3 = load_pairs(gate_up, stride, dy, dy_stride, quad + 3, first, M, N, BACKWARD, COLUMNS)
    v0 = glu_values(p0, d0, gate_multiplier, down_multiplier, limit, up_offset, ACTIVATION, BACKWARD, QUADS, COLUMNS)
    v1 = glu_values(p1, d1, gate_multiplier, down_multiplier, limit, up_offset, ACTIVATION, BACKWARD, QUADS, COLUMNS)
    v2 = glu_values(p2, d2, gate_multiplier, down_multiplier, limit, up_offset, ACTIVATION, BACKWARD, QUADS, COLUMNS)
    v3 = glu_values(p3, d3, gate_multiplier, down_multiplier, limit, up_offset, ACTIVATION, BACKWARD, QUADS, COLUMNS)
    if AMAX:
        most = tl.maximum(tl.maximum(tl.abs(v0), tl.abs(v1)), tl.maximum(tl.abs(v2), tl.abs(v3)))
        tl.atomic_max(amax, bits_of_max(most), sem="relaxed")
    else:
        s, inverse = scale_and_inverse(tl.load(amax), MAX_EXPONENT)
        if program == 0:
            tl.store(scale, s)
        PER_PAIR: tl.constexpr = 2 if BACKWARD else 1
        store_float8(
            v0, v1, v2, v3, inverse, rows, PER_PAIR * N // 4, words, first_row, PER_PAIR * first, M, PER_PAIR * N, W,
            MAX_EXPONENT, ROWS, WORDS, QUADS, PER_PAIR * COLUMNS,
        )  # fmt: skip


@custom_op(keep=always)
def _float8_glu_amax(
    gate_up: Tensor, dy: Tensor | None, activation: str, gate_multiplier: float, down_multiplier: float,
    limit: float | None, up_offset: float,
) -> Tensor:  # fmt: skip
    """The bits of the maximum of the values that `_float8_glu_cast` writes, int32 ()."""
    options = GLUOptions(activation, gate_multiplier, down_multiplier, limit, up_offset)
    if not use_float8_kernels(gate_up):
        return amax_reference(values_reference(gate_up, dy, options))
    amax = gate_up.new_zeros((), dtype=torch.int32)
    if not is_fake(amax):
        _launch(gate_up, dy, amax, amax, amax, amax, E4M3, options, AMAX=True, ROWS=False, WORDS=False)
    return amax


@custom_op()
def _float8_glu_cast(
    gate_up: Tensor, dy: Tensor | None, amax: Tensor, dtype: torch.dtype, need_rows: bool, need_columns: bool,
    activation: str, gate_multiplier: float, down_multiplier: float, limit: float | None, up_offset: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Rows, columns and scale of the activation, or with dy of the gradient of gate_up."""
    options = GLUOptions(activation, gate_multiplier, down_multiplier, limit, up_offset)
    if not use_float8_kernels(gate_up):
        values = values_reference(gate_up, dy, options)
        return quantized_reference(values, scale_of_bits(amax, dtype), dtype, need_rows, need_columns)
    M, N = gate_up.shape[:-1].numel(), gate_up.shape[-1] // (2 if dy is None else 1)
    rows, columns = empty_layouts(gate_up, M, N, dtype, need_rows, need_columns)
    scale = gate_up.new_empty((), dtype=torch.float32)
    if not is_fake(scale):
        layouts = outputs(rows, columns)
        _launch(gate_up, dy, amax, *layouts, scale, dtype, options, AMAX=False, ROWS=need_rows, WORDS=need_columns)
    return rows, columns, scale


def _launch(
    gate_up: Tensor, dy: Tensor | None, amax: Tensor, rows: Tensor, words: Tensor, scale: Tensor, dtype: torch.dtype,
    options: GLUOptions, **constants: bool,
) -> None:  # fmt: skip
    M, N = gate_up.shape[:-1].numel(), gate_up.shape[-1] // 2
    programs, across = tiles(M, N)
    _glu_kernel[(max(programs, 1),)](
        *rows_and_stride(gate_up), *rows_and_stride(dy), amax, rows, words, scale, *glu_numbers(*options[1:]),
        M, N, aligned(M) // 4, max(across, 1), ACTIVATION=options.activation, BACKWARD=dy is not None,
        AMAX=constants["AMAX"], MAX_EXPONENT=MAX_EXPONENT[dtype], ROWS=constants["ROWS"], WORDS=constants["WORDS"],
        **TILE | {"num_warps": 8},
    )  # fmt: skip


class _Float8GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, dtype, gradient_dtype, by_row, tail, rows, columns, options):
        ctx.save_for_backward(gate_up)
        ctx.options, ctx.dtype, ctx.by_row, ctx.tail = options, gradient_dtype, by_row, tail
        shape = torch.Size((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
        if by_row:
            return of_rows(float8_glu_rows(gate_up, None, dtype, tail, *options), shape, gate_up.dtype)
        amax = _float8_glu_amax(gate_up, None, *options)
        parts = _float8_glu_cast(gate_up, None, amax, dtype, rows, columns, *options)
        return as_float8(parts, shape, gate_up.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (gate_up,) = ctx.saved_tensors
        if ctx.by_row:
            parts = float8_glu_rows(gate_up, dy, ctx.dtype, ctx.tail, *ctx.options)
            return (of_rows(parts, gate_up.shape, gate_up.dtype),)
        amax = _float8_glu_amax(gate_up, dy, *ctx.options)
        parts = _float8_glu_cast(gate_up, dy, amax, ctx.dtype, True, True, *ctx.options)
        return (as_float8(parts, gate_up.shape, gate_up.dtype),)
