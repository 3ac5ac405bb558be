"""Profile of a step: the time of its kernels by class, and on several GPUs the time of collectives beside no kernel."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from benchmarks.timing import measure

Span = tuple[float, float, str]
COMPUTATION = ""
CLASSES = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "cross entropy": ("cross_entropy", "nll_loss", "softmax"),
    "optimizer": ("adam",),
    "float8 casts": ("_cast_kernel", "_transpose_kernel"),
    "rope": ("rope",),
    "norm": ("rms_norm", "layer_norm", "layernorm", "rmsnorm", "_sum_rows"),
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

    Args:
        step: A call that works on the GPU.
    """
    return by_class(spans_of(step))


def profile_of_rank(step: Callable[[], Any]) -> dict[str, dict[str, float]]:
    """The time of a rank by kernels and communication, in milliseconds, of the second of two calls of `step` in a row:
    the host is then ahead of the GPU, as in training.

    Args:
        step: A call that works on the GPU and communicates by NCCL. All ranks call it.

    Returns:
        "profile_ms": kernels of each class without collectives, as `profile` gives them. "exposed_ms": for each kind of
        collective the time in which no other kernel runs, which includes waiting for other ranks; and "idle", the time
        in which nothing runs, between the first and the last kernel.
    """
    spans = spans_of(lambda: (step(), step()))
    spans = spans[len(spans) // 2 :]
    return {"profile_ms": by_class([span for span in spans if not collective(span[2])]), "exposed_ms": exposed(spans)}


def spans_of(step: Callable[[], Any]) -> list[Span]:
    """Begin, end and name of each kernel and copy of a call of `step`, in the order of their begins."""
    measure.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        measure.synchronize()
    # annotations, such as the optimizer's, span kernels and would count them twice
    return sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in found.events() or ()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    )


def by_class(spans: Iterable[Span]) -> dict[str, float]:
    """Milliseconds of each class of kernels, longest first.

    Kernels with programmatic launch start early and wait for the kernel before them: overlapping time counts for the
    kernel that started first.
    """
    total: defaultdict[str, float] = defaultdict(float)
    done = 0.0
    for start, end, name in spans:
        total[kind(name)] += max(end - max(start, done), 0.0)
        done = max(done, end)
    return _longest_first(total)


def collective(kernel: str) -> str | None:
    """Kind of a collective of NCCL, as in "AllGather"; None for other kernels."""
    found = re.match(r"nccl(?:Dev)?Kernel_([A-Za-z]+)", kernel)
    return found and found[1]


def exposed(spans: Sequence[Span]) -> dict[str, float]:
    """Milliseconds without computation: by kind of collective, longest first, and "idle" where no collective runs.

    Args:
        spans: Begin and end in microseconds and name of each kernel, in the order of their begins.
    """
    ends = sorted({bound for start, end, _ in spans for bound in (start, end)})
    running: Counter[str] = Counter()
    total: defaultdict[str, float] = defaultdict(float)
    begins, stops = deque(spans), deque(sorted(spans, key=lambda span: span[1]))
    for now, after in pairwise(ends):
        while begins and begins[0][0] <= now:
            running[collective(begins.popleft()[2]) or COMPUTATION] += 1
        while stops and stops[0][1] <= now:
            running[collective(stops.popleft()[2]) or COMPUTATION] -= 1
        if not running[COMPUTATION]:
            total[next((name for name, count in running.items() if count), "idle")] += after - now
    return _longest_first(total)


def _longest_first(microseconds: Mapping[str, float]) -> dict[str, float]:
    """In milliseconds."""
    return {name: found / 1e3 for name, found in sorted(microseconds.items(), key=lambda item: -item[1])}
