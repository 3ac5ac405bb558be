"""A linear layer for 1 to 16 tokens, as in plain decoding and small batches: what limits it is reading W, quantised or
not.

A program takes some output channels. Its warps share out the inputs, step by step, so that one kernel has enough warps
on all multiprocessors even for a layer of few channels, and no sums of programs to add. Each warp multiplies W x^T by
tensor cores, of which 16 channels are the smallest tile: the channels of W are its rows and the few tokens its columns.
The one token of plain decoding takes all columns. Codes become the dtype of x, exactly (a weight that is not quantised
is of that dtype); scales multiply float32 sums, those of int4 the sum over each group; at the end the sums of the warps
are added.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.ops.quantized.unpack import float8_values, int4_values
from ligermodels.ops.quantized.weights import GROUP, num_groups
from ligermodels.ops.runtime.dispatch import num_sms, tl, triton
from ligermodels.ops.runtime.launcher import kernel

FEW_ROWS = 16


class _Tile(NamedTuple):
    """Channels of a program; warps; inputs of a warp at a time; steps on their way."""

    channels: int
    warps: int
    step: int
    stages: int


def few_rows(x: Tensor, codes: Tensor, scales: Tensor | None, bias: Tensor | None, y: Tensor) -> None:
    """x (M, K), M up to 16, bfloat16 or float16 -> y (M, N), which is filled. `bias` is of x's dtype, and so are the
    codes of a weight (N, K) that is not quantised, which has no scales."""
    (M, K), N = x.shape, codes.shape[0]
    x, bias = x if x.stride(1) == 1 else x.contiguous(), None if bias is None else bias.contiguous()
    int4 = codes.dtype == torch.uint8
    tile = _tile(int4, M, N, K, num_sms(x.device))
    step = tile.warps * tile.step
    _few_rows_kernel[(-(-N // tile.channels),)](
        x, x.stride(0), codes, scales, bias, y, M, N, K, num_groups(K), -(-K // step),
        INT4=int4, ONE=M == 1, WHOLE=K % step == 0, BLOCK_M=8 if M <= 8 else 16, BLOCK_N=tile.channels,
        PARTS=tile.warps, STEP=tile.step, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _tile(int4: bool, M: int, N: int, K: int, sms: int) -> _Tile:
    """Chosen by times on an H200: with more channels, rows are read less often and fewer bytes are on their way. Warps
    of int4, which wait for its scales, share long rows and not those of many programs."""
    if M > 8:
        return _Tile(32, 4, GROUP, 3 if int4 else 4)
    if int4 and 8 * 16 * sms <= N:
        return _Tile(16, 2, GROUP, 4)
    if int4 and K >= 8 * 8 * GROUP:
        return _Tile(16, 8, GROUP, 3)
    return _Tile(16, 4, GROUP, 4)


@kernel
def _few_rows_kernel(
    x, x_row, codes, scales, bias, y, M, N, K, G, steps, INT4: tl.constexpr, ONE: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A tile of channels per program, whose parts, one a warp, take every PARTS-th STEP inputs: for int4, a group.
    ONE if M is 1; WHOLE if K is whole steps of all parts."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.minimum(n, N - 1).to(tl.int64)
    m, p = tl.arange(0, BLOCK_M), tl.arange(0, PARTS)
    acc = tl.zeros((PARTS, BLOCK_N, BLOCK_M), dtype=tl.float32)
    if INT4:
        byte = tl.arange(0, 64)
        scale = tl.load(scales + channel[None, :] * G + tl.minimum(p, G - 1)[:, None])
        for step in range(steps):
            g = step * PARTS + p
            # Two bytes are too few for Triton to read ahead, as it does with the rest: that takes a step more.
            after = tl.load(scales + channel[None, :] * G + tl.minimum(g + PARTS, G - 1)[:, None])
            place = channel[None, :, None] * (64 * G) + (g[:, None] * 64 + byte[None, :])[:, None, :]
            q = tl.load(codes + place, mask=((g < G) | WHOLE)[:, None, None], other=0)
            k = g[:, None] * 128 + byte[None, :]
            v_low = _inputs(x, x_row, k, m, M, K, ONE, WHOLE)
            v_high = _inputs(x, x_row, k + 64, m, M, K, ONE, WHOLE)
            low, high = int4_values(q, v_low.dtype)
            total = tl.dot(low, v_low)
            total = tl.dot(high, v_high, total)
            acc += total * scale.to(tl.float32)[:, :, None]
            scale = after
        result = tl.sum(acc, axis=0)
    else:
        within = p[:, None] * STEP + tl.arange(0, STEP)[None, :]
        for step in range(steps):
            k = step * (PARTS * STEP) + within
            place = channel[None, :, None] * K + k[:, None, :]
            q = tl.load(codes + place, mask=((k < K) | WHOLE)[:, None, :], other=0.0)
            v = _inputs(x, x_row, k, m, M, K, ONE, WHOLE)
            acc = tl.dot(q if scales is None else float8_values(q, v.dtype), v, acc)
        result = tl.sum(acc, axis=0)
        if scales is not None:
            result = result * tl.load(scales + channel)[:, None]
    if bias is not None:
        result += tl.load(bias + channel).to(tl.float32)[:, None]
    there = (m < M)[None, :] & (n < N)[:, None]
    tl.store(y + m.to(tl.int64)[None, :] * N + n[:, None], result.to(y.dtype.element_ty), mask=there)


@triton.jit
def _inputs(x, x_row, k, m, M, K, ONE: tl.constexpr, WHOLE: tl.constexpr):
    """Inputs k (PARTS, STEP) of rows m: (PARTS, STEP, BLOCK_M)."""
    if ONE:
        v = tl.load(x + k, mask=(k < K) | WHOLE, other=0.0)
        v = tl.broadcast_to(v[:, :, None], (k.shape[0], k.shape[1], m.shape[0]))
    else:
        there = ((k < K) | WHOLE)[:, :, None] & (m < M)[None, None, :]
        v = tl.load(x + k[:, :, None] + m.to(tl.int64)[None, None, :] * x_row, mask=there, other=0.0)
    return v
