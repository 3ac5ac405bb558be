"""docs/benchmark-tables.md: every target with its measured value, then the results of each benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.reporting.plots import BENCHMARK_OF
from benchmarks.reporting.recording import PACKAGES
from benchmarks.reporting.targets import latest, targets

Record = dict[str, Any]

TITLES = {
    "ops": "Ops",
    "attention": "Attention",
    "delta": "Gated DeltaNet",
    "training": "Training step",
    "mixtures": "Training step of mixtures and hybrids",
    "nativize": "Training step of transformers' models that compute natively",
    "decoding": "Decoding",
    "quantized": "Decoding with quantised weights",
    "medusa": "Medusa",
    "demo": "The GPU demo",
    "loading": "Loading",
    "float8-loss": "Loss curves of float8 and of 8-bit states",
}
COLUMNS = {
    "ops": (
        *("forward_ms", "both_ms", "forward_of_copy", "both_of_copy", "forward_row_of_copy", "both_row_of_copy"),
        *("both_of_copy_at_size", "both_limit_ms", "both_of_limit", "eager_us", "graph_us", "peak_mib"),
        *("beyond_gradients_mib", "error"),
    ),
    "attention": (
        *("backend", "forward_ms", "both_ms", "forward_tflops", "backward_tflops", "best_forward", "best_both"),
        "error",
    ),
    "delta": ("us", "both_ms", "of_copy", "projections_tflops", "peak_mib"),
    "training": (
        *(
            "step_ms",
            "tokens_per_s",
            "peak_gib",
            "floor_ms",
            "of_floor",
            "recompute",
            "activation_checkpointing",
            "in_backward",
            "error",
        ),
        "profile_ms",
    ),
    "mixtures": ("step_ms", "tokens_per_s", "tflops", "peak_gib", "error"),
    "nativize": ("step_ms", "tokens_per_s", "peak_gib"),
    "decoding": ("step_ms", "tokens_per_s", "of_limit", "of_plain"),
    "quantized": ("step_ms", "tokens_per_s", "ms", "of_limit", "error"),
    "medusa": ("step_ms", "tokens_per_s", "peak_gib", "held_gib", "gradients_gib", "floor_ms", "of_floor", "loss"),
    "demo": ("speed_up", "tokens_per_step", "tree", "plain_seconds", "seconds", "same", "prompts", "float32_same"),
    "loading": ("load_s", "ready_s", "host_peak_bytes", "host_after_bytes"),
    "float8-loss": ("held_out_loss", "tokens", "epochs", "parameters", "peak_gib"),
}
"""Columns of each benchmark; columns without a value are left out."""

HEAD = """# All cases

`python -m benchmarks report` writes this page from the last record of each case and provider in `benchmarks/results/`.
`python -m benchmarks NAME --help` explains cases and columns, and [Method](benchmarks.md) which records are compared.
[Results](results.md) has the main rows. Ratios compare the last run of both sides.
"""

TARGETS = """## Targets

`limit` is the lower or upper bound that the same run measured; it is empty if the record has none.

- Memory-bound ops: a kernel that only moves the same number of bytes, once per pass.
- Linear losses: their GEMMs with one read and one write of the logits at the copy rate. Memory: the float32 sum of a
  weight's gradient, beyond the gradient, with the logits of 128 rows.
- Training steps, in tokens/s: the minimal step of `--roofline`, timed before them.
"""


def cell(value: Any, digits: int = 3) -> str:
    """A value as text; numbers with `digits` significant digits."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {cell(part, digits)}" for name, part in value.items())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return {True: "yes", False: "", None: ""}.get(value, str(value))
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines) + "\n"


def _origin(records: list[Record]) -> str:
    """GPU, versions and commits of records."""
    keys = ("gpu", *PACKAGES, "commit", "date", "measure")
    found = {key: dict.fromkeys(str(r[key]) for r in records if key in r) for key in keys}
    parts = [
        *found["gpu"],
        *(f"{key} {' and '.join(values)}" for key, values in found.items() if values and key != "gpu"),
    ]
    return "; ".join(parts)


def _results(name: str, records: list[Record]) -> str:
    columns = [c for c in COLUMNS[name] if any(r.get(c) not in (None, "", False) for r in records)]
    failed = any("failed" in r for r in records)
    rows = [
        [r["case"], r["provider"], *(cell(r.get(c)) for c in columns), *([r.get("failed", "")[:80]] if failed else [])]
        for r in records
    ]
    return table(["case", "provider", *columns, *(["failed"] if failed else [])], rows)


def page(found: Mapping[str, list[Record]], drawn: list[str], left_out: Sequence[str] = ()) -> str:
    """The page.

    Args:
        found: Records of each benchmark.
        drawn: Names of the pictures in the folder of the page.
        left_out: Messages about records that are not reported.
    """
    rows = [
        [t.what, f"{t.sign} {t.bound:g}", cell(t.measured, 4), "yes" if t.met else "**no**", cell(t.limit)]
        for t in targets(found)
    ]
    missing = ["Not reported:\n", *(f"- {reason}" for reason in left_out), ""] if left_out else []
    parts = [HEAD, *missing, TARGETS, table(("what", "target", "measured", "met", "limit"), rows)]
    for name, every in found.items():
        if records := latest(every):
            parts += [f"## {TITLES[name]}\n", f"{_origin(records)}.\n"]
            parts += [f"![{p}]({p}.png)\n" for p in drawn if BENCHMARK_OF[p] == name]
            parts += [_results(name, records)]
    return "\n".join(parts)
