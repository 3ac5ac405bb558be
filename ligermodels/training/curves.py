"""Curves of a run as a PNG, by matplotlib (optional)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ligermodels.training.folder import CURVES, METRICS
from ligermodels.training.metrics import VALIDATION

PANELS: Mapping[str, tuple[str, ...]] = {
    "loss": ("loss", f"{VALIDATION}loss"),
    "learning rate": ("learning_rate",),
    "gradient norm": ("grad_norm",),
    "tokens/s": ("tokens_per_second",),
}
"""Title of a panel -> metrics in it."""


def read_curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Metric of PANELS -> its points (step, value) in a metrics.jsonl."""
    names = [name for panel in PANELS.values() for name in panel]
    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    for line in path.read_bytes().splitlines():
        entry = json.loads(line)
        for name in names & entry.keys():
            curves[name].append((entry["step"], entry[name]))
    return curves


def draw_curves(folder: Path) -> str:
    """Draw curves.png from the metrics.jsonl in the folder of a run. Returns a message if it could not be drawn, and
    otherwise an empty string."""
    if find_spec("matplotlib") is None:
        return f"{CURVES}: not drawn, needs matplotlib: pip install 'ligermodels[plot]'"
    from matplotlib.figure import Figure  # pyplot would look for a display

    curves = read_curves(folder / METRICS)
    figure = Figure(figsize=(10, 6))
    figure.subplots_adjust(left=0.07, right=0.98, bottom=0.08, top=0.94, hspace=0.35, wspace=0.2)
    for axes, (title, names) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for name in names:
            if points := curves[name]:
                marker = "." if name.startswith(VALIDATION) else ""
                axes.plot(*zip(*points, strict=True), marker=marker, label=name.replace("_", " "))
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if len([name for name in names if curves[name]]) > 1:
            axes.legend(fontsize="small")
    try:
        write_figure(figure, folder / CURVES)
    except OSError as error:
        return f"{folder / CURVES}: cannot be written: {error}"
    return ""


def write_figure(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib as a PNG, completely or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        figure.savefig(partial, format="png")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
