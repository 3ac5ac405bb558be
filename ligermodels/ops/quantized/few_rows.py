"""A linear layer for 1 to 16 tokens, as in plain decoding and small batches, with a quantised or plain weight W. Its
time is the time to read W. A gated activation or an addition after the layer can be fused.

A program takes some output channels. Its warps divide the inputs among them, in steps and parts. So one kernel has
enough warps on all multiprocessors even for a layer with few channels, and no sums of programs to add. Each warp
multiplies W x^T by tensor cores, with a smallest tile of 16 channels: the channels of W are its rows, the few tokens
its columns. In plain decoding the single token takes all columns. Codes are converted to the dtype of x (a plain
weight has that dtype). Scales multiply float32 sums: for int4 the sum over each group, for nf4 and mxfp4 over each
block. At the end the sums of the parts are added.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.ops.glu.glu import GLUOptions, glu_numbers
from ligermodels.ops.glu.glu_kernels import gated_values
from ligermodels.ops.quantized.unpack import (
    float8_values,
    int4_values,
    mxfp4_scales,
    mxfp4_values,
    native_operands,
    nf4_values,
)
from ligermodels.ops.quantized.weights import GROUP, format_of, num_groups
from ligermodels.ops.runtime.devices import pipeline_stages
from ligermodels.ops.runtime.dispatch import tl, triton
from ligermodels.ops.runtime.launcher import kernel, wait_for_previous
from ligermodels.ops.runtime.tensors import contiguous, rows_and_stride

FEW_ROWS = 16


class Tile(NamedTuple):
    """Channels per program; warps; parts of the inputs per step, divided evenly among the warps; inputs per part; steps
    in flight, if shared memory has room."""

    channels: int
    warps: int
    parts: int
    step: int
    stages: int


def few_rows(
    x: Tensor, codes: Tensor, scales: Tensor | None, bias: Tensor | None, y: Tensor, gated: GLUOptions | None = None
) -> None:
    """Computes the layer into y. With an activation, the layer's result is first rounded to the dtype of x, as if it
    were written.

    Args:
        x: (M, K), M up to 16, bfloat16 or float16.
        codes: codes of the weight, see `ops.quantized.weights`; or a plain weight (N, K) of x's dtype.
        scales: scales of the codes; None for a plain weight.
        bias: (N,), of x's dtype, or None.
        y: (M, N), or (M, N / 2) with a gated activation, of x's dtype; written.
        gated: a gated activation of pairs of channels, or None.
    """
    (M, K), N = x.shape, codes.shape[0]
    options = gated or GLUOptions("")
    kind = "plain" if scales is None else format_of(codes, scales)
    four_bits = codes.dtype == torch.uint8
    codes, scales, native = native_operands(codes, scales)
    tile, block = _tile(four_bits, M, N), 8 if M <= 8 else 16
    step = tile.parts * tile.step
    code_bytes = step * tile.channels * codes.element_size() // (2 if four_bits else 1)
    stages = pipeline_stages(x.device, tile.stages, code_bytes + step * block * x.element_size())
    _few_rows_kernel[(-(-N // tile.channels),)](
        *rows_and_stride(x), codes, scales, contiguous(bias), *glu_numbers(*options[1:]), y,
        M, N, K, num_groups(K), -(-K // step), KIND=kind, NATIVE=native, ACTIVATION=options.activation, ONE=M == 1,
        WHOLE=K % step == 0, BLOCK_M=block, BLOCK_N=tile.channels, PARTS=tile.parts, STEP=tile.step,
        STAGES=stages, num_warps=tile.warps, num_stages=stages,
    )  # fmt: skip


def _tile(four_bits: bool, M: int, N: int) -> Tile:
    """Tuned on an H200: with more channels per program, rows are read less often, but fewer bytes are in flight. With
    few programs, each keeps more steps of four bits per weight in flight."""
    if M > 8:
        return Tile(32, 4, 4, GROUP, 3 if four_bits else 4)
    if four_bits:
        return Tile(16, 2, 4, GROUP, 6 if N <= 4096 else 4 if N <= 16384 else 3)
    return Tile(16, 4, 4, GROUP, 4)


@kernel
def _few_rows_kernel(
    x, x_row, codes, scales, bias, gate_multiplier, down_multiplier, limit, up_offset, y,
    M, N, K, G, steps, KIND: tl.constexpr, NATIVE: tl.constexpr, ACTIVATION: tl.constexpr, ONE: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """A tile of channels per program. Each part takes every PARTS-th block of STEP inputs (in 4 bits, a group).
    KIND: the format, or "plain". NATIVE: see `unpack`. ONE: M is 1. WHOLE: K is a multiple of PARTS * STEP."""
    wait_for_previous(PDL)
    first = tl.program_id(0) * BLOCK_N
    channel = tl.minimum(first + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
    m = tl.arange(0, BLOCK_M).to(tl.int64)
    result = few_rows_product(
        x, m * x_row, m < M, codes, scales, channel, K, G, steps,
        KIND, NATIVE, ONE, WHOLE, BLOCK_M, BLOCK_N, PARTS, STEP, STAGES,
    )  # fmt: skip
    few_rows_store(
        result, y, m, m < M, bias, channel, gate_multiplier, down_multiplier, limit, up_offset, first, N, ACTIVATION,
        BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def few_rows_product(
    x, rows, there, codes, scales, channel, K, G, steps, KIND: tl.constexpr, NATIVE: tl.constexpr, ONE: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Float32 (BLOCK_N, BLOCK_M): some channels of the weight times some rows of x.

    Args:
        x: pointer to the first row.
        rows: int64 (BLOCK_M,), offsets of the rows in x; with ONE, x is the only row.
        there: (BLOCK_M,), whether each row exists.
        codes, scales: codes of the weight and their scales, see `ops.quantized.weights`; of a plain weight, itself and
            None.
        channel: int64 (BLOCK_N,), rows of the weight.
        K, G, steps: inputs, groups of inputs, and steps of PARTS * STEP inputs.
        KIND: the format of the codes, or "plain".
        NATIVE: see `unpack`.
        ONE: whether x has one row.
        WHOLE: whether K is a multiple of PARTS * STEP.
        BLOCK_M, BLOCK_N: rows of x, and channels of the weight.
        PARTS, STEP: parts of the inputs per step, and inputs per part.
        STAGES: steps in flight.
    """
    if KIND == "int4" or KIND == "nf4" or KIND == "mxfp4":
        # Units are bytes of codes whose low four bits share a scale, and so do their high four bits.
        PER_GROUP: tl.constexpr = 2 if KIND == "mxfp4" else 1
        BYTES: tl.constexpr = 64 // PER_GROUP
        UNITS: tl.constexpr = PARTS * PER_GROUP
        acc = tl.zeros((UNITS, BLOCK_N, BLOCK_M), dtype=tl.float32)
        byte = tl.arange(0, BYTES)
        # With num_stages on the loop, Triton also prefetches loads that are no operand of a product.
        for step in tl.range(steps, num_stages=STAGES):
            unit = step * UNITS + tl.arange(0, UNITS)
            g = unit >> (PER_GROUP - 1)
            group = channel[None, :] * G + tl.minimum(g, G - 1)[:, None]
            if KIND == "nf4":
                scale, scale_high = tl.load(scales + 2 * group), tl.load(scales + 2 * group + 1)
            else:
                scale = tl.load(scales + group)
            place = channel[None, :, None] * (64 * G) + (unit[:, None] * BYTES + byte[None, :])[:, None, :]
            q = tl.load(codes + place, mask=((g < G) | WHOLE)[:, None, None], other=0)
            k = (unit * BYTES + g * 64)[:, None] + byte[None, :]
            v_low = _inputs(x, rows, k, there, K, ONE, WHOLE)
            v_high = _inputs(x, rows, k + 64, there, K, ONE, WHOLE)
            if KIND == "int4":
                low, high = int4_values(q, v_low.dtype, NATIVE)
                total = tl.dot(low, v_low)
                total = tl.dot(high, v_high, total)
                acc += total * scale[:, :, None]
            else:
                if KIND == "mxfp4":
                    low, high = mxfp4_values(q, v_low.dtype, NATIVE)
                    bit = 8 * (tl.arange(0, UNITS) & 1)[:, None]
                    scale, scale_high = mxfp4_scales(scale, bit), mxfp4_scales(scale >> 16, bit)
                else:
                    low, high = nf4_values(q, v_low.dtype, NATIVE)
                acc += tl.dot(low, v_low) * scale[:, :, None]
                acc += tl.dot(high, v_high) * scale_high[:, :, None]
        result = tl.sum(acc, axis=0)
    else:
        acc = tl.zeros((PARTS, BLOCK_N, BLOCK_M), dtype=tl.float32)
        within = tl.arange(0, PARTS)[:, None] * STEP + tl.arange(0, STEP)[None, :]
        for step in range(steps):
            k = step * (PARTS * STEP) + within
            place = channel[None, :, None] * K + k[:, None, :]
            q = tl.load(codes + place, mask=((k < K) | WHOLE)[:, None, :], other=0.0)
            v = _inputs(x, rows, k, there, K, ONE, WHOLE)
            acc = tl.dot(q if scales is None else float8_values(q, v.dtype, NATIVE), v, acc)
        result = tl.sum(acc, axis=0)
        if scales is not None:
            result = result * tl.load(scales + channel)[:, None]
    return result


@triton.jit
def few_rows_store(
    result, y, row, there, bias, channel, gate_multiplier, down_multiplier, limit, up_offset, first, N,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Stores the result of `few_rows_product`, with the bias of each channel and a gated activation.

    Args:
        result: float32 (BLOCK_N, BLOCK_M), channels of rows.
        y: (M, N), or (M, N / 2) with an activation, contiguous; written.
        row: (BLOCK_M,), rows of y.
        there: (BLOCK_M,), whether each row exists.
        bias: (N,), or None.
        channel: int64 (BLOCK_N,), the channels' places in `bias`.
        gate_multiplier, down_multiplier, limit, up_offset: see `gated_values`.
        first: first channel of the result.
        N: number of channels.
        ACTIVATION: name of the gated activation of pairs of channels, or "".
        BLOCK_M, BLOCK_N: rows and channels of the result.
    """
    if bias is not None:
        result += tl.load(bias + channel).to(tl.float32)[:, None]
    result, row = result.to(y.dtype.element_ty), row.to(tl.int64)[None, :]
    if ACTIVATION == "":
        n = first + tl.arange(0, BLOCK_N)
        tl.store(y + row * N + n[:, None], result, mask=there[None, :] & (n < N)[:, None])
    else:
        pairs = tl.permute(tl.reshape(result, (BLOCK_N // 2, 2, BLOCK_M)), (0, 2, 1))
        gate, up = tl.split(pairs.to(tl.float32))
        result = gated_values(gate, up, gate_multiplier, down_multiplier, limit, up_offset, ACTIVATION)
        n = first // 2 + tl.arange(0, BLOCK_N // 2)
        there = there[None, :] & (n < N // 2)[:, None]
        tl.store(y + row * (N // 2) + n[:, None], result.to(y.dtype.element_ty), mask=there)


@triton.jit
def _inputs(x, rows, k, there, K, ONE: tl.constexpr, WHOLE: tl.constexpr):
    """Loads the inputs k (PARTS, STEP) of some rows: (PARTS, STEP, BLOCK_M)."""
    if ONE:
        v = tl.load(x + k, mask=(k < K) | WHOLE, other=0.0)
        v = tl.broadcast_to(v[:, :, None], (k.shape[0], k.shape[1], rows.shape[0]))
    else:
        inside = ((k < K) | WHOLE)[:, :, None] & there[None, None, :]
        v = tl.load(x + k[:, :, None] + rows[None, None, :], mask=inside, other=0.0)
    return v
