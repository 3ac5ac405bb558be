"""A linear layer with a frozen, quantised weight: y = x W^T + b and dx = dy W, where W is `dequantize_weight(...)`.

For up to 64 rows of x in bfloat16 or float16, kernels dequantise W while they multiply. In all other cases W is
dequantised and multiplied piece by piece, so that memory holds the codes and one piece: for more rows, other dtypes,
the backward pass, and devices without Triton or without tensor cores for bfloat16 (compute capability below 8.0).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.glu.glu import GLUOptions, gated_activation
from ligermodels.ops.linear.linear import few_rows_linear
from ligermodels.ops.quantized.dequantize import dequantize_weight, dequantize_weight_reference
from ligermodels.ops.quantized.few_rows import FEW_ROWS, few_rows
from ligermodels.ops.quantized.more_rows import MORE_ROWS, more_rows
from ligermodels.ops.quantized.weights import GROUP, check_quantized, columns_of, pieces
from ligermodels.ops.runtime.checks import check_tensor
from ligermodels.ops.runtime.devices import gpu_of
from ligermodels.ops.runtime.dispatch import refuse_batch_invariant, use_kernels
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable, reject_dtensors
from ligermodels.ops.runtime.tensors import count_rows, under_autocast

PIECE = 2**24
"""Elements of a piece of W."""


def quantized_linear(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None, *, activation: GLUOptions | None = None
) -> Tensor:
    """x W^T + bias for a frozen, quantised weight W, and optionally a gated activation of it.

    x and bias have gradients; codes and scales are constants. Without gradients, one kernel computes up to 16 rows with
    the activation.

    Args:
        x: (..., K), any floating dtype; under autocast it is cast to autocast's dtype.
        codes: codes of the weight (N, K), from `quantize_weight`. Codes of 4 bits determine K only up to a
            multiple of 128.
        scales: scales of the weight, from `quantize_weight`.
        bias: (N,), cast to the dtype of x; or None.
        activation: a gated activation of the N channels as pairs of gate and up, for even N. Default: None.

    Returns:
        (..., N), or (..., N / 2) with an activation, dtype of x.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or an operand is a DTensor.
    """
    refuse_batch_invariant("quantized_linear")
    (x,) = under_autocast(x)
    if x.dim() == 0 or not x.is_floating_point():
        raise InputError(f"quantized_linear: x must be floating, of shape (..., K); got {x.dtype} {tuple(x.shape)}")
    reject_dtensors("quantized_linear", x, codes, scales, bias)
    name, features = "quantized_linear", x.shape[-1]
    check_quantized(name, codes, scales, features, x.device)
    if bias is not None:
        check_tensor(name, "bias", bias, (codes.shape[0],), x.device)
        bias = bias.to(x.dtype)
    codes, scales = codes.contiguous(), scales.contiguous()
    rows = x.reshape(count_rows(x), features)
    # An exported program chooses the kernel when it runs, by its number of rows.
    in_one_kernel = not (torch.is_grad_enabled() or x.is_meta or torch.compiler.is_exporting())
    if in_one_kernel and _kernel(rows, codes) is few_rows:
        return few_rows_linear(x, codes, scales, bias, activation)
    y: Tensor = _QuantizedLinear.apply(rows, codes, scales, bias)
    return gated_activation(y.view(*x.shape[:-1], codes.shape[0]), activation)


def quantized_linear_reference(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """The specification of `quantized_linear` without an activation, in plain torch.

    Args:
        x: (..., K).
        codes: codes of the weight (N, K).
        scales: scales of the weight.
        bias: (N,), or None.
    """
    return F.linear(x, dequantize_weight_reference(codes, scales, x.shape[-1], x.dtype), bias)


@custom_op()
def _quantized_linear_forward(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x (M, K) -> y (M, N)."""
    y = x.new_empty(x.shape[0], codes.shape[0])
    if is_fake(x):
        return y
    if (compute := _kernel(x, codes)) is not None:
        compute(x, codes, scales, bias, y)
        return y
    for rows in pieces(codes.shape[0], x.shape[1], 1, PIECE):
        weight = dequantize_weight(codes[rows], scales[rows], x.shape[1], x.dtype)
        y[:, rows] = F.linear(x, weight, None if bias is None else bias[rows])
    return y


@custom_op()
def _quantized_linear_backward(dy: Tensor, codes: Tensor, scales: Tensor, in_features: int) -> Tensor:
    """dy (M, N) -> dx (M, K). W is dequantised by columns, so that each element of dx is one sum."""
    dx = dy.new_empty(dy.shape[0], in_features)
    if is_fake(dy):
        return dx
    for columns in pieces(in_features, codes.shape[0], GROUP, PIECE):
        own = columns_of(codes, scales, columns)
        weight = dequantize_weight(*own, columns.stop - columns.start, dy.dtype)
        dx[:, columns] = dy @ weight
    return dx


def _kernel(x: Tensor, codes: Tensor) -> Callable[..., None] | None:
    """The kernel that computes the product without a dequantised copy of the weight, or None."""
    fits = 0 < x.shape[0] <= MORE_ROWS and 0 not in (codes.shape[0], x.shape[1]) and x.dtype.itemsize == 2
    if not (fits and use_kernels(x, codes) and ((gpu := gpu_of(x.device)) is None or gpu.has_bfloat16)):
        return None
    return few_rows if x.shape[0] <= FEW_ROWS else more_rows


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, codes, scales, bias):
        ctx.save_for_backward(codes, scales)
        ctx.in_features = x.shape[1]
        return _quantized_linear_forward(x, codes, scales, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        need_x, _, _, need_bias = ctx.needs_input_grad
        dx = _quantized_linear_backward(dy, *ctx.saved_tensors, ctx.in_features) if need_x else None
        return dx, None, None, dy.sum(0) if need_bias else None
