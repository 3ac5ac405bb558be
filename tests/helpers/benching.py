"""The benchmarks without a GPU: a plain clock in place of the device's events and graphs."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.timing import measure

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 16, "vocab_size": 128, "num_hidden_layers": 2}
"""Sizes of a config that a CPU runs."""
CALLS = 3
"""That a time is the median of."""


def milliseconds(
    call: Callable[[], Any], before: Callable[[], Any] = lambda: None, after: Callable[[Any], Any] = lambda result: None
) -> float:
    """The least time of a call."""
    found = []
    for _ in range(CALLS):
        before()
        start = time.perf_counter()
        result = call()
        found.append((time.perf_counter() - start) * 1e3)
        after(result)
    return min(found)


def once(call: Callable[[], Any]) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what needs a GPU."""
    monkeypatch.setattr(measure, "DEVICE", "cpu")
    monkeypatch.setattr(measure, "milliseconds", milliseconds)
    monkeypatch.setattr(measure, "one_after_another", lambda call, count: once(call))
    monkeypatch.setattr(measure, "sustained", once)
    monkeypatch.setattr(measure, "graphed", lambda call, times=1: lambda: [call() for _ in range(times)])
    monkeypatch.setattr(measure, "eager_microseconds", lambda call: 1e3 * once(call))
    monkeypatch.setattr(measure, "peak_mib", lambda call: float(len(call())))
    monkeypatch.setattr(measure, "copy_rate", lambda: 1e10)
    monkeypatch.setattr(measure, "IN_A_ROW", 1)
    monkeypatch.setattr(measure, "free", lambda: 0.0)
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)
