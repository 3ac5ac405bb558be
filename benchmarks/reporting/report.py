"""`python -m benchmarks report`: writes plots, docs/benchmark-tables.md, docs/results.md and the README's table."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.reporting.recording import RESULTS
from benchmarks.reporting.runs import of_one_measure, why_not

Record = dict[str, Any]
DOCS = RESULTS.parent.parent / "docs"
NAMES = (
    "ops", "attention", "delta", "training", "nativize", "decoding", "quantized", "medusa", "demo",
    "loading", "float8-loss", "mixtures",
)  # fmt: skip
"""Names of benchmarks; their results are in NAME-GPU.jsonl."""


def read(folder: Path, gpu: str) -> dict[str, list[Record]]:
    """Benchmark -> its records that may be reported, in order."""
    found = {name: _lines(folder, name, gpu) for name in NAMES}
    return {name: [_named(name, r) for r in every if why_not(r) is None] for name, every in found.items()}


def left_out(folder: Path, gpu: str) -> list[str]:
    """Messages with the number of records that are not reported, and the reasons."""
    found = []
    for name in NAMES:
        reasons = Counter(why_not(record) for record in _lines(folder, name, gpu))
        found += [f"{name}: {count} records {reason}" for reason, count in reasons.items() if reason is not None]
    return found


def _lines(folder: Path, name: str, gpu: str) -> list[Record]:
    path = folder / f"{name}-{gpu}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _named(name: str, record: Record) -> Record:
    """The record with `case` and `provider`, which some benchmarks name differently."""
    record = of_one_measure(record)
    if name == "quantized":
        return {**record, "model": record["case"], "case": f"{record['case']} {_size(record)}"}
    if "provider" in record and "case" in record:
        return record
    if "what" not in record:
        return {"case": f"to {record.get('dtype')} on {record.get('device')}"} | record
    named = record | {"case": f"{record['case']} batch {record['batch']}", "provider": record["what"]}
    if "tree" not in record["what"] and "step_ms" in record:  # tokens per tree step depend on the heads
        named["tokens_per_s"] = record["batch"] / record["step_ms"] * 1e3
    return named


def _size(record: Record) -> str:
    """The size in a record of `benchmarks.cases.quantized_decoding`, which its case does not name."""
    if "linear" in record:
        return record["linear"] + (f", {record['rows']} tokens" if "rows" in record else "")
    return f"tree of {record['tree']}" if "tree" in record else f"batch {record['batch']}"


def write(results: Path, gpu: str, out: Path) -> list[Path]:
    """Write the pages and the plots; returns their paths.

    Args:
        results: Folder of the results.
        gpu: Suffix of the result files, such as h200.
        out: Folder of the pages.
    """
    from benchmarks.reporting import plots, summary, tables

    found = read(results, gpu)
    out.mkdir(parents=True, exist_ok=True)
    drawn = plots.draw(found, out)
    page = out / "benchmark-tables.md"
    page.write_text(tables.page(found, drawn, left_out(results, gpu)), encoding="utf-8")
    front = out / "results.md"
    front.write_text(summary.page(found), encoding="utf-8")
    return [page, front, *(out / f"{name}.png" for name in drawn)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__)
    parser.add_argument("--gpu", default="h200", help="GPU of the results: the last part of the files' names")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder for pages and plots")
    arguments = parser.parse_args()
    print(*write(arguments.results, arguments.gpu, arguments.out), sep="\n")
    if arguments.out == DOCS:
        from benchmarks.reporting import summary

        summary.write_front(DOCS.parent / "README.md", read(arguments.results, arguments.gpu))
