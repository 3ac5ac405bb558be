"""Results as horizontal bars, providers side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.targets import latest

Record = dict[str, Any]


class Plot(NamedTuple):
    """A picture of the records of a benchmark that `keep` wants: a panel for each key of `panels`, with its title; the
    first key among several that a record has. `line`: where the limit is."""

    benchmark: str
    panels: dict[tuple[str, ...], str]
    keep: Callable[[Record], bool] = lambda record: True
    line: float | None = None


def _memory_bound(record: Record) -> bool:
    return " 16384x" in record["case"] and "both_of_copy" in record


PLOTS = {
    "ops": Plot(
        "ops",
        {
            ("forward_row_of_copy", "forward_of_copy"): "forward, share of the copy rate (in a row, where recorded)",
            ("both_row_of_copy", "both_of_copy"): "forward + backward, the same",
        },
        _memory_bound,
        1.0,
    ),
    "small": Plot(
        "ops",
        {("eager_us",): "forward + backward called from Python, µs", ("graph_us",): "in a CUDA graph, µs"},
        lambda record: record["case"].startswith("small "),
    ),
    "attention": Plot(
        "attention", {("forward_tflops",): "forward, TFLOP/s", ("backward_tflops",): "backward, TFLOP/s"}
    ),
    "training": Plot("training", {("tokens_per_s",): "full fine-tuning, tokens/s", ("peak_gib",): "peak memory, GiB"}),
    "decoding": Plot("decoding", {("step_ms",): "a decoding step, ms"}),
    "medusa": Plot("medusa", {("tokens_per_s",): "Medusa stage 1, tokens/s", ("peak_gib",): "peak memory, GiB"}),
}
"""Name of the picture -> what it shows."""


def _value(record: Record, keys: tuple[str, ...]) -> float | None:
    return next((float(record[key]) for key in keys if key in record), None)


def draw(found: Mapping[str, list[Record]], folder: Path) -> list[str]:
    """Write the pictures that there are results for; their names."""
    drawn = []
    for name, plot in PLOTS.items():
        kept = [r for r in latest(found[plot.benchmark]) if plot.keep(r)]
        kept = [r for r in kept if any(_value(r, keys) is not None for keys in plot.panels)]
        if kept:
            _picture(plot, kept, folder / f"{name}.png")
            drawn.append(name)
    return drawn


def _picture(plot: Plot, records: list[Record], path: Path) -> None:
    """Bars of one case stand together, in the order of the providers, with nothing where one is missing."""
    providers = sorted(dict.fromkeys(r["provider"] for r in records), key=lambda p: not p.startswith("ligermodels"))
    colours = {provider: f"C{index}" for index, provider in enumerate(providers)}
    places: list[tuple[float, Record]] = []
    ticks: dict[str, float] = {}
    top = 0.0
    for case in dict.fromkeys(r["case"] for r in records):
        group = sorted((r for r in records if r["case"] == case), key=lambda r: providers.index(r["provider"]))
        places += [(top + i, r) for i, r in enumerate(group)]
        ticks[case] = top + (len(group) - 1) / 2
        top += len(group) + 1
    figure, panels = plt.subplots(
        1, len(plot.panels), figsize=(13, 1.2 + 0.19 * top), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (keys, title) in zip(panels[0], plot.panels.items(), strict=True):
        for provider in providers:
            bars = [(y, _value(r, keys)) for y, r in places if r["provider"] == provider]
            known = [(y, value) for y, value in bars if value is not None]
            drawn = axes.barh([y for y, _ in known], [v for _, v in known], 1, label=provider, color=colours[provider])
            axes.bar_label(drawn, [f"{v:,.0f}" if v >= 100 else f"{v:.3g}" for _, v in known], fontsize=6, padding=2)
        if plot.line is not None:
            axes.axvline(plot.line, color="black", linewidth=0.8)
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.12)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    panels[0][0].set_yticks(list(ticks.values()), list(ticks), fontsize=8)
    panels[0][0].set_ylim(top - 0.5, -1)
    entries = {label: bar for axes in panels[0] for bar, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
