"""A linear layer of a large weight on a CPU, in float32, by oneDNN.

On x86 torch computes float32 products by MKL, and by oneDNN those of other dtypes. For a few tokens, on an AMD
processor with AVX-512, oneDNN takes 0.53 to 0.6 of MKL's time for a weight that comes from memory.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.ops.runtime.library import PLAIN, PLAIN_OR_NONE

LARGE = 2**20
"""Elements, 4 MiB. Smaller weights may stay in a core's cache, and a call of oneDNN takes 8 microseconds more."""


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias, as `torch.nn.functional.linear`, by oneDNN for float32 on a CPU and a LARGE contiguous weight:
    without gradients and autocast. Everything else is computed by that function.

    x: (..., K). weight: (N, K). bias: (N,) or None. Returns (..., N). Raises what `torch.nn.functional.linear` raises.
    """
    if weight.numel() < LARGE or not _served(x, weight, bias):
        return F.linear(x, weight, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def _served(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        not (torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack())
        and type(x) in PLAIN
        and type(weight) in PLAIN
        and type(bias) in PLAIN_OR_NONE
        and x.is_cpu
        and weight.is_cpu
        and x.dtype == weight.dtype == torch.float32
        and (bias is None or (bias.is_cpu and bias.dtype == x.dtype and bias.shape == weight.shape[:1]))
        and weight.dim() == 2
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
        and x.numel() > 0
        and weight.is_contiguous()
        and (bias is None or bias.is_contiguous())
        and not torch.is_autocast_enabled("cpu")
        and torch._C._get_mkldnn_enabled()
        and _has_onednn()
    )


@functools.cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
