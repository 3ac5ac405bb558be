"""`python -m benchmarks.report`: the recorded results as plots, docs/training.png and docs/ops.png."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent
RESULTS, PAGES = ROOT / "results", ROOT.parent / "docs"

Record = dict[str, Any]


def read(name: str) -> list[Record]:
    """The records of a file of results, the last of each case and provider."""
    lines = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return list({(r["case"], r["provider"]): r for r in map(json.loads, lines)}.values())


def bars(axes: Any, records: list[Record], value: Callable[[Record], float | None], title: str) -> None:
    """A group of bars for each case, one for each provider that has a value there."""
    cases, providers = (list(dict.fromkeys(r[key] for r in records)) for key in ("case", "provider"))
    height = 0.8 / len(providers)
    for place, provider in enumerate(providers):
        found = [(cases.index(r["case"]), value(r)) for r in records if r["provider"] == provider]
        known = [(row, width) for row, width in found if width is not None]
        axes.barh([row + place * height for row, _ in known], [width for _, width in known], height, label=provider)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(cases))], cases)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10)
    axes.grid(axis="x", alpha=0.3)


def save(name: str, axes: Any) -> None:
    """Write the figure with one legend."""
    axes.legend(fontsize=8)
    axes.figure.tight_layout()
    axes.figure.savefig(PAGES / f"{name}.png", dpi=120)


def main() -> None:
    """Draw all plots."""
    records = read("training-h200")
    _, (left, right) = plt.subplots(1, 2, figsize=(12, 5), sharey=True)
    bars(left, records, lambda r: r.get("tokens_per_s"), "full fine-tuning, tokens/s")
    bars(right, records, lambda r: r.get("peak_gib"), "peak memory, GiB")
    save("training", right)

    records = [r for r in read("ops-h200") if "both_of_copy" in r]
    _, axes = plt.subplots(1, 1, figsize=(9, 9))
    bars(axes, records, lambda r: r["both_of_copy"], "forward + backward, share of the device copy rate")
    save("ops", axes)


if __name__ == "__main__":
    main()
