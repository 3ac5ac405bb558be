"""Weights of linear layers in 8 or 4 bits: formats, rounding, and back.

"float8": E4M3 with one float32 scale for each output channel, its largest magnitude / 448. `codes` are float8 (N, K),
`scales` (N,).

"int4": integers q from -8 to 7 with one float32 scale for each 128 inputs of an output channel, their largest
magnitude / 7.5. Where K is no multiple of 128 the last group is short, and q is 0 for what it lacks. With
G = ceil(K / 128) groups, `scales` are (N, G) and `codes` uint8 (N, 64 G): of byte j of a group the low four bits are
q + 8 of its input j, the high ones of its input 64 + j. So the bytes of a group are its first 64 inputs in a row, and
its last 64, which a kernel multiplies without exchanging elements between threads.

Rounding is to nearest, so that no element is off by more than half the distance between its neighbours.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.arguments import Quantized, check_count, check_format
from ligermodels.errors import InputError
from ligermodels.ops.runtime.tensors import check_tensor

GROUP = 128
"""Inputs that share a scale in int4."""
BYTES = 64
"""Of the codes of a group."""
_AT_A_TIME = 2**22
"""Elements that are float32 at a time."""
_TINY = torch.finfo(torch.float32).tiny
_E4M3 = torch.float8_e4m3fn


class QuantizedWeight(NamedTuple):
    """See the module's docstring."""

    codes: Tensor
    scales: Tensor


def empty_quantized(kind: Quantized, out_features: int, in_features: int, device: torch.device) -> QuantizedWeight:
    """Codes and scales of a weight (out_features, in_features), not filled."""
    check_format("kind", kind)
    if kind == "float8":
        codes, scales = torch.empty(out_features, in_features, dtype=_E4M3, device=device), (out_features,)
        return QuantizedWeight(codes, torch.empty(scales, dtype=torch.float32, device=device))
    groups = num_groups(in_features)
    codes = torch.empty(out_features, groups * BYTES, dtype=torch.uint8, device=device)
    return QuantizedWeight(codes, torch.empty(out_features, groups, dtype=torch.float32, device=device))


def num_groups(in_features: int) -> int:
    """Groups of an output channel in int4."""
    return -(-in_features // GROUP)


def check_quantized(op: str, codes: Tensor, scales: Tensor, in_features: int, device: torch.device) -> None:
    """InputError, naming op and tensor, unless codes and scales are those of a weight (N, in_features) on `device`."""
    if codes.dtype == _E4M3:
        check_tensor(op, "codes", codes, ("N", in_features), device, _E4M3)
        check_tensor(op, "scales", scales, (codes.shape[0],), device, torch.float32)
    else:
        groups = num_groups(in_features)
        check_tensor(op, "codes", codes, ("N", groups * BYTES), device, torch.uint8)
        check_tensor(op, "scales", scales, (codes.shape[0], groups), device, torch.float32)


@torch.no_grad()
def quantize_weight(weight: Tensor, kind: Quantized) -> QuantizedWeight:
    """weight (N, K), any floating dtype, rounded to `kind`, on its device; a few rows at a time are float32.

    Raises InputError for an unknown format, another shape or dtype, or values that are not finite in float32. On the
    meta device nothing is computed.
    """
    check_format("kind", kind)
    if weight.ndim != 2 or not weight.is_floating_point() or 0 in weight.shape:
        raise InputError(
            f"quantize_weight: weight must be floating, of shape (N, K); got {weight.dtype} {tuple(weight.shape)}"
        )
    found = empty_quantized(kind, weight.shape[0], weight.shape[1], weight.device)
    if weight.is_meta:
        return found
    finite = torch.ones((), dtype=torch.bool, device=weight.device)
    for rows in _rows(weight):
        values = weight[rows].float()
        codes, scales = _to_float8(values) if kind == "float8" else _to_int4(values)
        finite &= scales.isfinite().all()
        found.codes[rows], found.scales[rows] = codes, scales
    if not finite:
        raise InputError("quantize_weight: weight has values that are not finite in float32")
    return found


def dequantize_weight(codes: Tensor, scales: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    """The weight (N, in_features) that `quantize_weight` has rounded: code * scale in float32, rounded to `dtype`.

    Codes and scales may be those of some of the rows, or of some of the groups in a row (`in_features` being theirs).
    Raises InputError if shapes, dtypes or devices do not fit, or `dtype` is not floating.
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
    count = max(1, _AT_A_TIME // weight.shape[1])
    return (slice(first, first + count) for first in range(0, weight.shape[0], count))
