"""A linear layer in the dtype of its operands, by the backend that serves them best.

"few_rows": the Triton kernel that decoding steps use. Reading the weight takes most of the time there, and the kernel
reads it at a higher rate than cuBLAS's kernels for so few rows; the epilogue is part of it.
"onednn": on x86 torch computes float32 products by MKL. For few tokens, on an AMD processor with AVX-512, oneDNN takes
0.53 to 0.6 of the time of MKL for a weight that comes from memory.
"torch": `torch.nn.functional.linear`, for all other operands, with gradients and under autocast too.
With `set_batch_invariant` one product serves all calls: see `batch_invariant`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.ops.glu.glu import GLUOptions, check_options, check_pairs, gated_activation
from ligermodels.ops.linear.batch_invariant import batch_invariant_linear
from ligermodels.ops.quantized.few_rows import few_rows
from ligermodels.ops.runtime.devices import gpu_of
from ligermodels.ops.runtime.dispatch import set_batch_invariant, use_kernels
from ligermodels.ops.runtime.library import custom_op, is_fake, is_plain

DECODE_ROWS = 8
"""Rows up to which "few_rows" reads the weight faster than cuBLAS, on an H200."""
LARGE = 2**20
"""Elements (4 MiB) from which "onednn" is used. Smaller weights may stay in a core's cache, and a call of oneDNN takes
8 microseconds more."""
NO_ACTIVATION = GLUOptions("")
"""The registered op's arguments without an activation."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: GLUOptions | None = None) -> Tensor:
    """x weight^T + bias, as `torch.nn.functional.linear`, and optionally a gated activation of it.

    Without gradients, the bits are the same in every run, with and without a CUDA graph. With `set_batch_invariant`
    the bits of a row do not depend on the other rows, or on their number.

    Args:
        x: (..., K), floating.
        weight: (N, K).
        bias: (N,), or None.
        activation: a gated activation of the N channels as pairs of gate and up, for even N. Default: None.

    Returns:
        (..., N), or (..., N / 2) with an activation.

    Raises:
        InputError: N is odd, and there is an activation, or it is unknown, or its limit is not above 0; or, with
            `set_batch_invariant`, shapes, dtypes or devices do not fit. For other errors see
            `torch.nn.functional.linear`.
    """
    if not (torch.is_grad_enabled() or torch.compiler.is_compiling()) and _plain(x, weight, bias):
        for backend in BACKENDS:
            if backend.supports(x, weight, bias):
                return backend.compute(x, weight, bias, activation)
    y = dense_linear(x, weight, bias)
    return y if activation is None else gated_activation(y, activation)


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`; under `set_batch_invariant` the product of `batch_invariant`.

    Args:
        x: (..., K).
        weight: (N, K).
        bias: (N,), or None.

    Returns:
        (..., N).

    Raises:
        InputError: `set_batch_invariant` is on, and shapes, dtypes or devices do not fit.
        BackendError: `set_batch_invariant` is on, and an operand is a DTensor.
    """
    return batch_invariant_linear(x, weight, bias) if set_batch_invariant.value else F.linear(x, weight, bias)


class Backend(NamedTuple):
    """A way to compute a linear layer without gradients, for plain tensors with shapes and dtypes that fit.

    Args:
        supports: (x, weight, bias) -> whether the backend can compute them.
        compute: (x, weight, bias, activation) -> the result of `linear`.
    """

    supports: Callable[[Tensor, Tensor, Tensor | None], bool]
    compute: Callable[[Tensor, Tensor, Tensor | None, GLUOptions | None], Tensor]


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the operands are plain tensors with data, on one device, with shapes and dtypes that fit, and autocast is
    disabled."""
    return (
        is_plain(x, weight, bias)
        and x.dim() > 0
        and x.numel() > 0
        and weight.is_contiguous()
        and x.shape[-1:] == weight.shape[1:]
        and (x.dtype, x.device) == (weight.dtype, weight.device)
        and (bias is None or (bias.dtype, bias.device, bias.shape) == (x.dtype, x.device, weight.shape[:1]))
        and not x.is_meta
        and not torch.is_autocast_enabled(x.device.type)
        and not set_batch_invariant.value
    )


def _few_rows_supports(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        x.numel() <= DECODE_ROWS * x.shape[-1]
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.numel() > 0
        and use_kernels(x, weight, bias)
        and ((gpu := gpu_of(x.device)) is None or gpu.runs_ptx)
    )


def few_rows_linear(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, activation: GLUOptions | None = None
) -> Tensor:
    """A linear layer with up to 16 rows and its activation, in one kernel.

    Args:
        x: (..., K), bfloat16 or float16.
        weight: (N, K) of the dtype of x, or the codes of a quantised weight.
        scales: scales of a quantised weight; None for a plain one.
        bias: (N,), dtype of x; or None.
        activation: a gated activation of the N channels as pairs of gate and up, or None.

    Returns:
        (..., N), or (..., N / 2) with an activation, dtype of x.

    Raises:
        InputError: N is odd, and there is an activation; or the activation is unknown, or its limit not above 0.
    """
    if activation is not None:
        check_pairs("linear", len(weight))
        check_options("linear", activation)
    rows = x.reshape(-1, x.shape[-1])
    y: Tensor = _few_rows_linear(rows, weight, scales, bias, *(activation or NO_ACTIVATION))
    return y.view(*x.shape[:-1], y.shape[-1])


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, activation: GLUOptions | None) -> Tensor:
    return few_rows_linear(x, weight, None, bias, activation)


@custom_op()
def _few_rows_linear(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None,
    activation: str, gate_multiplier: float, down_multiplier: float, limit: float | None, up_offset: float,
) -> Tensor:  # fmt: skip
    """x (M, K) -> (M, N), or (M, N / 2) with an activation. weight: (N, K), or codes of a quantised weight."""
    y = x.new_empty(x.shape[0], weight.shape[0] // 2 if activation else weight.shape[0])
    if not is_fake(x):
        gated = GLUOptions(activation, gate_multiplier, down_multiplier, limit, up_offset) if activation else None
        few_rows(x, weight, scales, bias, y, gated)
    return y


def _onednn_supports(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        weight.numel() >= LARGE
        and x.is_cpu
        and x.dtype == torch.float32
        and (bias is None or bias.is_contiguous())
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._get_mkldnn_enabled()
        and _has_onednn()
    )


@functools.cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None, activation: GLUOptions | None) -> Tensor:
    return gated_activation(torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""), activation)


BACKENDS = (Backend(_few_rows_supports, _few_rows), Backend(_onednn_supports, _onednn))
"""The first backend that supports the operands computes them; if none does, torch computes them."""
