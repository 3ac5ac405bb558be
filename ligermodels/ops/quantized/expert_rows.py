"""Products of experts for the few tokens of a decoding step: no weight of an expert without tokens is read, and the
weights of the others are read once for each tile of 8 or 16 rows, all tiles of an expert by the same program.

Rows stay in the order of the tokens and their choices, and nothing waits for the device. Where there are more rows than
experts, a kernel lists the rows of each expert; of fewer rows, the first program that meets an expert finds them among
all. Tiles, formats and the product itself are those of `few_rows`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.ops.glu.glu import GLUOptions, glu_numbers
from ligermodels.ops.quantized.few_rows import Tile, few_rows_product, few_rows_store
from ligermodels.ops.quantized.unpack import native_operands
from ligermodels.ops.quantized.weights import GROUP, format_of, num_groups
from ligermodels.ops.runtime.devices import gpu_of, pipeline_stages, power_of_2_above
from ligermodels.ops.runtime.dispatch import tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel, wait_for_previous
from ligermodels.ops.runtime.library import custom_op, is_fake
from ligermodels.ops.runtime.tensors import as_rows, contiguous

MAX_ROWS = 8192
"""Most rows, which a program of the kernel that lists them holds in its registers."""
MEAN_ROWS = 64
"""Most rows per expert of a quantised model. Above, a grouped product of dequantised weights is faster."""
PLAIN_MEAN_ROWS = 16
"""The same of plain weights, which the grouped product reads as they are."""
FEW_MEAN_ROWS = 4
"""Up to this number of rows per expert, tiles have 8 rows: few experts have more, which read their weights twice."""


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
    is_plain = all(weight.dtype == x.dtype for weight in weights)
    gpu, most = gpu_of(x.device), min(MAX_ROWS, (PLAIN_MEAN_ROWS if is_plain else MEAN_ROWS) * num_experts)
    if rows > most:
        return f"{rows} choices of experts are more than {most}"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bfloat16 and float16"
    if not use_kernels(x, *weights) or x.is_meta:
        return "its kernels need triton and CUDA tensors"
    if gpu is not None and not gpu.has_bfloat16:
        return f"{gpu.name} has no tensor cores for bfloat16"
    return None


class ExpertRows(NamedTuple):
    """The rows of each expert.

    experts: int32 or int64 (R,) in [0, E), the expert of each row.
    is_one: whether the rows are those of one token, with other experts each.
    rows: int32 (E, R), the rows of each expert, and then anything; None where programs find them.
    counts: int32 (E,), the number of rows of each expert, or None.
    """

    experts: Tensor
    is_one: bool
    rows: Tensor | None = None
    counts: Tensor | None = None

    @classmethod
    def of(cls, experts: Tensor, num_experts: int) -> "ExpertRows":
        """The rows of each expert, listed where it is worth a kernel.

        Args:
            experts: int32 or int64 (N, k) in [0, E), the experts of each token; N * k is at most MAX_ROWS.
            num_experts: number E of experts.
        """
        own, is_one = experts.flatten(), len(experts) == 1
        listed = len(own) > num_experts and not is_one
        return cls(own, is_one, *_rows_of_experts(own, num_experts)) if listed else cls(own, is_one)


@custom_op()
def _rows_of_experts(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """`rows` and `counts` of `ExpertRows`."""
    (R,) = experts.shape
    rows = experts.new_empty(num_experts, R, dtype=torch.int32)
    counts = experts.new_empty(num_experts, dtype=torch.int32)
    if not is_fake(experts):
        block = power_of_2_above(R)
        _list_kernel[(num_experts,)](
            experts.contiguous(), rows, counts, R, BLOCK=block, num_warps=4 if block <= 1024 else 8
        )
    return rows, counts


@kernel
def _list_kernel(experts, rows, counts, R, BLOCK: tl.constexpr, PDL: tl.constexpr = False):
    """A program per expert."""
    wait_for_previous(PDL)
    expert, number = tl.program_id(0), tl.arange(0, BLOCK)
    own = tl.load(experts + number, mask=number < R, other=-1).to(tl.int32) == expert
    until = tl.cumsum(own.to(tl.int32), 0)  # the expert's rows up to each row
    tl.store(rows + expert * R + until - 1, number, mask=own)
    tl.store(counts + expert, tl.sum(own.to(tl.int32), 0))


def expert_rows(
    x: Tensor, rows: ExpertRows, weight: Tensor, scales: Tensor | None, bias: Tensor | None, num_experts: int,
    gated: GLUOptions | None = None,
) -> Tensor:  # fmt: skip
    """y[r] = weight[experts[r]] x[r // copies] + bias[experts[r]], and perhaps a gated activation, without gradients.

    With an activation, the product is first rounded to the dtype of x, as if it were written.

    Args:
        x: (N, K), bfloat16 or float16.
        rows: the R rows of the experts; R = N * copies.
        weight: a plain weight (E * M, K) of x's dtype; or the codes of a quantised one.
        scales: scales of the codes; None for a plain weight.
        bias: (E, M), of x's dtype, or None.
        num_experts: number E of experts.
        gated: a gated activation of pairs of channels, or None.

    Returns:
        (R, M), or (R, M / 2) with an activation, of x's dtype.
    """
    y: Tensor = _expert_rows(x, *rows, weight, scales, bias, num_experts, *(gated or GLUOptions("")))
    return y


@custom_op()
def _expert_rows(
    x: Tensor, experts: Tensor, is_one: bool, listed: Tensor | None, counts: Tensor | None, weight: Tensor,
    scales: Tensor | None, bias: Tensor | None, num_experts: int, activation: str, gate_multiplier: float,
    down_multiplier: float, limit: float | None, up_offset: float,
) -> Tensor:  # fmt: skip
    (R,), (N, K), M = experts.shape, x.shape, weight.shape[0] // num_experts
    y = x.new_empty(R, M // 2 if activation else M)
    if is_fake(x) or not R:
        return y
    x = as_rows(x)
    kind = "plain" if scales is None else format_of(weight, scales)
    four_bits = weight.dtype == torch.uint8
    codes, scales, native = native_operands(weight.contiguous(), contiguous(scales))
    block = 8 if FEW_MEAN_ROWS * num_experts >= R else 16
    tile = _tile(kind, is_one, K, block)
    step = tile.parts * tile.step
    code_bytes = step * tile.channels * codes.element_size() // (2 if four_bits else 1)
    stages = pipeline_stages(x.device, tile.stages, code_bytes + step * block * x.element_size())
    tiles = -(-M // tile.channels)
    _expert_rows_kernel[((R if listed is None else num_experts) * tiles,)](
        x, x.stride(0), experts.contiguous(), listed, counts, codes, scales, contiguous(bias),
        *glu_numbers(gate_multiplier, down_multiplier, limit, up_offset), y, R, M, K, num_groups(K), -(-K // step),
        R // N, tiles, KIND=kind, NATIVE=native, ACTIVATION=activation, ONE=is_one, WHOLE=K % step == 0,
        BLOCK_R=power_of_2_above(R) if listed is None else 1, BLOCK_M=block, BLOCK_N=tile.channels, PARTS=tile.parts,
        STEP=tile.step, STAGES=stages, num_warps=tile.warps, num_stages=stages,
    )  # fmt: skip
    return y


def _tile(kind: str, is_one: bool, inputs: int, rows: int) -> Tile:
    """Tuned on an H200, for tiles of `rows` rows. The conversion of codes of four bits binds the kernel, and takes the
    fewest instructions where one warp has many channels; one token has too few tiles for that. Short rows are divided
    among fewer parts. More steps in flight help int4 while they leave room for as many programs, and not mxfp4, which
    takes more registers."""
    if kind in ("plain", "float8"):
        return Tile(32, 2, 2, GROUP, 4)
    if is_one:
        return Tile(16, 2, 2 if inputs <= 8 * GROUP else 4, GROUP, 4)
    stages = 3 if kind == "mxfp4" else 6 if kind == "int4" and rows == 8 and inputs >= 16 * GROUP else 4
    return Tile(32, 1, 1, GROUP, stages)


@kernel
def _expert_rows_kernel(
    x, x_row, experts, listed, counts, codes, scales, bias, gate_multiplier, down_multiplier, limit, up_offset, y,
    R, N, K, G, steps, copies, tiles, KIND: tl.constexpr, NATIVE: tl.constexpr, ACTIVATION: tl.constexpr,
    ONE: tl.constexpr, WHOLE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """A program for each tile of channels of an expert: of each expert, if its rows are listed; else of the expert of
    each row, where only the first row of an expert has work. ONE: each row is computed by itself."""
    wait_for_previous(PDL)
    place, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BLOCK_N
    m = tl.arange(0, BLOCK_M)
    expert, count = place, 1
    if listed is None:
        expert = tl.load(experts + place).to(tl.int32)
    else:
        count = tl.load(counts + expert)
    if ONE:
        x += (place // copies).to(tl.int64) * x_row
    elif listed is None:
        number = tl.arange(0, BLOCK_R)
        own = tl.load(experts + number, mask=number < R, other=-1).to(tl.int32) == expert
        until = tl.cumsum(own.to(tl.int32), 0)  # the expert's rows up to each row
        is_first = tl.min(tl.where(own, number, BLOCK_R), 0) == place
        count = tl.where(is_first, tl.sum(own.to(tl.int32), 0), 0)
    channel = expert.to(tl.int64) * N + tl.minimum(first + tl.arange(0, BLOCK_N), N - 1)
    for start in range(0, count, BLOCK_M):
        row, there = m + place, start + m < count
        if listed is not None:
            row = tl.where(there, tl.load(listed + expert * R + start + m, mask=start + m < R, other=0), 0)
        elif not ONE:
            row = tl.sum((until[None, :] <= (start + m)[:, None]).to(tl.int32), 1)  # BLOCK_R if there is none
        result = few_rows_product(
            x, (row // copies).to(tl.int64) * x_row, there, codes, scales, channel, K, G, steps,
            KIND, NATIVE, ONE, WHOLE, BLOCK_M, BLOCK_N, PARTS, STEP, STAGES,
        )  # fmt: skip
        few_rows_store(
            result, y, row, there, bias, channel, gate_multiplier, down_multiplier, limit, up_offset, first, N,
            ACTIVATION, BLOCK_M, BLOCK_N,
        )  # fmt: skip
