"""A quantised linear layer for one token, as in plain decoding: each weight is read once and used once.

A program takes some output channels, and a tile of their codes at a time. A thread has 16 bytes in a row of each of
them, for which it reads the inputs once. Codes become float32, products and sums are float32.

Chosen for an H200 by counts of bytes in flight, instructions and registers, and not yet measured: `python -m
benchmarks.quantized_decoding` does that.
"""

import torch
from torch import Tensor

from ligermodels.ops.quantized.unpack import EXPONENT, int4_values
from ligermodels.ops.quantized.weights import num_groups
from ligermodels.ops.runtime.dispatch import num_sms, power_of_2_above, tl
from ligermodels.ops.runtime.launcher import kernel

TILE_BYTES = 4096
"""Of the codes of a program, one warp, at a time: 128 bytes for each thread, all asked for before any is used."""
FEW_CHANNELS, MANY_CHANNELS = 4, 8
"""Of a program. The more, the less work on inputs for each; the fewer, the more bytes are on their way."""
ENOUGH_WARPS = 16
"""On a multiprocessor, to have the more channels in each."""


def one_row(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """x (1, K) -> y (1, N), which is filled; float32, bfloat16 or float16. `bias` is of x's dtype."""
    N, K = codes.shape[0], x.shape[1]
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    enough = ENOUGH_WARPS * num_sms(x.device)
    channels = MANY_CHANNELS if enough <= N // MANY_CHANNELS else FEW_CHANNELS
    wide, grid = TILE_BYTES // channels, (-(-N // channels),)
    if codes.dtype == torch.int32:
        groups = num_groups(K)
        _int4_kernel[grid](
            x, codes, scales, bias, y, N, K, groups, EXPONENT,
            BLOCK_N=channels, GROUPS=min(power_of_2_above(groups), wide // 64), num_warps=1,
        )  # fmt: skip
    else:
        chunks = min(power_of_2_above(-(-K // 16)), wide // 16)
        _float8_kernel[grid](x, codes, scales, bias, y, N, K, BLOCK_N=channels, CHUNKS=chunks, num_warps=1)


@kernel
def _int4_kernel(
    x, words, scales, bias, y, N, K, G, exponent, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """Tiles of GROUPS groups."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.minimum(n, N - 1).to(tl.int64)
    word = tl.arange(0, 16)
    acc = tl.zeros((BLOCK_N, GROUPS), dtype=tl.float32)
    for first in range(0, G, GROUPS):
        g = first + tl.arange(0, GROUPS)
        place = g[:, None] * 16 + word[None, :]
        there = (g < G)[None, :, None]
        w = tl.load(words + channel[:, None, None] * (16 * G) + place[None, :, :], mask=there, other=0)
        scale = tl.load(scales + channel[:, None] * G + g[None, :], mask=(g < G)[None, :], other=0.0)
        total = tl.zeros((BLOCK_N, GROUPS, 16), dtype=tl.float32)
        for i in tl.static_range(8):
            k = g[:, None] * 128 + (16 * i + word)[None, :]
            v = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
            total += int4_values(w, exponent, i) * v[None, :, :]
        acc += tl.sum(total, axis=2) * scale.to(tl.float32)
    result = tl.sum(acc, axis=1)
    if bias is not None:
        result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + n, result.to(y.dtype.element_ty), mask=n < N)


@kernel
def _float8_kernel(x, codes, scales, bias, y, N, K, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr):
    """Tiles of CHUNKS times 16 inputs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.minimum(n, N - 1).to(tl.int64)
    within = tl.arange(0, CHUNKS)[:, None] * 16 + tl.arange(0, 16)[None, :]
    acc = tl.zeros((BLOCK_N, CHUNKS), dtype=tl.float32)
    for first in range(0, K, CHUNKS * 16):
        k = first + within
        v = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        q = tl.load(codes + channel[:, None, None] * K + k[None, :, :], mask=(k < K)[None, :, :], other=0.0)
        acc += tl.sum(q.to(tl.float32) * v[None, :, :], axis=2)
    result = tl.sum(acc, axis=1) * tl.load(scales + channel)
    if bias is not None:
        result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + n, result.to(y.dtype.element_ty), mask=n < N)
