"""Pictures of results: for each case the speed of every provider relative to the fastest peer of the same run.

All pictures share this axis, logarithmic for large ranges, and one colour per provider. Records of different runs are
never compared: a case shows the last run with the most peers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.reporting import loss_curves, speed_ups
from benchmarks.reporting.runs import broadest_run, is_float8, is_peer

Record = dict[str, Any]


class Panel(NamedTuple):
    """A compared value: the first of `keys` that all records of a run have. `lower`: smaller values are better."""

    keys: tuple[str, ...]
    title: str
    lower: bool = False


class Plot(NamedTuple):
    """A picture of a benchmark's records that `keep` accepts. `reference`: the provider at 1; the best peer if None."""

    benchmark: str
    panels: tuple[Panel, ...]
    keep: Callable[[Record], bool] = lambda record: True
    reference: str | None = None


SPEED = Panel(("tokens_per_s",), "speed: tokens/s")
MEMORY = Panel(("peak_gib",), "memory: peak, GiB", lower=True)
PLOTS = {
    "ops": Plot(
        "ops",
        (
            Panel(("forward_row_of_copy", "forward_of_copy"), "speed: forward, share of the copy rate"),
            Panel(("both_row_of_copy", "both_of_copy"), "speed: forward + backward, share of the copy rate"),
        ),
        lambda record: " 16384x" in record["case"] and "both_of_copy" in record,
    ),
    "small": Plot(
        "ops",
        (
            Panel(("eager_us",), "speed: forward + backward called from Python, µs", lower=True),
            Panel(("graph_us",), "speed: in a CUDA graph, µs", lower=True),
        ),
        lambda record: record["case"].startswith("small "),
    ),
    "attention": Plot(
        "attention",
        (
            Panel(("forward_tflops",), "speed: forward, TFLOP/s"),
            Panel(("backward_tflops",), "speed: backward, TFLOP/s"),
        ),
    ),
    "training": Plot(
        "training",
        (SPEED, MEMORY),
        lambda record: record["provider"] != "bare step" and not is_float8(record["provider"]),
    ),
    "float8": Plot(
        "training",
        (SPEED, MEMORY),
        lambda record: record["provider"] == "ligermodels" or is_float8(record["provider"]),
        reference="ligermodels",
    ),
    "nativize": Plot("nativize", (SPEED, MEMORY)),
    "decoding": Plot("decoding", (Panel(("step_ms",), "speed: a decoding step, ms", lower=True),), reference="gemms"),
    "quantized": Plot(
        "quantized", (Panel(("step_ms",), "speed: a decoding step, ms", lower=True),), reference="ligermodels bf16"
    ),
    "medusa": Plot("medusa", (SPEED, MEMORY), lambda record: not is_float8(record["provider"])),
}
"""Name of a picture -> its content."""
REFERENCES = {"gemms": "the GEMMs alone", "ligermodels": "ours in bf16", "ligermodels bf16": "ours in bf16"}
"""Reference provider -> its description."""
BENCHMARK_OF = {
    **{name: plot.benchmark for name, plot in PLOTS.items()},
    "demo": "demo",
    **dict.fromkeys(loss_curves.COMPARISONS, "float8-loss"),
}
"""Name of a picture -> its benchmark."""

COLOURS = {
    "ligermodels": "#d62728",
    "ligermodels + torch.compile": "#ff9896",
    "ligermodels bf16": "#d62728",
    "ligermodels float8": "#2ca02c",
    "ligermodels + float8": "#2ca02c",
    "ligermodels int4": "#17becf",
    "ligermodels float8, head float8": "#98df8a",
    "ligermodels int4, head float8": "#1f77b4",
    "ligermodels int4, head int4": "#9467bd",
    "ligermodels shared": "#8c1b1b",
    "ligermodels stage 2": "#c49c94",
    "ligermodels without a graph": "#ff9896",
    "medusa tree step": "#8c1b1b",
    "transformers + nativize": "#e377c2",
    "liger": "#1f77b4",
    "liger_cloned": "#9ecae1",
    "transformers + liger": "#1f77b4",
    "torch": "#ff7f0e",
    "torch_fused": "#8c564b",
    "torch_chunked": "#bcbd22",
    "torch.compile": "#9467bd",
    "transformers": "#ff7f0e",
    "transformers + torch.compile": "#9467bd",
    "transformers + torchao float8 + torch.compile": "#5254a3",
    "quack": "#2ca02c",
    "flash-attn-4": "#17becf",
    "varlen": "#bcbd22",
    "triton": "#e377c2",
    "sdpa cudnn": "#1b9e77",
    "sdpa flash": "#7f7f7f",
    "gemms": "#000000",
}
"""Provider -> colour in all pictures. Plain transformers has the colour of eager torch."""
OTHER = "#aaaaaa"


class Group(NamedTuple):
    """The records of a case in one run, one for each provider."""

    case: str
    records: list[Record]


def groups(plot: Plot, records: list[Record]) -> list[Group]:
    """The cases with at least two comparable records."""
    kept = [r for r in records if plot.keep(r)]
    shown = []
    for case in dict.fromkeys(r["case"] for r in kept):
        for key in plot.panels[0].keys:
            group = Group(case, broadest_run((r for r in kept if r["case"] == case), key))
            if ratios(plot, plot.panels[0], group)[0]:
                shown.append(group)
                break
    return shown


def ratios(plot: Plot, panel: Panel, group: Group) -> tuple[dict[str, float], str]:
    """Provider -> ratio to the reference, above 1 if better; and the values of ours and of the reference as text.

    Args:
        plot: The picture, with its reference.
        panel: The compared value.
        group: Records of one case. Without two comparable records the result is empty.
    """
    values = _values(panel, group)
    peers = [v for p, v in values.items() if (is_peer(p) if plot.reference is None else p == plot.reference)]
    if len(values) < 2 or not peers:
        return {}, ""
    best = min(peers) if panel.lower else max(peers)
    named = [p for p in values if p.startswith("ligermodels") or p.endswith("nativize")]
    ours = next((values[p] for p in named if p != plot.reference), None)
    text = " · ".join(_number(value) for value in (ours, best) if value is not None)
    return {p: best / value if panel.lower else value / best for p, value in values.items()}, text


def _values(panel: Panel, group: Group) -> dict[str, float]:
    """Provider -> its value in a panel."""
    records = [r for r in group.records if any(key in r for key in panel.keys)]
    key = next((key for key in panel.keys if all(key in r for r in records)), None)
    return {r["provider"]: float(r[key]) for r in records} if key is not None else {}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw(found: Mapping[str, list[Record]], folder: Path) -> list[str]:
    """Write the pictures of all benchmarks with results; returns their names."""
    drawn = []
    for name, plot in PLOTS.items():
        if shown := groups(plot, found.get(plot.benchmark, [])):
            _picture(name, plot, shown, folder / f"{name}.png")
            drawn.append(name)
    if records := found.get("demo"):
        speed_ups.draw(records, folder / "demo.png")
        drawn.append("demo")
    for name, comparison in loss_curves.COMPARISONS.items():
        if loss_curves.of_seeds(records := found.get("float8-loss", []), comparison):
            loss_curves.draw(records, folder / f"{name}.png", comparison)
            drawn.append(name)
    return drawn


def _picture(name: str, plot: Plot, shown: list[Group], path: Path) -> None:
    figure, panels = plt.subplots(
        1, len(plot.panels), figsize=(7 * len(plot.panels) + 1.5, 1.9 + 0.24 * len(shown)), squeeze=False, sharey=True,
        layout="constrained",
    )  # fmt: skip
    for axes, panel in zip(panels[0], plot.panels, strict=True):
        _draw_panel(axes, plot, panel, shown)
    panels[0][0].set_yticks(range(len(shown)), [group.case for group in shown], fontsize=8)
    panels[0][0].set_ylim(len(shown) - 0.5, -0.5)
    of = "the best peer" if plot.reference is None else REFERENCES[plot.reference]
    figure.suptitle(f"{name}, over {of} of the same run (at 1; right of it is better): {origin(shown)}", fontsize=10)
    entries = {label: dot for axes in panels[0] for dot, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw_panel(axes: Axes, plot: Plot, panel: Panel, shown: list[Group]) -> None:
    texts, reached = [], [1.0]
    providers = dict.fromkeys(r["provider"] for group in shown for r in group.records)
    places: dict[str, list[tuple[float, int]]] = {provider: [] for provider in providers}
    for y, group in enumerate(shown):
        found, text = ratios(plot, panel, group)
        texts.append(text)
        reached += found.values()
        for provider, ratio in found.items():
            places[provider].append((ratio, y))
    for provider, dots in places.items():
        ours = not is_peer(provider)
        axes.scatter(
            [x for x, _ in dots], [y for _, y in dots], s=46 if ours else 30, marker="D" if ours else "o",
            color=COLOURS.get(provider, OTHER), label=provider, zorder=3 if ours else 2, alpha=0.9,
        )  # fmt: skip
    axes.axvline(1.0, color="black", linewidth=0.8, zorder=1)
    if max(reached) / min(reached) > 3:
        axes.set_xscale("log", base=2)
    else:
        axes.set_xlim(min(0.8, min(reached) - 0.03), max(1.2, max(reached) + 0.03))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.3g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_title(f"{panel.title}\n(numbers: ours · reference)", fontsize=9)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(shown)), texts, fontsize=7)
    right.tick_params(length=0)


def origin(shown: list[Group]) -> str:
    """GPU and dates of the records."""
    records = [r for group in shown for r in group.records]
    gpus = dict.fromkeys(str(r["gpu"]) for r in records if "gpu" in r)
    dates = sorted({str(r["date"]) for r in records if r.get("date")})
    span = [] if not dates else [dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"]
    return ", ".join([*gpus, *span]) or "GPU not recorded"
