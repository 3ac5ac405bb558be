"""The plain weight of codes and scales. One kernel reads the codes and writes the weight; torch would write several
intermediate tensors in float32."""

import torch
from torch import Tensor

from ligermodels.arguments import check_count
from ligermodels.errors import InputError
from ligermodels.ops.quantized.unpack import float8_values, mxfp4_numbers, mxfp4_scales, native_operands, nf4_levels
from ligermodels.ops.quantized.weights import (
    BYTES,
    E4M3,
    FP4_BLOCK,
    FP4_LEVELS,
    NF4_LEVELS,
    check_quantized,
    format_of,
    num_groups,
)
from ligermodels.ops.runtime.dispatch import tl, triton, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_fake

GROUPS = 16
"""Groups per program."""


def dequantize_weight(codes: Tensor, scales: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    """The weight of codes and scales: code * scale in float32, rounded to `dtype`.

    Args:
        codes: codes from `quantize_weight`, all of them, or those of some rows or of some groups of each row.
        scales: the scales of these codes.
        in_features: number K of inputs that the codes cover.
        dtype: floating dtype of the result.

    Returns:
        (N, K), of `dtype`.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or `dtype` is not floating.
    """
    check_quantized("dequantize_weight", codes, scales, check_count("in_features", in_features), codes.device)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError(f"dequantize_weight: dtype must be a floating torch.dtype, got {dtype!r}")
    return dequantize_rows(codes, scales, in_features, dtype)


def dequantize_rows(codes: Tensor, scales: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    """`dequantize_weight` without its checks, also of some rows of each expert, which are read where they are.

    Args:
        codes: views (N, ...) or (E, N, ...) of codes.
        scales: views of the scales of these codes.
        in_features: number K of inputs that the codes cover.
        dtype: floating dtype of the result.

    Returns:
        (N, K) or (E, N, K), of `dtype`.
    """
    if dtype.itemsize in (2, 4) and use_kernels(codes, scales):
        weight: Tensor = _dequantize_weight(codes, scales, in_features, dtype)
        return weight
    return dequantize_weight_reference(codes, scales, in_features, dtype)


def dequantize_weight_reference(codes: Tensor, scales: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    """The specification of `dequantize_weight`, in plain torch.

    Args:
        codes: codes of the weight, or of weights (E, N, K).
        scales: scales of the codes.
        in_features: number K of inputs.
        dtype: floating dtype of the result.
    """
    wide = torch.promote_types(dtype, torch.float32)
    if codes.dtype == E4M3:
        return (codes.to(wide) * scales[..., None].to(wide)).to(dtype)
    pairs = codes.unflatten(-1, (-1, BYTES))
    q = torch.stack((pairs & 15, pairs >> 4), dim=-2)  # (..., N, G, 2, 64)
    if format_of(codes, scales) == "int4":
        values = (q.to(wide) - 8) * scales[..., None, None].to(wide)
    else:
        levels = NF4_LEVELS if scales.dtype != torch.uint8 else FP4_LEVELS
        if scales.dtype == torch.uint8:
            scales = torch.ldexp(torch.ones_like(scales, dtype=wide), scales.int() - 127)
            scales = scales.repeat_interleave(FP4_BLOCK, -1).unflatten(-1, (2, BYTES))
        else:
            scales = scales[..., None].to(wide)
        values = torch.tensor(levels, dtype=wide, device=codes.device)[q.int()] * scales
    return values.flatten(-3)[..., :in_features].to(dtype)


@custom_op()
def _dequantize_weight(codes: Tensor, scales: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    """codes (..., N, 64 G) of 4 bits, or (..., N, in_features) of 8 -> (..., N, in_features)."""
    weight = torch.empty(*codes.shape[:-1], in_features, dtype=dtype, device=codes.device)
    if is_fake(codes) or weight.numel() == 0:
        return weight
    row = codes.ndim - 2  # the dimension of rows; that of experts, if there is one, is 0
    codes = codes if codes.stride(-1) == 1 else codes.contiguous()
    scales = scales if scales[(0,) * (row + 1)].is_contiguous() else scales.contiguous()
    rows, groups, kind, native = codes.shape[row], num_groups(in_features), format_of(codes, scales), True
    if kind == "float8":
        codes, _, native = native_operands(codes, None)
    _dequantize_kernel[(-(-rows * groups // GROUPS), codes.shape[:row].numel())](
        codes, codes.stride(0), codes.stride(row), scales, scales.stride(0), scales.stride(row), weight, rows,
        in_features, groups, KIND=kind, NATIVE=native, GROUPS=GROUPS, num_warps=4,
    )  # fmt: skip
    return weight


@kernel
def _dequantize_kernel(
    codes, code_expert, code_row, scales, scale_expert, scale_row, weight, N, K, G,
    KIND: tl.constexpr, NATIVE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Some groups of 128 inputs of an expert per program, counted row by row. NATIVE: see `unpack`."""
    expert = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)[:, None]
    row, group = (place // G).to(tl.int64), place % G
    there = row < N
    codes += expert * code_expert + row * code_row
    scales += expert * scale_expert + row * scale_row
    weight += (expert * N + row) * K
    if KIND == "float8":
        k = group * 128 + tl.arange(0, 128)[None, :]
        q = tl.load(codes + k, mask=there & (k < K), other=0.0)
        values = float8_values(q, tl.float32, NATIVE) * tl.load(scales, mask=there, other=0.0)
        tl.store(weight + k, values.to(weight.dtype.element_ty), mask=there & (k < K))
    else:
        k = group * 128 + tl.arange(0, 64)[None, :]
        low, high = _two_halves(codes, scales, group, there, KIND)
        tl.store(weight + k, low.to(weight.dtype.element_ty), mask=there & (k < K))
        tl.store(weight + k + 64, high.to(weight.dtype.element_ty), mask=there & (k + 64 < K))


@triton.jit
def _two_halves(codes, scales, group, there, KIND: tl.constexpr):
    """The first and the last 64 numbers of groups of four bits, in float32. codes and scales point to rows."""
    byte = tl.arange(0, 64)[None, :]
    q = tl.load(codes + group * 64 + byte, mask=there, other=0)
    if KIND == "int4":
        scale = tl.load(scales + group, mask=there, other=0.0)
        scale_high = scale
        low, high = (q & 15).to(tl.float32) - 8, (q >> 4).to(tl.float32) - 8
    elif KIND == "mxfp4":
        scale = mxfp4_scales(tl.load(scales + 4 * group + byte // 32, mask=there, other=0), 0)
        scale_high = mxfp4_scales(tl.load(scales + 4 * group + 2 + byte // 32, mask=there, other=0), 0)
        low, high = mxfp4_numbers(q & 15), mxfp4_numbers(q >> 4)
    else:
        scale = tl.load(scales + 2 * group, mask=there, other=0.0)
        scale_high = tl.load(scales + 2 * group + 1, mask=there, other=0.0)
        low, high = nf4_levels(q & 15), nf4_levels(q >> 4)
    return low * scale, high * scale_high
