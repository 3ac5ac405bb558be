"""The two gates of each head of the gated delta rule, per token: the decay of the state, and how far it moves to the
token's value."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.runtime.checks import Signature
from ligermodels.ops.runtime.dispatch import tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_fake
from ligermodels.ops.runtime.tensors import rows_and_stride

BLOCK = 256

_TENSORS = Signature(a="B T R", b="B T R =a", log_rate="R", bias="R")
_BY_CHANNEL = Signature(a="B T R K", b="B T R =a", log_rate="R", bias="R K")


def delta_gates(
    a: Tensor, b: Tensor, log_rate: Tensor, bias: Tensor, lower_bound: float | None = None
) -> tuple[Tensor, Tensor]:
    """The gates of `gated_delta_rule`: g = -exp(log_rate) softplus(a + bias), and beta = sigmoid(b).

    With a lower bound (Ling 3.0's `kda_lower_bound`) g = lower_bound sigmoid(exp(log_rate) (a + bias)).

    Plain torch takes some ten tiny operations, too many for every layer of a decoding step. In training they are few
    compared to the rest of the layer, so there is no kernel for their gradients. Differentiable in all arguments.

    Args:
        a: (B, T, R), any floating dtype and strides; or (B, T, R, K), for a decay for each key channel, in torch ops.
        b: (B, T, R), of a's dtype, any strides.
        log_rate: (R,), floating.
        bias: (R,), floating; with a decay for each key channel (R, K).
        lower_bound: a number below 0 that g stays above, in torch ops. Default: None, no bound.

    Returns:
        g, of a's shape, and beta (B, T, R), fp32 (fp64 for fp64).

    Raises:
        InputError: shapes, dtypes or devices do not fit, or the bound is not a number below 0.
    """
    if lower_bound is not None and not -math.inf < lower_bound < 0:
        raise InputError(f"delta_gates: lower_bound: must be a finite number below 0, got {lower_bound}")
    by_channel = a.dim() == 4
    a, b, log_rate, bias = (_BY_CHANNEL if by_channel else _TENSORS).check("delta_gates", a, b, log_rate, bias)
    operands = a, b, log_rate, bias
    in_torch = by_channel or lower_bound is not None or not use_kernels(*operands)
    if in_torch or (torch.is_grad_enabled() and any(x.requires_grad for x in operands)):
        return delta_gates_reference(*operands, lower_bound)
    g, beta = _delta_gates(*operands)
    return g, beta


def delta_gates_reference(
    a: Tensor, b: Tensor, log_rate: Tensor, bias: Tensor, lower_bound: float | None = None
) -> tuple[Tensor, Tensor]:
    """The specification of `delta_gates`, in plain torch: the same a, b, log_rate, bias and lower_bound."""
    wide = torch.promote_types(a.dtype, torch.float32)
    rate = log_rate.to(wide).exp()
    rate = rate[:, None] if a.dim() == 4 else rate
    x = a.to(wide) + bias.to(wide)
    g = -rate * F.softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()
    return g, b.to(wide).sigmoid()


@kernel
def _delta_gates_kernel(a, a_stride, b, b_stride, log_rate, bias, g, beta, count, R, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < count
    row, head = place // R, place % R
    x = tl.load(a + row * a_stride + head, mask=there, other=0.0).to(tl.float32)
    x += tl.load(bias + head, mask=there, other=0.0).to(tl.float32)
    # log(1 + exp(x)), exact to the last digits for small values: z * log(1 + e) / (the e that was added) (Kahan).
    e = tl.exp(-tl.abs(x))
    more = 1.0 + e
    small = tl.where(more == 1.0, e, tl.log(more) * (e / tl.where(more == 1.0, 1.0, more - 1.0)))
    rate = tl.exp(tl.load(log_rate + head, mask=there, other=0.0).to(tl.float32))
    tl.store(g + place, -rate * (tl.maximum(x, 0.0) + small), mask=there)
    y = tl.load(b + row * b_stride + head, mask=there, other=0.0).to(tl.float32)
    e = tl.exp(-tl.abs(y))
    tl.store(beta + place, tl.where(y < 0, e, 1.0) / (1.0 + e), mask=there)


@custom_op()
def _delta_gates(a: Tensor, b: Tensor, log_rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    g, beta = (a.new_empty(a.shape, dtype=torch.float32) for _ in range(2))
    if is_fake(g):
        return g, beta
    if count := a.numel():
        _delta_gates_kernel[(-(-count // BLOCK),)](
            *rows_and_stride(a), *rows_and_stride(b), log_rate.contiguous(), bias.contiguous(), g, beta,
            count, a.shape[2], BLOCK=BLOCK, num_warps=2,
        )  # fmt: skip
    return g, beta
