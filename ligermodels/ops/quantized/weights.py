"""Weights of linear layers in 8 or 4 bits: formats, quantisation and dequantisation.

"float8": E4M3 with one float32 scale per output channel, the channel's largest magnitude / 448. `codes` are float8
(N, K), `scales` (N,).

"int4": integers q from -8 to 7 with one float32 scale per group of 128 inputs of an output channel, the group's largest
magnitude / 7.5. If K is not a multiple of 128, the last group is filled up with q = 0. With G = ceil(K / 128) groups,
`scales` are (N, G) and `codes` uint8 (N, 64 G). In byte j of a group, the low four bits are q + 8 for input j of the
group, the high four bits are q + 8 for input 64 + j. So the low halves of a group's bytes are its first 64 inputs in
order, the high halves its last 64, and a kernel multiplies both without exchanging elements between threads.

Rounding is to nearest, so the error of an element is at most half the distance between neighbouring codes.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.arguments import QuantizedFormat, check_count, check_format
from ligermodels.errors import InputError
from ligermodels.ops.runtime.tensors import check_tensor

GROUP = 128
"""Inputs that share a scale in int4."""
BYTES = 64
"""Bytes of codes per group in int4."""
_CHUNK_ELEMENTS = 2**22
"""Elements that are held as float32 at once."""
_TINY = torch.finfo(torch.float32).tiny
_E4M3 = torch.float8_e4m3fn


class QuantizedWeight(NamedTuple):
    """Codes and scales of a weight (N, K): float8 (N, K) and float32 (N,), or for int4 uint8 (N, 64 G) and float32 (N,
    G) with G = ceil(K / 128)."""

    codes: Tensor
    scales: Tensor


def empty_quantized(
    kind: QuantizedFormat, out_features: int, in_features: int, device: torch.device
) -> QuantizedWeight:
    """Uninitialised codes and scales of a weight.

    Args:
        kind: "float8" or "int4".
        out_features: number N of output channels.
        in_features: number K of inputs.
        device: device of both tensors.

    Returns:
        Codes and scales for a weight (N, K).

    Raises:
        InputError: unknown `kind`.
    """
    check_format("kind", kind)
    if kind == "float8":
        codes, scales = torch.empty(out_features, in_features, dtype=_E4M3, device=device), (out_features,)
        return QuantizedWeight(codes, torch.empty(scales, dtype=torch.float32, device=device))
    groups = num_groups(in_features)
    codes = torch.empty(out_features, groups * BYTES, dtype=torch.uint8, device=device)
    return QuantizedWeight(codes, torch.empty(out_features, groups, dtype=torch.float32, device=device))


def num_groups(in_features: int) -> int:
    """Number of groups per output channel in int4."""
    return -(-in_features // GROUP)


def check_quantized(op: str, codes: Tensor, scales: Tensor, in_features: int, device: torch.device) -> None:
    """Raises InputError, naming `op` and the tensor, unless codes and scales belong to a weight (N, in_features) and
    are on `device`."""
    if codes.dtype == _E4M3:
        check_tensor(op, "codes", codes, ("N", in_features), device, _E4M3)
        check_tensor(op, "scales", scales, (codes.shape[0],), device, torch.float32)
    else:
        groups = num_groups(in_features)
        check_tensor(op, "codes", codes, ("N", groups * BYTES), device, torch.uint8)
        check_tensor(op, "scales", scales, (codes.shape[0], groups), device, torch.float32)


@torch.no_grad()
def quantize_weight(weight: Tensor, kind: QuantizedFormat) -> QuantizedWeight:
    """Quantises a weight on its device. Only a few rows at a time are held as float32.

    Args:
        weight: (N, K), any floating dtype. On the meta device nothing is computed.
        kind: "float8" or "int4".

    Returns:
        Codes and scales, see `QuantizedWeight`.

    Raises:
        InputError: unknown `kind`, another shape or dtype, or values that are not finite in float32.
    """
    check_format("kind", kind)
    if weight.ndim != 2 or not weight.is_floating_point() or 0 in weight.shape:
        raise InputError(
            f"quantize_weight: weight must be floating, of shape (N, K); got {weight.dtype} {tuple(weight.shape)}"
        )
    quantized = empty_quantized(kind, weight.shape[0], weight.shape[1], weight.device)
    if weight.is_meta:
        return quantized
    finite = torch.ones((), dtype=torch.bool, device=weight.device)
    for rows in _rows(weight):
        values = weight[rows].float()
        codes, scales = _to_float8(values) if kind == "float8" else _to_int4(values)
        finite &= scales.isfinite().all()
        quantized.codes[rows], quantized.scales[rows] = codes, scales
    if not finite:
        raise InputError("quantize_weight: weight has values that are not finite in float32; replace them first")
    return quantized


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
    wide = torch.promote_types(dtype, torch.float32)
    if codes.dtype == _E4M3:
        return (codes.to(wide) * scales[:, None].to(wide)).to(dtype)
    pairs = codes.unflatten(1, (-1, BYTES))
    q = torch.cat((pairs & 15, pairs >> 4), dim=2)
    return ((q.to(wide) - 8) * scales[..., None].to(wide)).flatten(1)[:, :in_features].to(dtype)


def _to_float8(values: Tensor) -> tuple[Tensor, Tensor]:
    scales = (values.abs().amax(1) / torch.finfo(_E4M3).max).clamp(min=_TINY)
    return (values / scales[:, None]).to(_E4M3), scales


def _to_int4(values: Tensor) -> tuple[Tensor, Tensor]:
    short_of = -values.shape[1] % GROUP
    groups = torch.nn.functional.pad(values, (0, short_of)).unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2) / 7.5).clamp(min=_TINY)
    q = (groups / scales[..., None]).round().clamp(-8, 7).to(torch.int8) + 8
    low, high = q.to(torch.uint8).unflatten(2, (2, BYTES)).unbind(2)
    return (low | high << 4).flatten(1), scales


def _rows(weight: Tensor) -> Iterator[slice]:
    count = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    return (slice(first, first + count) for first in range(0, weight.shape[0], count))
