"""A quantised linear layer for 2 to 64 tokens: batches, and the trees of candidates of speculative decoding.

Codes become the dtype of x, exactly, and tensor cores multiply them: W x^T, so that the many channels of W are the rows
of their tiles, and the few tokens the columns. Scales multiply float32 sums, those of int4 the sum over each group.
Where channels are too few for all multiprocessors, the inputs are split, and a second kernel sums the parts in order.

Chosen for an H200 and not yet measured: see `one_row`.
"""

import torch
from torch import Tensor

from ligermodels.ops.quantized.unpack import EXPONENT, int4_values
from ligermodels.ops.runtime.dispatch import num_sms, power_of_2_above, tl
from ligermodels.ops.runtime.launcher import kernel

MAX_ROWS = 64
STEP = 128
"""Inputs of a tile: a group of int4."""
MIN_STEPS = 4
"""Of a split, or the second kernel would cost more than it saves."""
COMBINED = 512
"""Channels of a program of the second kernel."""


def few_rows(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """x (M, K), M up to 64, bfloat16 or float16 -> y (M, N), which is filled. `bias` is of x's dtype."""
    (M, K), N = x.shape, codes.shape[0]
    x, bias = x if x.stride(1) == 1 else x.contiguous(), None if bias is None else bias.contiguous()
    block_m = max(power_of_2_above(M), 16)
    block_n = 64 if block_m == 16 else 128  # tensor cores take 64 at least; more tokens are to be read less often
    steps, tiles = -(-K // STEP), -(-N // block_n)
    splits = max(min(2 * num_sms(x.device) // tiles, steps // MIN_STEPS), 1)
    parts = y if splits == 1 else y.new_empty((splits, M, N), dtype=torch.float32)
    _few_rows_kernel[(tiles, splits)](
        x, x.stride(0), codes, scales, bias, parts, M, N, K, steps,
        INT4=codes.dtype == torch.int32, SPLIT=splits > 1, WHOLE=K % STEP == 0, EXPONENT=EXPONENT,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=block_n // 16, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _sum_kernel[(M, -(-N // COMBINED))](parts, bias, y, M, N, splits, BLOCK=COMBINED, num_warps=4)


@kernel
def _few_rows_kernel(
    x, x_row, codes, scales, bias, out, M, N, K, steps, INT4: tl.constexpr, SPLIT: tl.constexpr,
    WHOLE: tl.constexpr, EXPONENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile of channels and an even share of the steps per program; with SPLIT float32 parts (splits, M, N) without
    bias. A step is 128 inputs; WHOLE if K is so many steps."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.minimum(n, N - 1).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    low = tl.program_id(1) * steps // tl.num_programs(1)
    high = (tl.program_id(1) + 1) * steps // tl.num_programs(1)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for step in range(low, high):
        if INT4:
            word = step * 16 + tl.arange(0, 16)
            w = tl.load(codes + channel[:, None] * (16 * steps) + word[None, :])
            scale = tl.load(scales + channel * steps + step).to(tl.float32)
            total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for i in tl.static_range(8):
                k = step * 128 + 16 * i + tl.arange(0, 16)
                inside = (m < M)[None, :] & ((k < K) | WHOLE)[:, None]
                v = tl.load(x + k[:, None] + m[None, :] * x_row, mask=inside, other=0.0)
                total = tl.dot(int4_values(w, EXPONENT, i).to(v.dtype), v, total)
            acc += total * scale[:, None]
        else:
            k = step * 128 + tl.arange(0, 128)
            there = (k < K) | WHOLE
            v = tl.load(x + k[:, None] + m[None, :] * x_row, mask=(m < M)[None, :] & there[:, None], other=0.0)
            q = tl.load(codes + channel[:, None] * K + k[None, :], mask=there[None, :], other=0.0)
            acc = tl.dot(q.to(tl.float32).to(v.dtype), v, acc)  # faster by way of float32
    if not INT4:
        acc *= tl.load(scales + channel)[:, None]
    if not SPLIT and bias is not None:
        acc += tl.load(bias + channel).to(tl.float32)[:, None]
    place = (tl.program_id(1) * M + m).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + place, tl.trans(acc).to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@kernel
def _sum_kernel(parts, bias, y, M, N, splits, BLOCK: tl.constexpr):
    """Some channels of a token, summed over the splits in order."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(splits):
        acc += tl.load(parts + (split * M + row) * N + n, mask=n < N, other=0.0)
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + row * N + n, acc.to(y.dtype.element_ty), mask=n < N)
