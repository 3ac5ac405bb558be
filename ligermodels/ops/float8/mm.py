"""Matrix product of two float8 operands, by torch's scaled matrix products (cuBLASLt)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.float8.scaling import ALIGNMENT, E4M3, E5M2
from ligermodels.ops.runtime.checks import check_tensor, check_tensors
from ligermodels.ops.runtime.library import custom_op, is_fake
from ligermodels.ops.runtime.tensors import without_autocast

OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of products."""


def float8_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    fast_accumulation: bool = True,
) -> Tensor:
    """(a * scale_a) (b * scale_b)^T + bias.

    Both operands are contiguous along the dimension that is summed over, the only layout in which Hopper's tensor cores
    read float8.

    Args:
        a: (M, K), float8, contiguous, K a multiple of 16.
        b: (N, K), float8, contiguous, N a multiple of 16. At least one of a and b is torch.float8_e4m3fn.
        scale_a: float32, of shape () or one scale per row, (M,).
        scale_b: float32, of shape ().
        out_dtype: torch.bfloat16, torch.float16 or torch.float32.
        bias: (N,), of out_dtype.
        fast_accumulation: sum in the tensor cores' registers, which have fewer bits than float32, instead of adding up
            in float32 at intervals.

    Returns:
        (M, N), of out_dtype.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or an operand is not contiguous.
    """
    _check(a, b, scale_a, scale_b, out_dtype, bias)
    return _float8_mm(a, b, scale_a, scale_b, bias, out_dtype, fast_accumulation)


def _check(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None) -> None:
    op = "float8_mm"
    check_tensors(op, a=a, scale_a=scale_a)
    check_tensor(op, "a", a, ("M", "K"), a.device, E4M3, E5M2)
    check_tensor(op, "b", b, ("N", a.shape[1]), a.device, E4M3, E5M2)
    check_tensor(op, "scale_a", scale_a, (a.shape[0],) if scale_a.dim() else (), a.device, torch.float32)
    check_tensor(op, "scale_b", scale_b, (), a.device, torch.float32)
    if a.shape[1] % ALIGNMENT or b.shape[0] % ALIGNMENT:
        raise InputError(
            f"{op}: a {tuple(a.shape)} and b {tuple(b.shape)} must be (M, K) and (N, K), K and N multiples of "
            f"{ALIGNMENT}"
        )
    if a.dtype == b.dtype == E5M2:
        raise InputError(f"{op}: a and b are both torch.float8_e5m2; one must be torch.float8_e4m3fn")
    if out_dtype not in OUTPUTS:
        raise InputError(f"{op}: out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    check_tensor(op, "bias", bias, b.shape[:1], a.device, out_dtype, optional=True)


def widens(b: Tensor) -> bool:
    """Whether a product by b (N, K) is at least as wide as its operand: activation checkpointing keeps those."""
    return b.shape[0] >= b.shape[1]


def float8_mm_reference(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """The specification of `float8_mm`, in plain torch, with the same arguments a, b, scale_a, scale_b, out_dtype and
    bias; sums are float32."""
    with without_autocast(a):
        y = (a.float() @ b.float().t()) * ((scale_a.unsqueeze(1) if scale_a.dim() else scale_a) * scale_b)
    return (y if bias is None else y + bias).to(out_dtype)


@custom_op(keep=lambda a, b, *_: widens(b))
def _float8_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:  # fmt: skip
    if is_fake(a):
        return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)
    if not (a.is_contiguous() and b.is_contiguous()):  # such as placeholders of a product that is not computed again
        raise InputError(f"float8_mm: a {tuple(a.shape)} and b {tuple(b.shape)} must be contiguous")
    if not a.is_cuda:
        return float8_mm_reference(a, b, scale_a, scale_b, out_dtype, bias)
    if not a.numel():
        return _plus(a.new_zeros(a.shape[0], b.shape[0], dtype=out_dtype), bias)
    if scale_a.dim() and out_dtype != torch.bfloat16:
        # Only some GPUs multiply to these dtypes with scales per row. Multiplying by the scales afterwards is exact.
        y = _scaled_mm(a, b, torch.ones_like(scale_b), scale_b, None, torch.float32, fast_accumulation)
        return _plus(y.mul_(scale_a.unsqueeze(1)), bias).to(out_dtype)
    if out_dtype == torch.float32:  # torch's products of this dtype take no bias
        return _plus(_scaled_mm(a, b, scale_a, scale_b, None, out_dtype, fast_accumulation), bias)
    return _scaled_mm(a, b, scale_a, scale_b, bias, out_dtype, fast_accumulation)


def _plus(y: Tensor, bias: Tensor | None) -> Tensor:
    """y, with the bias added in place."""
    return y if bias is None else y.add_(bias)


def _scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:  # fmt: skip
    """torch's product, by the function that this version of torch has."""
    if by_row := scale_a.dim() == 1:
        scale_a, scale_b = scale_a.view(-1, 1), scale_b.expand(1, b.shape[0]).contiguous()
    if not hasattr(F, "scaled_mm"):  # before torch 2.10
        return torch._scaled_mm(
            a, b.t(), scale_a, scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=fast_accumulation
        )
    scaling = F.ScalingType.RowWise if by_row else F.ScalingType.TensorWise
    return F.scaled_mm(
        a, b.t(), scale_a, scaling, scale_b, scaling, bias=bias, output_dtype=out_dtype,
        use_fast_accum=fast_accumulation,
    )  # fmt: skip
