"""The matrix product of two float8 operands, through torch's scaled matrix products (cuBLASLt)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.float8.scaling import ALIGNMENT, E4M3, E5M2
from ligermodels.ops.runtime.library import custom_op, is_fake
from ligermodels.ops.runtime.tensors import check_tensor, without_autocast

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
    """(a * scale_a) (b * scale_b)^T + bias: a (M, K), b (N, K), float8, contiguous -> (M, N) of out_dtype.

    Both operands have the dimension that is summed over last: Hopper's tensor cores read float8 no other way.
    scale_a: float32 (), or (M,), one for each row. scale_b: float32 (). bias: (N,) of out_dtype. out_dtype: bfloat16,
    float16 or float32. K and N are multiples of 16. Not both operands are E5M2. fast_accumulation: sums are kept in the
    tensor cores' registers, of fewer bits than float32, rather than added up in float32 every so often.
    Raises InputError if shapes, dtypes or devices do not fit.
    """
    for name, x in (("a", a), ("b", b)):
        check_tensor("float8_mm", name, x, (name.upper() + "'s rows", "K"), a.device, E4M3, E5M2)
    by_row = (a.shape[0],) if scale_a.dim() else ()
    for name, scale, shape in (("scale_a", scale_a, by_row), ("scale_b", scale_b, ())):
        check_tensor("float8_mm", name, scale, shape, a.device, torch.float32)
    K, N = a.shape[1], b.shape[0]
    if b.shape[1] != K or K % ALIGNMENT or N % ALIGNMENT:
        raise InputError(
            f"float8_mm: a {tuple(a.shape)} and b {tuple(b.shape)} must be (M, K) and (N, K), K and N multiples of "
            f"{ALIGNMENT}"
        )
    if a.dtype == b.dtype == E5M2:
        raise InputError("float8_mm: one operand at least must be torch.float8_e4m3fn")
    if out_dtype not in OUTPUTS:
        raise InputError(f"float8_mm: out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    if bias is not None:
        check_tensor("float8_mm", "bias", bias, (N,), a.device, out_dtype)
    return _float8_mm(a, b, scale_a, scale_b, bias, out_dtype, fast_accumulation)


def widens(b: Tensor) -> bool:
    """Whether a product by b (N, K) is as wide as its operand, or wider: activation checkpointing keeps such."""
    return b.shape[0] >= b.shape[1]


def float8_mm_reference(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """The specification of `float8_mm`, in plain torch: a sum in float32."""
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
        empty = a.new_zeros(a.shape[0], b.shape[0], dtype=out_dtype)
        return empty if bias is None else empty.add_(bias)
    if scale_a.dim() and out_dtype != torch.bfloat16:  # which only some GPUs multiply by row to; scales are exact
        y = _float8_mm(a, b, torch.ones_like(scale_b), scale_b, None, torch.float32, fast_accumulation)
        y.mul_(scale_a.unsqueeze(1))
        return (y if bias is None else y.add_(bias)).to(out_dtype)
    wide = out_dtype == torch.float32  # for which the products take no bias
    fused = None if wide else bias
    if by_row := scale_a.dim() == 1:
        scale_a, scale_b = scale_a.view(-1, 1), scale_b.expand(1, b.shape[0]).contiguous()
    if hasattr(F, "scaled_mm"):  # since torch 2.10
        kind = F.ScalingType.RowWise if by_row else F.ScalingType.TensorWise
        y = F.scaled_mm(
            a, b.t(), scale_a, kind, scale_b, kind, bias=fused, output_dtype=out_dtype,
            use_fast_accum=fast_accumulation,
        )  # fmt: skip
    else:
        y = torch._scaled_mm(
            a, b.t(), scale_a, scale_b, bias=fused, out_dtype=out_dtype, use_fast_accum=fast_accumulation
        )
    return y.add_(bias) if wide and bias is not None else y
