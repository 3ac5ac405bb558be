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
    "float8 casts": ("_cast_kernel", "_transpose_kernel"),
    "rope": ("rope",),
    "norm": ("rms_norm", "layer_norm", "layernorm", "rmsnorm", "_sum_rows", "_rms_kernel", "_normalize_kernel"),
    "activation": ("glu", "silu", "gelu"),
    "gemm": ("gemm", "nvjet", "xmma", "cutlass", "splitk"),
}
"""Class -> what a kernel has in its name; the first that fits."""


def kind(kernel: str) -> str:
    """The class of a kernel, "other" if there is none."""
    name = kernel.lower()
    return next((found for found, parts in CLASSES.items() if any(part in name for part in parts)), "other")


def profile(step: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of the kernels of each class in a call of `step`, longest first. Kernels that are launched early
    wait for those before them: what runs at the same time counts for what began first."""
    measure.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        measure.synchronize()
    # Annotations, such as the optimizer's, span kernels on the device and would count them twice.
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
