"""Products of experts for the few tokens of a decoding step: each weight of an active expert is read once.

Rows stay in the order of the tokens and their choices; nothing is sorted, and nothing waits for the device. The first
program that meets an expert computes all of its rows: a program finds them among the experts of all rows, which are at
most MAX_ROWS. Tiles, formats and the product itself are those of `few_rows`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.ops.glu.glu import GLUOptions, glu_numbers
from ligermodels.ops.quantized.few_rows import few_rows_product, few_rows_store
from ligermodels.ops.quantized.unpack import native_codes
from ligermodels.ops.quantized.weights import GROUP, format_of, num_groups
from ligermodels.ops.runtime.devices import gpu_of
from ligermodels.ops.runtime.dispatch import pipeline_stages, power_of_2_above, tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_fake
from ligermodels.ops.runtime.tensors import as_rows, contiguous

MAX_ROWS = 512
"""Most rows, which a program holds in its registers."""
MEAN_ROWS = 16
"""Most rows per expert of a model: above, weights are read several times."""


class Tile(NamedTuple):
    """Channels per program; warps; parts of the inputs per step, which the warps divide; inputs per part; steps in
    flight, if shared memory has room."""

    channels: int
    warps: int
    parts: int
    step: int
    stages: int


def expert_rows_refuse(x: Tensor, rows: int, num_experts: int, *weights: Tensor) -> str | None:
    """Why `expert_rows` cannot serve a call; None if it can.

    Args:
        x: (N, K), the tokens.
        rows: number of rows.
        num_experts: number of experts.
        weights: plain weights or codes.
    """
    gpu, most = gpu_of(x.device), min(MAX_ROWS, MEAN_ROWS * num_experts)
    if rows > most:
        return f"{rows} choices of experts are more than {most}"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bfloat16 and float16"
    if not use_kernels(x, *weights) or x.is_meta:
        return "its kernels need triton and CUDA tensors"
    if gpu is not None and not gpu.has_bfloat16:
        return f"{gpu.name} has no tensor cores for bfloat16"
    return None


def expert_rows(
    x: Tensor, experts: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, num_experts: int,
    tokens: int, gated: GLUOptions | None = None,
) -> Tensor:  # fmt: skip
    """y[r] = weight[experts[r]] x[r // copies] + bias[experts[r]], and perhaps a gated activation, without gradients.

    With an activation, the product is first rounded to the dtype of x, as if it were written.

    Args:
        x: (N, K), bfloat16 or float16.
        experts: integers (R,) in [0, E), the expert of each row; R = N * copies, at most MAX_ROWS.
        weight: a plain weight (E * M, K) of x's dtype; or the codes of a quantised one.
        scales: scales of the codes; None for a plain weight.
        bias: (E, M), of x's dtype, or None.
        num_experts: number E of experts.
        tokens: number of tokens. With more than one, rows may share an expert.
        gated: a gated activation of pairs of channels, or None.

    Returns:
        (R, M), or (R, M / 2) with an activation, of x's dtype.
    """
    y: Tensor = _expert_rows(x, experts, weight, scales, bias, num_experts, tokens, *(gated or GLUOptions("")))
    return y


@custom_op()
def _expert_rows(
    x: Tensor, experts: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, num_experts: int,
    tokens: int, activation: str, gate_multiplier: float, down_multiplier: float, limit: float | None, up_offset: float,
) -> Tensor:  # fmt: skip
    (R,), (N, K), M = experts.shape, x.shape, weight.shape[0] // num_experts
    y = x.new_empty(R, M // 2 if activation else M)
    if is_fake(x) or not R:
        return y
    x = as_rows(x)
    kind = "plain" if scales is None else format_of(weight, scales)
    four_bits = weight.dtype == torch.uint8
    codes, native = native_codes(weight.contiguous())
    tile, block = tile_of(four_bits, tokens, K), 8 if tokens <= 8 else 16
    step = tile.parts * tile.step
    code_bytes = step * tile.channels * codes.element_size() // (2 if four_bits else 1)
    stages = pipeline_stages(x.device, tile.stages, code_bytes + step * block * x.element_size())
    by_expert = num_experts < R and tokens > 1
    _expert_rows_kernel[((num_experts if by_expert else R) * -(-M // tile.channels),)](
        x, x.stride(0), experts.contiguous(), codes, contiguous(scales), contiguous(bias),
        *glu_numbers(gate_multiplier, down_multiplier, limit, up_offset), y, R, M, K, num_groups(K), -(-K // step),
        R // N, KIND=kind, NATIVE=native, ACTIVATION=activation, ONE=tokens == 1, BY_EXPERT=by_expert,
        WHOLE=K % step == 0, BLOCK_R=power_of_2_above(R), BLOCK_M=block, BLOCK_N=tile.channels, PARTS=tile.parts,
        STEP=tile.step, STAGES=stages, num_warps=tile.warps, num_stages=stages,
    )  # fmt: skip
    return y


def tile_of(four_bits: bool, tokens: int, inputs: int) -> Tile:
    """Those of `few_rows`; short rows are divided among fewer parts, so that no part is empty.

    Args:
        four_bits: whether weights have 4 bits.
        tokens: number of tokens.
        inputs: number of input channels.
    """
    parts = 4 if inputs > 8 * GROUP else 2
    if tokens > 8:
        return Tile(32, 4, parts, GROUP, 3 if four_bits else 4)
    return Tile(16, 2 if four_bits else parts, parts, GROUP, 4)


@kernel
def _expert_rows_kernel(
    x, x_row, experts, codes, scales, bias, gate_multiplier, down_multiplier, limit, up_offset, y,
    R, N, K, G, steps, copies, KIND: tl.constexpr, NATIVE: tl.constexpr, ACTIVATION: tl.constexpr, ONE: tl.constexpr,
    BY_EXPERT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of channels of one expert per program: with BY_EXPERT of each expert, else of the expert of each row,
    where only the first row of an expert has work. ONE: there is one token, and each row has a program of its own."""
    tiles = tl.cdiv(N, BLOCK_N)
    place = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * BLOCK_N
    channel = tl.minimum(first + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    if ONE:
        channel += tl.load(experts + place).to(tl.int64) * N
        row, there = m + place, m < 1
        result = few_rows_product(
            x + (place // copies).to(tl.int64) * x_row, row, there, codes, scales, channel, K, G, steps,
            KIND, NATIVE, ONE, WHOLE, BLOCK_M, BLOCK_N, PARTS, STEP, STAGES,
        )  # fmt: skip
        few_rows_store(
            result, y, row, there, bias, channel, gate_multiplier, down_multiplier, limit, up_offset, first, N,
            ACTIVATION, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        number = tl.arange(0, BLOCK_R)
        of_rows = tl.load(experts + number, mask=number < R, other=-1).to(tl.int32)
        expert = place
        if not BY_EXPERT:
            expert = tl.load(experts + place).to(tl.int32)
        own = of_rows == expert
        rank = tl.cumsum(own.to(tl.int32), 0) - 1
        count = tl.sum(own.to(tl.int32), 0)
        if not BY_EXPERT:
            count = tl.where(tl.min(tl.where(own, number, BLOCK_R), 0) == place, count, 0)
        channel += expert.to(tl.int64) * N
        for start in range(0, count, BLOCK_M):
            there = start + m < count
            chosen = own[None, :] & (rank[None, :] == (start + m)[:, None])
            row = tl.sum(tl.where(chosen, number[None, :], 0), 1)
            result = few_rows_product(
                x, (row // copies).to(tl.int64) * x_row, there, codes, scales, channel, K, G, steps,
                KIND, NATIVE, ONE, WHOLE, BLOCK_M, BLOCK_N, PARTS, STEP, STAGES,
            )  # fmt: skip
            few_rows_store(
                result, y, row, there, bias, channel, gate_multiplier, down_multiplier, limit, up_offset, first, N,
                ACTIVATION, BLOCK_M, BLOCK_N,
            )  # fmt: skip
