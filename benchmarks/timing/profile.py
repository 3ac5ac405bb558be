"""Profile of a step: the time of its kernels by class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from benchmarks.timing import measure

CLASSES = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "cross entropy": ("cross_entropy", "nll_loss", "softmax"),
    "optimizer": ("adam",),
    "float8 casts": ("_cast_kernel", "_transpose_kernel"),
    "rope": ("rope",),
    "norm": ("rms_norm", "layer_norm", "layernorm", "rmsnorm", "_sum_rows", "_rms_kernel", "_normalize_kernel"),
    "activation": ("glu", "silu", "gelu"),
    "gemm": ("gemm", "nvjet", "xmma", "cutlass", "splitk"),
}
"""Class -> parts of kernel names. The first match counts."""


def kind(kernel: str) -> str:
    """The class of a kernel, or "other"."""
    name = kernel.lower()
    return next((found for found, parts in CLASSES.items() if any(part in name for part in parts)), "other")


def profile(step: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of the kernels of each class in one call of `step`, longest first.

    Kernels with programmatic launch start early and wait for the kernel before them: overlapping time counts for the
    kernel that started first.
    """
    measure.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        measure.synchronize()
    # annotations, such as the optimizer's, span kernels and would count them twice
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in found.events() or ()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    )
    total: Counter[str] = Counter()
    done = 0.0
    for start, end, name in spans:
        total[kind(name)] += max(end - max(start, done), 0.0)
        done = max(done, end)
    return {name: microseconds / 1e3 for name, microseconds in total.most_common()}
