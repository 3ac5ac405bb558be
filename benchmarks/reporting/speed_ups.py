"""Picture of the GPU demo: speed-up by batch size, greedy and typical."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.reporting.runs import last_run

Record = dict[str, Any]
COLOURS = {1: "#ff7f0e", 2: "#d62728"}
"""Stage of training -> colour."""
STYLES = {"greedy": "-", "typical": "--"}


def _sorted(records: Sequence[Record]) -> list[Record]:
    last = {r["case"]: r for r in last_run(records)}
    return sorted(last.values(), key=lambda r: (r["stage"], r["acceptance"], r["batch"]))


def lines(records: Sequence[Record]) -> dict[tuple[int, str], list[tuple[int, float]]]:
    """(stage, acceptance) -> batch sizes and speed-ups of the last run."""
    curves: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for r in _sorted(records):
        curves.setdefault((r["stage"], r["acceptance"]), []).append((r["batch"], float(r["speed_up"])))
    return curves


def draw(records: Sequence[Record], path: Path) -> None:
    """Write the picture."""
    shown = _sorted(records)
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for (stage, acceptance), points in lines(records).items():
        axes.plot(
            [x for x, _ in points], [y for _, y in points], STYLES[acceptance], marker="o", color=COLOURS[stage],
            label=f"stage {stage}, {acceptance}",
        )  # fmt: skip
    batches = sorted({r["batch"] for r in shown})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch size")
    axes.set_ylabel("wall time without heads / with heads")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    size = shown[0]["parameters"] / 1e6
    axes.set_title(f"Medusa, {size:.0f} M parameters: {shown[0].get('gpu')}, {shown[0].get('date')}", fontsize=10)
    figure.savefig(path, dpi=100)
    plt.close(figure)
