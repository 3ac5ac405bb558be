"""Time and memory of a call on the GPU."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

DEVICE = "cuda"
ERROR_LIMIT = 0.03
"""Largest relative error of bf16 results against fp32; beyond it a timing does not count."""
CACHE_BYTES = 2**28
"""Bytes that are overwritten between calls, more than the L2 cache holds."""
LATE, LATE_SHARE = 0.03, 0.02
"""Largest time between the end of a call by events and by the host's clock: in milliseconds, and as a fraction."""
MEASURE = 2
"""Version of the timing method; times of different versions do not compare. Before 2, inputs stayed the same from call
to call and only the first call was checked."""
IN_A_ROW = 2**30
"""Fewest bytes that the calls in one CUDA graph move together, so that no input of a call is still in the cache."""


class Untrusted(ValueError):
    """A time that does not measure the requested work."""


def milliseconds(
    call: Callable[[], Any], before: Callable[[], Any] | None = None, after: Callable[[Any], Any] | None = None
) -> float:
    """Median time of `call` by device events, with the L2 cache cleared before each call, as `triton.testing.do_bench`.

    Args:
        call: The timed function. It runs at least five times.
        before: Runs before each call, untimed.
        after: Gets the result of each call, untimed.

    Raises:
        Untrusted: By the host's clock the device works on after the events, on a stream that the current stream does
            not wait for.
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
    """Time that the device works on other streams after the current stream has finished a call, by the host's clock.

    Args:
        call: The function.
        before: Runs before each call.
        rounds: Number of calls; the minimum counts, because hosts are shared.
    """
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
    """Time from an event until the device is idle, by the host's clock."""
    event.synchronize()
    start = time.perf_counter()
    synchronize()
    return (time.perf_counter() - start) * 1e3


def one_after_another(call: Callable[[], Any], count: int) -> float:
    """Median milliseconds between the ends of `count` calls on the device, without synchronisation in between.

    Raises:
        Untrusted: The device works on after the last call, for a large part of a call.
    """
    call()  # the first launch is slow
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
    """`milliseconds` of several calls that take turns: a GPU slows down as it gets hot, so times that are minutes apart
    differ by a few per cent.

    Args:
        calls: Name -> call.
        hooks: Name -> the arguments `before` and `after` of `milliseconds`.
        rounds: Number of turns; the median counts.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        names = list(calls)
        first = turn % max(len(names), 1)
        for name in names[first:] + names[:first]:
            found[name].append(milliseconds(calls[name], *(hooks or {}).get(name, ())))
    return {name: statistics.median(times) for name, times in found.items()}


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    """A function that replays a CUDA graph of a call: the kernels without their launches from Python.

    Raises:
        RuntimeError: The call cannot be captured. A synchronisation is found before the capture, which it would break.
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
    with torch.cuda.stream(main), torch.cuda.graph(graph):  # a failed capture must not leave another stream current
        call()

    def replay(reads: Callable[[], Any] = call) -> None:  # keeps the tensors alive that the graph reads
        graph.replay()

    return replay


def in_a_row(calls: Sequence[Callable[[], Any]], verify: Callable[[Callable[[], Any]], None] | None = None) -> float:
    """Median time of one of `calls`, back to back in one CUDA graph as the kernels of a model are.

    Args:
        calls: The calls. Results are kept until all calls are done; give each call its own tensors, so that no input
            is in the cache.
        verify: Gets the function that replays the graph, after the timing, and raises if results are wrong.

    Raises:
        RuntimeError: A call cannot be captured.
    """
    replay = graphed(lambda: [call() for call in calls])
    found = milliseconds(replay) / len(calls)
    if verify is not None:
        verify(replay)
    return found


def row_length(count: int) -> int:
    """Number of calls in one CUDA graph, for calls that move `count` bytes each."""
    return max(2, -(-IN_A_ROW // count))


def eager_microseconds(call: Callable[[], Any], count: int = 100, rounds: int = 20) -> float:
    """Wall time of one of `count` calls from Python, synchronised only at the end: for small calls, the time to launch.

    Args:
        call: The function.
        count: Number of calls per round.
        rounds: Number of rounds; the minimum counts, because hosts are shared.
    """
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
    """Peak memory of `call` beyond the memory allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def synchronize() -> None:
    """Wait until the device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free() -> float:
    """Free compiled code and unused memory; returns the GiB that are still allocated."""
    torch.compiler.reset()
    gc.collect()
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() / 2**30


def copy_milliseconds(count: int) -> float:
    """Time of a device copy that reads and writes `count` bytes in total."""
    source = torch.randint(256, (max(count // 2, 1),), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return milliseconds(lambda: target.copy_(source))


def moving(count: int) -> Callable[[], torch.Tensor]:
    """A call that reads and writes `count` bytes in total by a kernel. In CUDA graphs large copies use the slower copy
    engine."""
    source = torch.randn(max(count // 4, 1), dtype=torch.bfloat16, device=DEVICE)
    return partial(torch.neg, source, out=torch.empty_like(source))


def copy_in_a_row_milliseconds(count: int) -> float:
    """Time of a kernel that moves `count` bytes, back to back with equal kernels in a CUDA graph."""
    return in_a_row([moving(count) for _ in range(row_length(count))])


def copy_rate() -> float:
    """Bytes per second that a large device copy reads and writes: the limit of memory-bound ops."""
    return 2**31 / copy_milliseconds(2**31) * 1e3


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """|found - wanted| / |wanted| in fp32, by Euclidean norms."""
    found, wanted = found.detach().float(), wanted.detach().float()
    difference = (found - wanted).norm()
    return float(difference / wanted.norm().clamp(min=torch.finfo(torch.float32).tiny))


def worst(errors: Iterable[float]) -> float:
    """The largest error, or NaN if one is NaN."""
    return max(errors, key=lambda error: (math.isnan(error), error))
