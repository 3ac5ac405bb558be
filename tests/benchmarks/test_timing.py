"""Clocks of the benchmarks: single calls, calls back to back, steps, profiles; and the facts of a record."""

import importlib
import importlib.metadata
import importlib.util
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benching import without_a_device
from torch.autograd import DeviceType

from benchmarks.cases import roofline
from benchmarks.reporting import recording
from benchmarks.timing import measure, profile
from benchmarks.timing import op as ops_benchmark
from benchmarks.timing.case import Case, Passes
from benchmarks.timing.measure import one_after_another, sustained


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_device(monkeypatch)


def test_facts_name_every_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version, where it is installed."""
    installed = {"torch": "2.13.0", "peft": "0.19", "trl": "1.16", "fla-core": "0.4", "torchao": "0.15"}

    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(recording.metadata, "version", version)
    found = recording.facts()
    assert installed == {key: found[key] for key in recording.PACKAGES if key in found}
    assert found["measure"] == measure.MEASURE


def test_times_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call has tensors of its own, enough of them; each pass is compared to copies timed in the same way."""
    monkeypatch.setattr(measure, "IN_A_ROW", 2**30)
    assert [measure.row_length(count) for count in (2**20, 2**29, 2**29 + 1, 2**30, 2**33)] == [1024, 2, 2, 2, 2]
    monkeypatch.setattr(measure, "row_length", lambda count: count // 100)
    rows: list[tuple[str, list[Passes]]] = []

    def in_a_row(calls: Sequence[Any], verify: Any) -> float:
        rows.append((calls[0].call.__name__, [call.call.__self__ for call in calls]))
        return {"forward": 2.0, "both": 8.0}[calls[0].call.__name__]

    monkeypatch.setattr(measure, "in_a_row", in_a_row)
    monkeypatch.setattr(measure, "copy_milliseconds", lambda count: count / 1e3)
    monkeypatch.setattr(measure, "copy_in_a_row_milliseconds", lambda count: count / 1e2)
    case = Case("twice", lambda: (torch.randn(3, 5),), (200, 500), {"torch": lambda x: 2 * x})
    (record,) = ops_benchmark.measured(case, None, 1e6)
    assert [(name, len(every)) for name, every in rows] == [("forward", 2), ("both", 5)]
    for _, every in rows:
        for tensors in zip(*([*one.leaves, *one.seeds] for one in every), strict=True):
            assert len({x.data_ptr() for x in tensors}) == len(every)
            assert all(torch.equal(x, tensors[0]) for x in tensors)
    assert record["forward_row_of_copy"] == pytest.approx(200 / 2.0 * 1e3 / 1e6)
    assert record["both_row_of_copy"] == pytest.approx(500 / 8.0 * 1e3 / 1e6)
    assert record["forward_row_of_copy_at_size"] == pytest.approx(200 / 1e2 / 2.0)
    assert record["both_row_of_copy_at_size"] == pytest.approx(500 / 1e2 / 8.0)
    assert record["forward_of_copy_at_size"] == pytest.approx(200 / 1e3 / record["forward_ms"])


def test_one_of_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is made once in a row, and the time is that of one of them."""
    made: list[str] = []
    monkeypatch.setattr(measure, "milliseconds", lambda call: call() and 12.0)
    monkeypatch.setattr(measure, "graphed", lambda call: call)
    assert measure.in_a_row([lambda: made.append("a"), lambda: made.append("b")]) == 6.0 and made == ["a", "b"]
    monkeypatch.setattr(measure, "sustained", lambda call: call() or 7.0)
    assert roofline.step_ms([lambda: made.append("c")] * 2) == 7.0 and made[2:] == ["c", "c"]


def test_sustained(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on for a while before it is timed."""
    times: list[float] = []
    monkeypatch.setattr(measure, "one_after_another", lambda call, count: call() or 3.0)
    assert sustained(lambda: times.append(time.perf_counter()), seconds=0.05) == 3.0
    assert len(times) > 2 and times[-1] - times[0] >= 0.04


def test_steps_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of what follows a first call, which the device may have to wait for."""
    durations, clock = iter([100.0, 1.0, 9.0, 2.0]), [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            (self.time,) = clock

        def elapsed_time(self, end: "Event") -> float:
            return end.time - self.time

        def synchronize(self) -> None: ...

    def call() -> None:
        clock[0] += next(durations)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: clock[0] / 1e3))
    assert one_after_another(call, 3) == 2.0 and next(durations, None) is None

    def wait() -> None:
        clock[0] += 1.3 * 4.0  # for another stream

    durations = iter([4.0] * 4)
    monkeypatch.setattr(measure, "synchronize", wait)
    with pytest.raises(measure.Untrusted, match=r"works for 5\.2 ms after the last of calls that take 4 ms"):
        one_after_another(call, 3)


def test_a_profile_counts_every_moment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def event(name: str, start: float, end: float, on: DeviceType = DeviceType.CUDA, annotation: bool = False) -> Any:
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, device_type=on, is_user_annotation=annotation, time_range=span)

    events = [
        event("aten::mm", 0, 10, DeviceType.CPU),
        event("nvjet", 0, 5000),
        event("_rms_norm_backward_kernel", 6000, 6200),
        event("_sum_rows_kernel", 6010, 6250),  # launched early
        event("_glu_forward_kernel", 5100, 5400),
        event("kernel_cutlass_kernel_flash_attncuteflash_fwd", 7000, 7900),
        event("Memset", 7100, 7101),  # on another stream
        event("_adamw_step_kernel", 8000, 8070),
        event("Optimizer.step#FusedAdamW.step", 7990, 8080, annotation=True),
        event("Memset", 8100, 8101),
    ]

    class Profile:
        def __init__(self, **options: Any) -> None: ...

        def __enter__(self) -> "Profile":
            return self

        def __exit__(self, *error: object) -> None: ...

        def events(self) -> list[Any]:
            return events

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    wanted = {"gemm": 5, "attention": 0.9, "activation": 0.3, "norm": 0.25, "optimizer": 0.07, "other": 0.001}
    assert profile.profile(lambda: None) == pytest.approx(wanted)


def test_exposed_communication() -> None:
    """Collectives count where no other kernel runs, and gaps where nothing does."""
    gather, scatter = "ncclDevKernel_AllGather_RING_LL(args)", "ncclDevKernel_ReduceScatter_Sum_bf16_RING(args)"
    spans = [
        (0.0, 2000.0, gather),  # exposed until 1000, then beside the product
        (1000.0, 3000.0, "gemm"),
        (1500.0, 2500.0, "copy"),
        (4000.0, 9000.0, scatter),  # after a gap of 1 ms
        (5000.0, 6000.0, gather),  # two collectives at a time count once, for one of them
        (7000.0, 8000.0, "gemm"),
        (9000.0, 9000.0, "empty"),
    ]
    assert profile.exposed(spans) == {"ReduceScatter": 3.0, "AllGather": 2.0, "idle": 1.0}
    assert [profile.collective(name) for name in (gather, scatter, "gemm")] == ["AllGather", "ReduceScatter", None]
    assert profile.by_class(spans[1:3]) == {"gemm": 2.0, "other": 0.0}
