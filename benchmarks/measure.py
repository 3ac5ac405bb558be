"""Time and memory of a call on the GPU, and the facts that a result is recorded with."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import torch
from triton.testing import do_bench


def milliseconds(call: Callable[[], Any]) -> float:
    """Median time of `call`, by device events, the L2 cache cleared before each."""
    return float(do_bench(call, warmup=50, rep=300, return_mode="median"))


def peak_mib(call: Callable[[], Any]) -> float:
    """Most memory that `call` holds at once beyond what was allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def copy_rate() -> float:
    """Bytes read and written by a large device copy, a second: the limit of memory-bound ops."""
    source = torch.randn(2**29, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) * 1e3


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """|found - wanted| / |wanted|, Euclidean, in fp32 (1 when `wanted` is all zero and `found` is not)."""
    wanted = wanted.float()
    difference = (found.float() - wanted).norm()
    return float(difference / wanted.norm().clamp(min=torch.finfo(torch.float32).tiny))


def facts() -> Mapping[str, str]:
    """Versions, GPU and commit."""
    packages = ("torch", "triton", "transformers", "liger-kernel", "quack-kernels", "cut-cross-entropy", "flash-attn-4")
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    commit = os.environ.get("COMMIT")  # For a tree that was copied without its history.
    if commit is None:
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = head.stdout.strip() or "unknown"
    return {**found, "gpu": torch.cuda.get_device_name(), "commit": commit}
