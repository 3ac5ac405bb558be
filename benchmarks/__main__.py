"""`python -m benchmarks [OP ...] [--out FILE]`: the ops beside their peers, time and memory, as table and JSON lines.

`..._ms` are as a user calls an op, alone; `..._row_ms` of one among calls that follow one another in a CUDA graph, each
with tensors of its own, so without launches from Python and with memory as busy as in a model. `..._of_copy` are shares
of the rate of a large device copy, for the fewest bytes that the op must move, and `..._of_copy_at_size` shares of the
speed of a copy that moves just as many, alone or in a row as the op, or of one for each of two passes.
`..._limit_ms` is the time of what nobody can leave out (of the linear losses their GEMMs), measured in turns with the
op. `both` is forward and backward. `benchmarks.checks` says what each timed call must hold to.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import measure
from benchmarks.case import Call, Case, Passes
from benchmarks.checks import Checked, Kept, Other, Truth, confirm, poison, truth, verify_replay
from benchmarks.ops import CASES

COLUMNS = (
    *("forward_ms", "both_ms", "forward_of_copy", "both_of_copy", "forward_row_of_copy", "both_row_of_copy"),
    *("both_of_copy_at_size", "both_of_limit", "eager_us", "graph_us", "peak_mib", "error"),
)
REPEATS = 20
"""Calls of a small case in one CUDA graph."""


def _launched(passes: Passes, known: Truth) -> dict[str, Any]:
    """Times of a small case."""
    record = {"eager_us": measure.eager_microseconds(passes.both), **_in_a_row(passes, "both", REPEATS, known)}
    names = {"both_row_ms": "graph_us", "both_row": "graph"}
    return {names.get(key, key): 1e3 * value if key == "both_row_ms" else value for key, value in record.items()}


def _timed(case: Case, passes: Passes, known: Truth, copies: dict[str, float]) -> dict[str, Any]:
    """Times of a large case, memory, and shares of the limit, which `copies` holds in part."""
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
        if not case.overwritten:
            record |= _in_a_row(passes, which, measure.row_length(count), known)
        for key in (key for key in (which, f"{which}_row") if f"{key}_ms" in record):
            record[f"{key}_of_copy"] = count / record[f"{key}_ms"] * 1e3 / copies["copy_bytes_per_s"]
            record[f"{key}_of_copy_at_size"] = copies[f"{key}_copy_ms"] / record[f"{key}_ms"]
    return record


def _in_a_row(passes: Passes, which: str, count: int, known: Truth) -> dict[str, Any]:
    """Time of a call among `count` in a CUDA graph, or why there is none."""
    every = [passes, *(passes.another() for _ in range(count - 1))]
    calls = [Kept(getattr(one, which)) for one in every]
    try:
        return {f"{which}_row_ms": measure.in_a_row(calls, partial(verify_replay, every, calls, known))}
    except measure.Untrusted:  # It was captured, and is wrong.
        raise
    except Exception as failure:  # A peer that waits for the device cannot be captured.
        return {f"{which}_row": f"{type(failure).__name__}: {failure}"[:200]}


def _copies(case: Case) -> dict[str, float]:
    """Times of copies that move as much as the case: forward, and in both passes."""
    if case.bytes is None or case.small:
        return {}
    forward, both = case.bytes
    passes = (both,) if case.overwritten else (forward, both - forward)  # what is overwritten is done in one
    found: dict[str, float] = {}
    for kind, time in (("copy_ms", measure.copy_milliseconds), ("row_copy_ms", measure.copy_in_a_row_milliseconds)):
        found |= {f"forward_{kind}": time(forward), f"both_{kind}": sum(map(time, passes))}
    return found


def measured(case: Case, only: list[str] | None, copy_rate: float, turn: int = 0) -> Iterator[dict[str, Any]]:
    """A record for each provider of a case, or those of them that are in `only`. Which of them begins changes with
    `turn`: a card is coolest for the first."""
    torch.manual_seed(0)
    other, inputs = Other.of(case), case.inputs()
    copies = {"copy_bytes_per_s": copy_rate, **_copies(case)}
    known = truth(case, inputs)
    asked = [provider for provider in case.providers if only is None or provider in only]
    first = turn % max(len(asked), 1)
    for provider in asked[first:] + asked[:first]:
        record: dict[str, Any] = {"case": case.name, "provider": provider, **copies}
        try:
            record |= _of_provider(case, case.providers[provider], inputs, known, copies)
            if other is not None:
                other.confirm(provider)
        except Exception as failure:  # A result, not the end of the run; a time that is not to be trusted is none.
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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"which ops: {', '.join(CASES)} (all)")
    parser.add_argument("--providers", nargs="*", help="only these, in place of all that are installed")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args()
    if unknown := set(arguments.ops) - set(CASES):
        parser.error(f"unknown ops: {', '.join(sorted(unknown))}; there are: {', '.join(CASES)}")
    common, copy_rate, records = measure.facts(), measure.copy_rate(), []
    for turn, case in enumerate(case for name in arguments.ops or CASES for case in CASES[name]()):
        for record in measured(case, arguments.providers, copy_rate, turn):
            records.append(record)
            measure.write(arguments.out, [{**record, **common}])
            print(record["case"], record["provider"], record.get("failed", ""), flush=True)
    shown = [c for c in COLUMNS if any(c in record for record in records)]
    table = Table("case", "provider", *shown, title=f"{common['gpu']}, bf16")
    for record in records:
        cells = [f"{record[c]:.3g}" if c in record else "-" for c in shown]
        table.add_row(record["case"], record["provider"], *cells)
    Console(width=240).print(table)
    measure.end(records)


if __name__ == "__main__":
    main()
