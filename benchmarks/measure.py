"""Time and memory of a call on the GPU, and the facts that a result is recorded with."""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

DEVICE = "cuda"
RESULTS = Path(__file__).parent / "results"
ERROR_LIMIT = 0.03
"""bf16 results farther than this from the fp32 ones, by `relative_error`, make a timing void."""
PACKAGES = (
    *("torch", "triton", "transformers", "liger-kernel", "quack-kernels", "cut-cross-entropy"),
    *("flash-attn-4", "flash-attn-3", "flash-attn", "flash-linear-attention", "fla-core", "peft", "trl", "torchao"),
)
"""Whose versions are recorded, where they are installed."""
CACHE_BYTES = 2**28
"""What is overwritten between calls, more than the L2 cache."""
LATE, LATE_SHARE = 0.03, 0.02
"""Milliseconds, and the share of a call's time, that may pass between its end by events and by the host's clock."""
MEASURE = 2
"""Counts the ways in which ops were timed: times of different ones do not compare. Before 2, inputs stayed the same
from call to call and only the first call was checked."""
IN_A_ROW = 2**30
"""Bytes that calls timed in a row move together, at least: what one of them needs has left the cache since the last
round."""


class Untrusted(ValueError):
    """A time that is no time of what was asked for."""


def milliseconds(
    call: Callable[[], Any], before: Callable[[], Any] | None = None, after: Callable[[Any], Any] | None = None
) -> float:
    """Median time of `call`, by device events, the L2 cache cleared before each; what runs `before` it, and what is
    done with its result `after` it, is not timed.

    As `triton.testing.do_bench`, but never fewer than five times. Raises Untrusted when the device works on after the
    events, by the host's clock: work on a stream that the current one does not wait for.
    """
    cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device=DEVICE)

    def timed(count: int) -> float:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for start, end in events:
            if before is not None:
                before()
            cache.zero_()
            start.record()
            result = call()
            end.record()
            if after is not None:
                after(result)
            del result
        synchronize()
        return float(statistics.median(start.elapsed_time(end) for start, end in events))

    timed(2)
    found = timed(min(max(int(60 / timed(3)), 5), 200))
    late = late_milliseconds(call, before) - late_milliseconds(lambda: None)
    if late > LATE + LATE_SHARE * found:
        raise Untrusted(f"the device works for {late:.3g} ms after the events, by which a call takes {found:.3g} ms")
    return found


def late_milliseconds(call: Callable[[], Any], before: Callable[[], Any] | None = None, rounds: int = 5) -> float:
    """How long the device works on after the current stream has done a call, by the host's clock: on other streams,
    which events on this one do not see. The least of some rounds, for hosts are shared."""
    found = []
    for _ in range(rounds):
        if before is not None:
            before()
        synchronize()
        call()
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        found.append(_milliseconds_after(end))
    return min(found)


def _milliseconds_after(event: torch.cuda.Event) -> float:
    """By the host's clock, from an event to when the device has nothing left to do."""
    event.synchronize()
    start = time.perf_counter()
    synchronize()
    return (time.perf_counter() - start) * 1e3


def one_after_another(call: Callable[[], Any], count: int) -> float:
    """Median milliseconds from the end of each of `count` calls on the device to that of the next. The host waits for
    none of them; the device waits for the host only where launching takes longer. Raises Untrusted when the device
    works on after the last of them for a good part of a call."""
    call()  # the host is behind at first
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    late = _milliseconds_after(events[-1])
    found = float(statistics.median(start.elapsed_time(end) for start, end in pairwise(events)))
    if late > 1 + found / 4:
        raise Untrusted(
            f"the device works for {late:.3g} ms after the last of calls that take {found:.3g} ms by events"
        )
    return found


def sustained(call: Callable[[], Any], seconds: float = 1.0) -> float:
    """Median time of a call among others right before and after it, once they have gone on for so many seconds: a card
    that draws all its power is slower then."""
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        call()
        synchronize()
    return one_after_another(call, 5)


def taking_turns(
    calls: Mapping[str, Callable[[], Any]],
    hooks: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] | None = None,
    rounds: int = 3,
) -> dict[str, float]:
    """`milliseconds` of each, the median of some rounds in which they take turns: a card slows down as it gets hot, and
    what is measured minutes apart does not compare to a few per cent. `hooks`: what runs before and after a call."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        names = list(calls)
        first = turn % max(len(names), 1)
        for name in names[first:] + names[:first]:
            found[name].append(milliseconds(calls[name], *(hooks or {}).get(name, ())))
    return {name: statistics.median(times) for name, times in found.items()}


def graphed(call: Callable[[], Any], times: int = 1) -> Callable[[], Any]:
    """Replays a CUDA graph of `call`, `times` in a row: its kernels, without the launches from Python.

    Raises RuntimeError when the call cannot be captured; one that waits for the device is told before it spoils a
    capture.
    """
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    call()
    side.wait_stream(main)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(side):
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    main.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(main), torch.cuda.graph(graph):  # A capture that fails would leave another stream behind.
        for _ in range(times):
            call()

    def replay(reads: Callable[[], Any] = call) -> None:  # which keeps the tensors that the graph reads
        graph.replay()

    return replay


def in_a_row(calls: Sequence[Callable[[], Any]], verify: Callable[[Callable[[], Any]], None] | None = None) -> float:
    """Median time of one of `calls`, which follow one another in one CUDA graph as the kernels of a model do. What they
    give is kept until all are done; with tensors of its own to take, none finds anything in the cache. `verify` gets
    what replays the graph, once it is timed, and raises what it finds wrong.

    Raises RuntimeError as `graphed` does.
    """
    replay = graphed(lambda: [call() for call in calls])
    found = milliseconds(replay) / len(calls)
    if verify is not None:
        verify(replay)
    return found


def row_length(count: int) -> int:
    """How many calls that move `count` bytes each are timed in a row."""
    return max(2, -(-IN_A_ROW // count))


def eager_microseconds(call: Callable[[], Any], count: int = 100, rounds: int = 20) -> float:
    """Wall time of a call among `count` in a row, waiting for the device only at the end; the best of some rounds, for
    hosts are shared. Of small calls it is the time to launch them."""
    found = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        synchronize()
        found.append((time.perf_counter() - start) / count * 1e6)
    return min(found)


def peak_mib(call: Callable[[], Any]) -> float:
    """Most memory that `call` holds at once beyond what was allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free() -> float:
    """Let go of compiled code and of all memory that nothing holds any more; the GiB that are still held."""
    torch.compiler.reset()
    gc.collect()
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() / 2**30


def copy_milliseconds(count: int) -> float:
    """Time of a device copy that moves `count` bytes in all, half of them read and half written."""
    source = torch.randint(256, (max(count // 2, 1),), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return milliseconds(lambda: target.copy_(source))


def moving(count: int) -> Callable[[], torch.Tensor]:
    """Moves `count` bytes as a copy does, half of them read and half written, but by a kernel: in CUDA graphs large
    copies are left to the copy engine, which is slower."""
    source = torch.randn(max(count // 4, 1), dtype=torch.bfloat16, device=DEVICE)
    return partial(torch.neg, source, out=torch.empty_like(source))


def copy_in_a_row_milliseconds(count: int) -> float:
    """Time of what moves `count` bytes among others like it, as `in_a_row`."""
    return in_a_row([moving(count) for _ in range(row_length(count))])


def copy_rate() -> float:
    """Bytes read and written by a large device copy, a second: the limit of memory-bound ops."""
    return 2**31 / copy_milliseconds(2**31) * 1e3


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """|found - wanted| / |wanted|, Euclidean, in fp32."""
    found, wanted = found.detach().float(), wanted.detach().float()
    difference = (found - wanted).norm()
    return float(difference / wanted.norm().clamp(min=torch.finfo(torch.float32).tiny))


def worst(errors: Iterable[float]) -> float:
    """The largest, or NaN where one is."""
    return max(errors, key=lambda error: (math.isnan(error), error))


def facts() -> Mapping[str, Any]:
    """Versions of torch and of every peer that is installed, GPU, commit, day, and the way of measuring."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    day = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    return {**found, "gpu": gpu_name(), "commit": commit(), "date": day, "measure": MEASURE}


def commit() -> str:
    """Of the code that runs, in the current folder; with a note where it has changed since. COMMIT in the environment
    names that of a tree that was copied without its history."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()

    code = ("--", "ligermodels", "benchmarks", ":!benchmarks/results")  # to which runs add
    head = git("rev-parse", "HEAD") or "unknown"
    return f"{head} with changes" if git("status", "--porcelain", "--untracked-files=no", *code) else head


def gpu_name() -> str:
    """Of the current device; that of a CPU where there is no GPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def gpu_suffix() -> str:
    """What names this GPU in the files of results: h200."""
    return gpu_name().split()[-1].lower()


def results(name: str) -> Path:
    """The file of results of a benchmark on this GPU: training-h200.jsonl."""
    return RESULTS / f"{name}-{gpu_suffix()}.jsonl"


def write(path: Path | None, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records as JSON lines, making folders; nothing without a path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def end(records: Iterable[Mapping[str, Any]]) -> None:
    """Leave with an error where ours failed; a peer may."""
    failed = [r for r in records if "failed" in r and str(r.get("provider")).startswith("ligermodels")]
    if failed:
        raise SystemExit("\n".join(f"{r['case']}, {r['provider']}: {r['failed']}" for r in failed))
