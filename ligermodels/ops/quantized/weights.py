"""Weights of linear layers in 8 or 4 bits: formats and quantisation.

"float8": E4M3 with one float32 scale per output channel, the channel's largest magnitude / 448. `codes` are float8
(N, K), `scales` (N,).

"int4": integers q from -8 to 7 with one float32 scale per group of 128 inputs of an output channel, the group's largest
magnitude / 7.5. If K is not a multiple of 128, the last group is filled up with q = 0. With G = ceil(K / 128) groups,
`scales` are (N, G) and `codes` uint8 (N, 64 G). In byte j of a group, the low four bits are q + 8 for input j of the
group, the high four bits are q + 8 for input 64 + j. So the low halves of a group's bytes are its first 64 inputs in
order, the high halves its last 64, and a kernel multiplies both without exchanging elements between threads.

"nf4": the 16 levels of QLoRA's NormalFloat (https://arxiv.org/abs/2305.14314, appendix E), as bitsandbytes stores them,
with one float32 scale per block of 64 inputs of an output channel, the block's largest magnitude. `codes` have the
layout of int4, with indices of levels in place of q + 8: a byte's low four bits belong to the first block of a group,
its high four bits to the second. `scales` are (N, G, 2). If K is a multiple of 64, bitsandbytes computes the same codes
and scales; otherwise the last block of each row is filled up with the level 0.

"mxfp4": the OCP's microscaling format (https://arxiv.org/abs/2310.10537), as gpt-oss stores it: E2M1 numbers with one
power of two per block of 32 inputs, whose exponent plus 127 is a byte. `codes` have the layout of int4, with the bits
of E2M1. `scales` are uint8 (N, G, 4), two for the low and two for the high four bits of a group; the last blocks of a
row are filled up with zeros.

Rounding is to nearest, so the error of an element is at most half the distance between neighbouring codes.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.arguments import QuantizedFormat, check_format
from ligermodels.errors import InputError
from ligermodels.ops.runtime.checks import check_tensor

GROUP = 128
"""Inputs of a group: in int4 they share a scale, in nf4 they are two blocks, in mxfp4 four."""
BYTES = 64
"""Bytes of codes per group in int4, nf4 and mxfp4."""
BLOCK = 64
"""Inputs that share a scale in nf4."""
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The level of each code in nf4; all are exact in float32."""
FP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number of each code of E2M1."""
FP4_BLOCK = 32
"""Inputs that share a scale in mxfp4."""
_CHUNK_ELEMENTS = 2**22
"""Elements that are held as float32 at once."""
_TINY = torch.finfo(torch.float32).tiny
E4M3 = torch.float8_e4m3fn


class QuantizedWeight(NamedTuple):
    """Codes and scales of a weight (N, K). float8: float8 (N, K) and float32 (N,). With G = ceil(K / 128), int4: uint8
    (N, 64 G) and float32 (N, G); nf4: uint8 (N, 64 G) and float32 (N, G, 2); mxfp4: uint8 (N, 64 G) and (N, G, 4)."""

    codes: Tensor
    scales: Tensor


_PER_GROUP = {"int4": (), "nf4": (GROUP // BLOCK,), "mxfp4": (GROUP // FP4_BLOCK,)}
"""Format -> the last dimension of scales (N, G, ...)."""


def _scales(kind: QuantizedFormat) -> torch.dtype:
    return torch.uint8 if kind == "mxfp4" else torch.float32


def empty_quantized(
    kind: QuantizedFormat, out_features: int, in_features: int, device: torch.device
) -> QuantizedWeight:
    """Uninitialised codes and scales of a weight.

    Args:
        kind: "float8", "int4", "nf4" or "mxfp4".
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
        codes, scales = torch.empty(out_features, in_features, dtype=E4M3, device=device), (out_features,)
        return QuantizedWeight(codes, torch.empty(scales, dtype=torch.float32, device=device))
    groups = num_groups(in_features)
    codes = torch.empty(out_features, groups * BYTES, dtype=torch.uint8, device=device)
    sizes = out_features, groups, *_PER_GROUP[kind]
    return QuantizedWeight(codes, torch.empty(sizes, dtype=_scales(kind), device=device))


def num_groups(in_features: int) -> int:
    """Number of groups per output channel in the formats of 4 bits."""
    return -(-in_features // GROUP)


def format_of(codes: Tensor, scales: Tensor) -> QuantizedFormat:
    """The format of codes (..., N, K or 64 G) and their scales."""
    if codes.dtype == E4M3:
        return "float8"
    if scales.dtype == torch.uint8:
        return "mxfp4"
    return "nf4" if scales.ndim > codes.ndim else "int4"


def columns_of(codes: Tensor, scales: Tensor, columns: slice) -> QuantizedWeight:
    """Views of the codes and scales of some inputs, which begin at a multiple of GROUP."""
    if codes.dtype == E4M3:
        return QuantizedWeight(codes[:, columns], scales)
    first, last = columns.start // GROUP, num_groups(columns.stop)
    return QuantizedWeight(codes[:, first * BYTES : last * BYTES], scales[:, first:last])


def pieces(size: int, others: int, unit: int, most: int) -> Iterator[slice]:
    """Divide `size` into slices of whole units, each of at most `most` elements with `others` elements beside it."""
    step = max(1, most // (max(1, others) * unit)) * unit
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def check_quantized(op: str, codes: Tensor, scales: Tensor, in_features: int, device: torch.device) -> None:
    """Raises InputError, naming `op` and the tensor, unless codes and scales belong to a weight (N, in_features) and
    are on `device`."""
    kind = format_of(codes, scales)
    if kind == "float8":
        check_tensor(op, "codes", codes, ("N", in_features), device, E4M3)
        check_tensor(op, "scales", scales, (codes.shape[0],), device, torch.float32)
    else:
        groups = num_groups(in_features)
        check_tensor(op, "codes", codes, ("N", groups * BYTES), device, torch.uint8)
        check_tensor(op, "scales", scales, (codes.shape[0], groups, *_PER_GROUP[kind]), device, _scales(kind))


@torch.no_grad()
def quantize_weight(weight: Tensor, kind: QuantizedFormat) -> QuantizedWeight:
    """Quantises a weight on its device. Only a few rows at a time are held as float32.

    Args:
        weight: (N, K), any floating dtype. On the meta device nothing is computed.
        kind: "float8", "int4", "nf4" or "mxfp4".

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
        codes, scales = _ROUND[kind](values)
        finite &= values.isfinite().all()
        quantized.codes[rows], quantized.scales[rows] = codes, scales
    if not finite:
        raise InputError("quantize_weight: weight has values that are not finite in float32; replace them first")
    return quantized


def _to_float8(values: Tensor) -> tuple[Tensor, Tensor]:
    scales = (values.abs().amax(1) / torch.finfo(E4M3).max).clamp(min=_TINY)
    return (values / scales[:, None]).to(E4M3), scales


def _to_int4(values: Tensor) -> tuple[Tensor, Tensor]:
    groups = F.pad(values, (0, -values.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2) / 7.5).clamp(min=_TINY)
    q = (groups / scales[..., None]).round().clamp(-8, 7).to(torch.int8) + 8
    return _packed(q.to(torch.uint8).flatten(1)), scales


def _to_nf4(values: Tensor) -> tuple[Tensor, Tensor]:
    """As bitsandbytes rounds: by the products with 1 / scale, a product halfway between two levels to the lower one."""
    blocks = F.pad(values, (0, -values.shape[1] % GROUP)).unflatten(1, (-1, 2, BLOCK))
    scales = blocks.abs().amax(3)
    levels = torch.tensor(NF4_LEVELS, device=values.device)
    ratios = blocks * (1 / scales.clamp(min=1e-38))[..., None]
    q = torch.bucketize(ratios, (levels[:-1] + levels[1:]) / 2, out_int32=True)
    return _packed(q.to(torch.uint8).flatten(1)), scales


def _to_mxfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """The scale is that of OCP: the largest number is 2^(its exponent) times 1 to 2, 6 at most."""
    blocks = F.pad(values, (0, -values.shape[1] % GROUP)).unflatten(1, (-1, GROUP // FP4_BLOCK, FP4_BLOCK))
    largest = blocks.abs().amax(3)
    exponents = torch.where(largest > 0, torch.frexp(largest).exponent - 3, 0).clamp(-126, 127)
    ratios = torch.ldexp(blocks, -exponents[..., None])
    levels = torch.tensor(FP4_LEVELS[:8], device=values.device)
    bounds = (levels[:-1] + levels[1:]) / 2
    below, above = (torch.bucketize(ratios.abs(), bounds, right=right, out_int32=True) for right in (False, True))
    q = torch.where(below % 2 == 0, below, above) + 8 * ratios.signbit()  # halfway: to the even code
    return _packed(q.to(torch.uint8).flatten(1)), (exponents + 127).to(torch.uint8)


def pack_mxfp4(codes: Tensor, scales: Tensor) -> QuantizedWeight:
    """An mxfp4 weight from its codes and scales.

    Args:
        codes: (N, K), uint8, the bits of each element; K a multiple of 32.
        scales: (N, K / 32), uint8, of each block.
    """
    missing = -codes.shape[1] % GROUP
    scales = F.pad(scales, (0, missing // FP4_BLOCK), value=127).unflatten(1, (-1, GROUP // FP4_BLOCK))
    return QuantizedWeight(_packed(F.pad(codes, (0, missing))), scales)


def pack_nf4(levels: Tensor, scales: Tensor) -> QuantizedWeight:
    """An nf4 weight from its levels and scales.

    Args:
        levels: (N, K), uint8, the index of each element's level; K a multiple of 64.
        scales: (N, K / 64), float32, of each block.
    """
    missing = levels.shape[1] % GROUP // BLOCK  # blocks in the last group
    levels = F.pad(levels, (0, missing * BLOCK), value=NF4_LEVELS.index(0.0))
    return QuantizedWeight(_packed(levels), F.pad(scales, (0, missing)).unflatten(1, (-1, 2)))


def _packed(codes: Tensor) -> Tensor:
    """Codes of 4 bits, (N, 128 G), as bytes (N, 64 G)."""
    low, high = codes.unflatten(1, (-1, 2, BYTES)).unbind(2)
    return (low | high << 4).flatten(1)


_ROUND: dict[QuantizedFormat, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "float8": _to_float8,
    "int4": _to_int4,
    "nf4": _to_nf4,
    "mxfp4": _to_mxfp4,
}
"""Format -> the function that rounds rows in float32 to codes and scales."""


def _rows(weight: Tensor) -> Iterator[slice]:
    count = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    return (slice(first, first + count) for first in range(0, weight.shape[0], count))
