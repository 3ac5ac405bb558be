"""Where the time of a step goes: kernels in classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from benchmarks import measure

CLASSES = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "cross entropy": ("cross_entropy", "nll_loss", "softmax"),
    "optimizer": ("adam",),
    "rope": ("rope",),
    "norm": ("rms_norm", "layer_norm", "layernorm", "rmsnorm", "_sum_rows"),
    "activation": ("glu", "silu", "gelu"),
    "gemm": ("gemm", "nvjet", "xmma", "cutlass", "splitk"),
}
"""Class -> what a kernel has in its name; the first that fits."""


def kind(kernel: str) -> str:
    """The class of a kernel, "other" if there is none."""
    name = kernel.lower()
    return next((found for found, parts in CLASSES.items() if any(part in name for part in parts)), "other")


def profile(step: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of the kernels of each class in a call of `step`, longest first."""
    measure.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        measure.synchronize()
    total: Counter[str] = Counter()
    for event in found.events() or ():
        # Annotations, such as the optimizer's, span kernels on the device and would count them twice.
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            total[kind(event.name)] += event.time_range.elapsed_us()
    return {name: microseconds / 1e3 for name, microseconds in total.most_common()}
