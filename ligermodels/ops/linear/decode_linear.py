"""A linear layer for the few tokens of a step of decoding.

What limits it is reading the weight, which `quantized.few_rows` does at a higher rate than cuBLAS's kernels for so few
rows.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ligermodels.ops.linear.pending import PendingLinear, decoding, may_wait
from ligermodels.ops.quantized.few_rows import few_rows
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import PLAIN, PLAIN_OR_NONE, custom_op, is_fake

DECODE_ROWS = 8
"""With more, an H200 reads weights no faster than by cuBLAS."""


def decode_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias, as `torch.nn.functional.linear`, by a kernel of its own for up to 8 rows: without gradients
    and autocast, on a CUDA GPU of compute capability 8.0 or more, x and a contiguous weight both bfloat16 or float16.
    Everything else is computed by that function.

    x: (..., K). weight: (N, K). bias: (N,) or None. Returns (..., N), or within `pending_linears` perhaps a
    PendingLinear. The kernel adds in float32 and rounds once; equal bits in every run. Raises what
    `torch.nn.functional.linear` raises.
    """
    if not _served(x, weight, bias):
        return F.linear(x, weight, bias)
    if may_wait():
        return PendingLinear(x, weight, None, bias)  # type: ignore[return-value]  # who calls expects it
    y: Tensor = _decode_linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


class DecodeLinears(TorchFunctionMode):
    """A context in which `torch.nn.functional.linear`, and so every `torch.nn.Linear`, is `decode_linear`, and
    `pending_linears` has an effect."""

    def __enter__(self) -> "DecodeLinears":
        super().__enter__()
        self._before = decoding.set(True)
        return self

    def __exit__(self, *error: Any) -> None:
        decoding.reset(self._before)
        super().__exit__(*error)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """As torch calls it, for every function of torch."""
        given = kwargs or {}
        if func is F.linear and "input" not in given:
            return decode_linear(*args, **given)
        return func(*args, **given)


def _served(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        not (torch.is_grad_enabled() or torch.compiler.is_compiling())
        and type(x) in PLAIN
        and not x.is_meta
        and type(weight) in PLAIN
        and type(bias) in PLAIN_OR_NONE
        and x.dtype == weight.dtype
        and x.device == weight.device
        and x.dtype in (torch.bfloat16, torch.float16)
        and (bias is None or (bias.dtype, bias.device, bias.shape) == (x.dtype, x.device, weight.shape[:1]))
        and x.dim() > 0
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[1]
        and 0 < x.numel() <= DECODE_ROWS * x.shape[-1]
        and weight.is_contiguous()
        and weight.numel() > 0
        and not torch.is_autocast_enabled(x.device.type)
        and use_kernels(x, weight, bias)
        and _supported(x.device)
    )


@functools.cache
def _supported(device: torch.device) -> bool:
    """Whether it has what the kernel was measured with: tensor cores for bfloat16, of NVIDIA."""
    return device.type != "cuda" or (torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0))


@custom_op()
def _decode_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (M, K) -> y (M, N)."""
    y = x.new_empty(x.shape[0], weight.shape[0])
    if not is_fake(x):
        few_rows(x, weight, None, bias, y)
    return y
