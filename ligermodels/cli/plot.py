"""A plot of the scores of Medusa heads, by matplotlib (optional)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ligermodels.errors import BackendError, InputError
from ligermodels.training.metrics import write_figure

RATES = {
    "expected_tokens_per_step": "if heads err\nindependently",
    "predicted_tokens_per_step": "predicted",
    "tokens_per_step": "measured",
}


def require_plotting(path: Path) -> None:
    """Raise BackendError without matplotlib, InputError if `path` cannot be written or is not a .png."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendError("a plot needs matplotlib: pip install 'ligermodels[plot]'")
    if path.suffix.lower() != ".png":
        raise InputError(f"{path}: the plot is a PNG; give a name that ends in .png")
    if not path.parent.is_dir() or path.is_dir():
        raise InputError(f"{path}: {'is a folder' if path.is_dir() else 'its folder does not exist'}")


def plot_scores(path: Path, scores: Mapping[str, Any]) -> None:
    """Plot results of `medusa eval --json`: top-k accuracy of each head, and tokens per step. Written atomically."""
    from matplotlib.figure import Figure  # pyplot would look for a display

    figure = Figure(figsize=(10, 4), dpi=150, layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=(2, 1))
    for key, style in (("own_accuracies", "-"), ("accuracies", "--")):
        table = scores.get(key, {})
        for head in range(len(scores["losses"])):
            curves.plot(
                list(table),
                [row[head] for row in table.values()],
                style,
                color=f"C{head % 10}",
                marker=".",
                markersize=5,
            )
    for head in range(len(scores["losses"])):
        curves.plot([], [], color=f"C{head % 10}", label=f"head {head}, t+{head + 2}")
    for style, text in (("-", "the model's own text"), ("--", "given text")):
        curves.plot([], [], style, color="grey", label=text)
    curves.set(xlabel="k", ylabel="top-k accuracy", ylim=(0, 1), xticks=list(scores["accuracies"]))
    curves.grid(alpha=0.3)
    curves.legend(fontsize="small")

    rates = {**scores, **scores.get("generation", {})}
    shown = {label: rates[key] for key, label in RATES.items() if key in rates}
    drawn = bars.bar(list(shown), list(shown.values()), color="C0")
    bars.bar_label(drawn, fmt="%.2f")
    bars.axhline(1, color="grey", linestyle=":", label="plain decoding")
    bars.margins(y=0.25)
    title = f"tokens per step, tree of {len(scores['tree'])} nodes"
    if "generation" in scores:
        title += f"\n{rates['speed_up']:.2f} times as fast as plain decoding"
    bars.set_title(title, fontsize="medium")
    bars.legend(fontsize="small", loc="upper right")

    write_figure(figure, path)
