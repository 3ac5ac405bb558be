"""The peak memory of a linear head's loss on the CPU, by the allocations that torch's profiler records."""

import torch
from loss_cases import targets
from torch.profiler import ProfilerActivity, profile

from ligermodels import ops

T, H, V = 512, 32, 16_000
ALLOWANCE = 2**18
"""Vectors of a chunk's rows, beside its logits."""


def beyond_gradients(loss: str, dtype_name: str, budget: int, *, trained: bool = True, summed: bool = True) -> int:
    """Bytes at the peak of a forward and a backward pass, beyond the gradients and the sum of the weight's.

    loss: an expression of `ops`, `hidden` (T, H), `weight` (V, H), `target` (T,), `teacher` (a hidden and a weight of
        the same sizes) and `budget`. trained: whether the weight has a gradient, and `summed`, over chunks.
    """
    dtype = getattr(torch, dtype_name)
    hidden = torch.randn(T, H, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, H, dtype=dtype, requires_grad=trained)
    names = {"teacher": [torch.randn(n, H, dtype=dtype) for n in (T, V)], "budget": budget, "ops": ops}
    names |= {"hidden": hidden, "weight": weight, "target": targets((T,), V, hidden.device)}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        eval(loss, names).backward()
    results = profiled.profiler.kineto_results.events()
    held = peak = 0
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in results if e.name() == "[memory]"):
        held += size
        peak = max(peak, held)
    wide = 4 * weight.numel() if summed and dtype != torch.float32 else 0
    return peak - hidden.nbytes - (weight.nbytes + wide if trained else 0)
