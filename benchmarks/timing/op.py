"""Times one case of an op by each of its providers: forward, and forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import measure
from benchmarks.timing.case import Call, Case, Passes
from benchmarks.timing.checks import Checked, Kept, Other, Truth, confirm, poison, truth, verify_replay

REPEATS = 20
"""Calls of a small case in one CUDA graph."""


def _launched(passes: Passes, known: Truth) -> dict[str, Any]:
    """Times of a small case."""
    record = {"eager_us": measure.eager_microseconds(passes.both), **_in_a_row(passes, "both", REPEATS, known)}
    names = {"both_row_ms": "graph_us", "both_row": "graph"}
    return {names.get(key, key): 1e3 * value if key == "both_row_ms" else value for key, value in record.items()}


def _timed(case: Case, passes: Passes, known: Truth, copies: dict[str, float]) -> dict[str, Any]:
    """Times of a large case, its memory, and fractions of its lower bound and of the speed of `copies`."""
    record: dict[str, Any] = {}
    for which in ("forward", "both"):
        checked = Checked(passes, which, known)
        if case.limit is None:
            record[f"{which}_ms"] = measure.milliseconds(checked.call, *checked.hooks)
        else:
            alone = torch.no_grad()(partial(case.limit[which == "both"], *passes.leaves))
            times = measure.taking_turns({"limit": alone, "ours": checked.call}, {"ours": checked.hooks})
            record |= {f"{which}_ms": times["ours"], f"{which}_limit_ms": times["limit"]}
            record[f"{which}_of_limit"] = times["limit"] / times["ours"]
        checked.verify("in a timed call")
    passes.reset()
    record["peak_mib"] = measure.peak_mib(passes.both)
    record["beyond_gradients_mib"] = record["peak_mib"] - sum(x.nbytes for x in passes.trained) / 2**20
    if case.bytes is None:
        return record
    for which, count in zip(("forward", "both"), case.bytes, strict=True):
        record |= _in_a_row(passes, which, measure.row_length(count), known)
        for key in (key for key in (which, f"{which}_row") if f"{key}_ms" in record):
            record[f"{key}_of_copy"] = count / record[f"{key}_ms"] * 1e3 / copies["copy_bytes_per_s"]
            record[f"{key}_of_copy_at_size"] = copies[f"{key}_copy_ms"] / record[f"{key}_ms"]
    return record


def _in_a_row(passes: Passes, which: str, count: int, known: Truth) -> dict[str, Any]:
    """Time of one of `count` calls in a CUDA graph, or the error of the capture."""
    every = [passes, *(passes.another() for _ in range(count - 1))]
    calls = [Kept(getattr(one, which)) for one in every]
    try:
        return {f"{which}_row_ms": measure.in_a_row(calls, partial(verify_replay, every, calls, known))}
    except measure.Untrusted:  # captured, but wrong
        raise
    except Exception as failure:  # a peer that synchronises cannot be captured
        return {f"{which}_row": f"{type(failure).__name__}: {failure}"[:200]}


def _copies(case: Case) -> dict[str, float]:
    """Times of copies that move as many bytes as the case, forward and in both passes."""
    if case.bytes is None or case.small:
        return {}
    forward, both = case.bytes
    times: dict[str, float] = {}
    for kind, time in (("copy_ms", measure.copy_milliseconds), ("row_copy_ms", measure.copy_in_a_row_milliseconds)):
        times |= {f"forward_{kind}": time(forward), f"both_{kind}": time(forward) + time(both - forward)}
    return times


def measured(case: Case, only: list[str] | None, copy_rate: float, turn: int = 0) -> Iterator[dict[str, Any]]:
    """A record for each provider of a case.

    Args:
        case: The case.
        only: Names of providers; all if None.
        copy_rate: Bytes per second of a large device copy.
        turn: Number of the case. The first provider changes with it, because the GPU is coolest for the first.
    """
    torch.manual_seed(0)
    other, inputs = Other.of(case), case.inputs()
    copies = {"copy_bytes_per_s": copy_rate, **_copies(case)}
    known = truth(case, inputs)
    chosen = [provider for provider in case.providers if only is None or provider in only]
    first = turn % max(len(chosen), 1)
    for provider in chosen[first:] + chosen[:first]:
        record: dict[str, Any] = {"case": case.name, "provider": provider, **copies}
        try:
            record |= _of_provider(case, case.providers[provider], inputs, known, copies)
            if other is not None:
                other.confirm(provider)
        except Exception as failure:  # a result; times measured before it do not count
            record = {key: record[key] for key in ("case", "provider", *copies, "error") if key in record}
            record["failed"] = f"{type(failure).__name__}: {failure}"[:200]
        yield record
        measure.free()


def _of_provider(
    case: Case, call: Call, inputs: tuple[Tensor, ...], known: Truth, copies: dict[str, float]
) -> dict[str, Any]:
    passes = Passes(case, call, inputs, known.seeds)
    outputs = passes.both()
    error = measure.worst(measure.relative_error(a, b) for a, b in zip(outputs, known.wanted, strict=True))
    poison(outputs)
    del outputs
    if not error < measure.ERROR_LIMIT:
        raise ValueError(f"wrong by {error:.2g}")
    confirm(passes, known, "once its inputs have changed")
    record = {"error": error, **(_launched(passes, known) if case.small else _timed(case, passes, known, copies))}
    confirm(passes, known, "after it was timed")
    return record
