"""A quantised linear layer for 17 to 64 tokens: larger batches, and the trees of candidates of speculative decoding.

As in `few_rows`, tensor cores multiply W x^T, with codes converted to the dtype of x and scales applied to float32
sums. The warps of a program divide its channels among them, so that inputs are read once for all. If there are too few
channels for all multiprocessors, the inputs are split, and a second kernel adds the parts in order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.ops.quantized.unpack import (
    float8_values,
    int4_values,
    mxfp4_scales,
    mxfp4_values,
    native_operands,
    nf4_values,
)
from ligermodels.ops.quantized.weights import format_of
from ligermodels.ops.runtime.devices import num_sms, pipeline_stages, power_of_2_above
from ligermodels.ops.runtime.dispatch import tl
from ligermodels.ops.runtime.launcher import kernel, wait_for_previous
from ligermodels.ops.runtime.tensors import contiguous, rows_and_stride

MORE_ROWS = 64
STEP = 128
"""Inputs per step: a group of the formats in 4 bits."""
COMBINED = 512
"""Channels per program of the second kernel."""


class _Tile(NamedTuple):
    """Channels per program; warps; steps in flight, if shared memory has room; programs per multiprocessor; fewest
    steps of a split: with fewer the second kernel would cost more than it saves."""

    channels: int
    warps: int
    stages: int
    programs: int
    min_steps: int


FLOAT8, FOUR_BITS = _Tile(128, 8, 4, 1, 4), _Tile(64, 4, 4, 2, 2)
"""Tuned on an H200."""


def more_rows(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Computes the layer into y.

    Args:
        x: (M, K), M up to 64, bfloat16 or float16.
        codes: codes of the weight, see `ops.quantized.weights`.
        scales: scales of the codes.
        bias: (N,), of x's dtype, or None.
        y: (M, N), of x's dtype; written.
    """
    (M, K), N = x.shape, codes.shape[0]
    bias = contiguous(bias)
    kind = format_of(codes, scales)
    tile = FLOAT8 if kind == "float8" else FOUR_BITS
    codes, own_scales, native = native_operands(codes, scales)
    block = max(power_of_2_above(M), 16)
    code_bytes = STEP * tile.channels // (1 if kind == "float8" else 2)
    stages = pipeline_stages(x.device, tile.stages, code_bytes + STEP * block * x.element_size())
    steps, tiles = -(-K // STEP), -(-N // tile.channels)
    splits = max(min(tile.programs * num_sms(x.device) // tiles, steps // tile.min_steps), 1)
    parts = y if splits == 1 else y.new_empty((splits, M, N), dtype=torch.float32)
    _more_rows_kernel[(tiles, splits)](
        *rows_and_stride(x), codes, own_scales, bias, parts, M, N, K, steps, KIND=kind, NATIVE=native,
        SPLIT=splits > 1, WHOLE=K % STEP == 0, BLOCK_M=block, BLOCK_N=tile.channels,
        STAGES=stages, num_warps=tile.warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        _sum_kernel[(M, -(-N // COMBINED))](parts, bias, y, M, N, splits, BLOCK=COMBINED, num_warps=4)


@kernel
def _more_rows_kernel(
    x, x_row, codes, scales, bias, out, M, N, K, steps, KIND: tl.constexpr, NATIVE: tl.constexpr, SPLIT: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """A tile of channels and an even share of the steps per program; with SPLIT it writes float32 parts (splits, M, N)
    without bias. A step is 128 inputs. WHOLE: K is a multiple of 128. NATIVE: see `unpack`."""
    wait_for_previous(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.minimum(n, N - 1).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    low_step = tl.program_id(1) * steps // tl.num_programs(1)
    high_step = (tl.program_id(1) + 1) * steps // tl.num_programs(1)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    rows, row_there = x + m.to(tl.int64)[None, :] * x_row, (m < M)[None, :]
    if KIND == "int4" or KIND == "nf4" or KIND == "mxfp4":
        byte = tl.arange(0, 64)
        for step in tl.range(low_step, high_step, num_stages=STAGES):  # prefetches scales too, as in `few_rows`
            group = channel * steps + step
            if KIND == "int4" or KIND == "mxfp4":
                scale = tl.load(scales + group)
            else:
                scale, scale_high = tl.load(scales + 2 * group), tl.load(scales + 2 * group + 1)
            q = tl.load(codes + channel[:, None] * (64 * steps) + (step * 64 + byte)[None, :])
            k = (step * 128 + byte)[:, None]
            v_low = tl.load(rows + k, mask=row_there & ((k < K) | WHOLE), other=0.0)
            v_high = tl.load(rows + k + 64, mask=row_there & ((k + 64 < K) | WHOLE), other=0.0)
            if KIND == "int4":
                low, high = int4_values(q, v_low.dtype, NATIVE)
                total = tl.dot(low, v_low)
                total = tl.dot(high, v_high, total)
                acc += total * scale[:, None]
            elif KIND == "mxfp4":
                low, high = mxfp4_values(q, v_low.dtype, NATIVE)
                bit = 8 * (byte // 32)[None, :]
                low = low.to(tl.float32) * mxfp4_scales(scale[:, None], bit)  # exact in bfloat16
                high = high.to(tl.float32) * mxfp4_scales(scale[:, None] >> 16, bit)
                acc = tl.dot(low.to(v_low.dtype), v_low, acc)
                acc = tl.dot(high.to(v_low.dtype), v_high, acc)
            else:
                low, high = nf4_values(q, v_low.dtype, NATIVE)
                acc += tl.dot(low, v_low) * scale[:, None]
                acc += tl.dot(high, v_high) * scale_high[:, None]
    else:
        for step in range(low_step, high_step):
            k = step * 128 + tl.arange(0, 128)
            there = (k < K) | WHOLE
            v = tl.load(rows + k[:, None], mask=row_there & there[:, None], other=0.0)
            q = tl.load(codes + channel[:, None] * K + k[None, :], mask=there[None, :], other=0.0)
            acc = tl.dot(float8_values(q, v.dtype, NATIVE), v, acc)
        acc *= tl.load(scales + channel)[:, None]
    if not SPLIT and bias is not None:
        acc += tl.load(bias + channel).to(tl.float32)[:, None]
    place = (tl.program_id(1) * M + m).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + place, tl.trans(acc).to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@kernel
def _sum_kernel(parts, bias, y, M, N, splits, BLOCK: tl.constexpr, PDL: tl.constexpr = False):
    """Some channels of a token, summed over the splits in order."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(splits):
        acc += tl.load(parts + (split * M + row) * N + n, mask=n < N, other=0.0)
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + row * N + n, acc.to(y.dtype.element_ty), mask=n < N)
