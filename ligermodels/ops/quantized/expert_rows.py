"""Products of experts for the few tokens of a decoding step: each weight of an active expert is read once.

Rows stay in the order of the tokens and their choices; nothing is sorted, and nothing waits for the device. The first
program that meets an expert computes all of its rows: a program finds them among the experts of all rows, which are at
most MAX_ROWS. Tiles, formats and the product itself are those of `few_rows`.
"""

import torch
from torch import Tensor

from ligermodels.ops.glu.glu import GLUOptions, glu_numbers
from ligermodels.ops.quantized.few_rows import Tile, few_rows_product, few_rows_store
from ligermodels.ops.quantized.unpack import native_operands
from ligermodels.ops.quantized.weights import GROUP, format_of, num_groups
from ligermodels.ops.runtime.devices import gpu_of, num_sms, pipeline_stages, power_of_2_above
from ligermodels.ops.runtime.dispatch import tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_fake
from ligermodels.ops.runtime.tensors import as_rows, contiguous

MAX_ROWS = 2048
"""Most rows, which a program holds in its registers."""
MEAN_ROWS = 16
"""Most rows per expert of a model: above, weights are read several times."""
FEW_MEAN_ROWS = 4
"""Up to this number of rows per expert, tiles have 8 rows: few experts have more, which read their weights twice."""
WARPS = 32
"""Warps per multiprocessor, if there is work for more: programs take several tiles, and find their rows once."""


def expert_rows_refuse(x: Tensor, rows: int, num_experts: int, *weights: Tensor) -> str | None:
    """Why `expert_rows` cannot serve a call; None if it can.

    Args:
        x: (N, K), the tokens.
        rows: number of rows.
        num_experts: number of experts.
        weights: plain weights or codes.
    """
    if torch.compiler.is_exporting():
        return "an exported program takes any number of tokens"
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
    codes, scales, native = native_operands(weight.contiguous(), contiguous(scales))
    block = 8 if tokens <= 8 or FEW_MEAN_ROWS * num_experts >= R else 16
    tile = _tile(four_bits, tokens, K)
    step = tile.parts * tile.step
    code_bytes = step * tile.channels * codes.element_size() // (2 if four_bits else 1)
    stages = pipeline_stages(x.device, tile.stages, code_bytes + step * block * x.element_size())
    by_expert = num_experts < R and tokens > 1
    places, tiles = num_experts if by_expert else R, -(-M // tile.channels)
    programs = -(-tiles // max(places * tiles // (WARPS // tile.warps * num_sms(x.device)), 1))
    _expert_rows_kernel[(places * programs,)](
        x, x.stride(0), experts.contiguous(), codes, scales, contiguous(bias),
        *glu_numbers(gate_multiplier, down_multiplier, limit, up_offset), y, R, M, K, num_groups(K), -(-K // step),
        R // N, programs, KIND=kind, NATIVE=native, ACTIVATION=activation, ONE=tokens == 1, BY_EXPERT=by_expert,
        WHOLE=K % step == 0, BLOCK_R=power_of_2_above(R), BLOCK_M=block, BLOCK_N=tile.channels, PARTS=tile.parts,
        STEP=tile.step, STAGES=stages, num_warps=tile.warps, num_stages=stages,
    )  # fmt: skip
    return y


def _tile(four_bits: bool, tokens: int, inputs: int) -> Tile:
    """Tuned on an H200. The conversion of codes of four bits binds the kernel, and takes the fewest instructions where
    one warp has many channels; one token has too few tiles for that. Short rows are divided among fewer parts."""
    if not four_bits:
        return Tile(32, 2, 2, GROUP, 4)
    return Tile(32, 1, 1, GROUP, 4) if tokens > 1 else Tile(16, 2, 2 if inputs <= 8 * GROUP else 4, GROUP, 4)


@kernel
def _expert_rows_kernel(
    x, x_row, experts, codes, scales, bias, gate_multiplier, down_multiplier, limit, up_offset, y,
    R, N, K, G, steps, copies, programs, KIND: tl.constexpr, NATIVE: tl.constexpr, ACTIVATION: tl.constexpr,
    ONE: tl.constexpr, BY_EXPERT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`programs` programs take turns at the tiles of channels of an expert: with BY_EXPERT of each expert, else of the
    expert of each row, where only the first row of an expert has work. ONE: there is one token, and each row has
    programs of its own."""
    place = tl.program_id(0) // programs
    m = tl.arange(0, BLOCK_M)
    expert, count = place, 1
    if not BY_EXPERT:
        expert = tl.load(experts + place).to(tl.int32)
    if ONE:
        x += (place // copies).to(tl.int64) * x_row
    else:
        number = tl.arange(0, BLOCK_R)
        own = tl.load(experts + number, mask=number < R, other=-1).to(tl.int32) == expert
        until = tl.cumsum(own.to(tl.int32), 0)  # the expert's rows up to each row
        count = tl.sum(own.to(tl.int32), 0)
        if not BY_EXPERT:
            count = tl.where(tl.min(tl.where(own, number, BLOCK_R), 0) == place, count, 0)
    for start in range(0, count, BLOCK_M):
        row, there = m + place, start + m < count
        if not ONE:
            row = tl.sum((until[None, :] <= (start + m)[:, None]).to(tl.int32), 1)  # BLOCK_R if there is none
        rows = (row // copies).to(tl.int64) * x_row
        for first in range(tl.program_id(0) % programs * BLOCK_N, N, programs * BLOCK_N):
            channel = expert.to(tl.int64) * N + tl.minimum(first + tl.arange(0, BLOCK_N), N - 1)
            result = few_rows_product(
                x, rows, there, codes, scales, channel, K, G, steps,
                KIND, NATIVE, ONE, WHOLE, BLOCK_M, BLOCK_N, PARTS, STEP, STAGES,
            )  # fmt: skip
            few_rows_store(
                result, y, row, there, bias, channel, gate_multiplier, down_multiplier, limit, up_offset, first, N,
                ACTIVATION, BLOCK_M, BLOCK_N,
            )  # fmt: skip
