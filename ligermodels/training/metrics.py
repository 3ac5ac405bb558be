"""Metrics of a run: metrics.jsonl, trackers, and curves as a PNG by matplotlib (optional)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ligermodels.training.folder import CURVES, METRICS, named_in_errors, write_atomically
from ligermodels.training.reports import StepMetrics, Value, listed

if TYPE_CHECKING:
    from ligermodels.training.trackers import Tracker

VALIDATION = "validation_"
"""Prefix of the metrics of evaluations."""


class Metrics:
    """metrics.jsonl in the folder of a run: a line per step, per report and per evaluation. Trackers get the same.

    `evaluation` holds the metrics of the evaluation of step `after`, by name; empty if there was none.
    `names` are the names of all metrics of that step.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, after: int = 0, writes: bool = True, trackers: Sequence[Tracker] = ()
    ) -> None:
        """
        Args:
            folder: the folder of the run.
            after: the step to continue after; lines of later steps and incomplete lines are removed.
            writes: whether this rank writes; only one of several ranks does.
            trackers: get all metrics; "name/i" is element i of a list.
        """
        self._trackers = trackers
        self.evaluation: dict[str, Value] = {}
        self.names: set[str] = set()
        self._file: TextIO | None = None
        if not writes:
            return
        path = Path(folder) / METRICS
        lines = path.read_bytes().splitlines(keepends=True) if after and path.is_file() else []
        entries = [(line, _entry(line)) for line in lines]
        for _, entry in entries:
            if entry["step"] == after:
                names = [name for name in entry if name.startswith(VALIDATION)]
                found = {name.removeprefix(VALIDATION): _or_nan(entry[name]) for name in names}
                self.evaluation = found or self.evaluation
                self.names |= entry.keys()
        write_atomically(path, b"".join(line for line, entry in entries if entry["step"] <= after))
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Write `values` at `step`: numbers, or lists of numbers. NaN and infinity are no JSON: they are null in lists,
        else left out."""
        if self._file is None:
            return
        known = {name: value for name, value in values.items() if isinstance(value, list) or math.isfinite(value)}
        line = json.dumps({"step": step, **{name: _or_null(value) for name, value in known.items()}})
        with named_in_errors(Path(self._file.name)):
            self._file.write(line + "\n")
            self._file.flush()
        numbers: dict[str, float] = {}
        for name, value in known.items():
            numbers |= {f"{name}/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {name: value}
        for tracker in self._trackers:
            tracker.log({name: number for name, number in numbers.items() if math.isfinite(number)}, step)

    def write_report(self, report: StepMetrics) -> None:
        """Write each step of a report, then its speed, memory and ratios."""
        for one in report.each:
            values = {"loss": one.loss, **one.losses, "grad_norm": one.grad_norm, "learning_rate": one.learning_rate}
            self.write(one.step, {**values, **one.load})
        memory = {} if report.peak_memory is None else {"peak_memory": report.peak_memory}
        self.write(
            report.step, {"tokens_per_second": report.tokens_per_second, **memory, **report.ratios, **report.means}
        )

    def write_evaluation(self, step: int, values: Mapping[str, Value]) -> None:
        """Write metrics of the validation split."""
        self.write(step, {VALIDATION + name: value for name, value in values.items()})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with named_in_errors(Path(self._file.name)):
                self._file.close()


def _or_null(value: Value) -> Any:
    """The value as JSON, which has neither NaN nor infinity."""
    return [number if math.isfinite(number) else None for number in value] if isinstance(value, list) else value


def _or_nan(value: Any) -> Value:
    """The inverse of `_or_null`."""
    return [math.nan if number is None else number for number in value] if isinstance(value, list) else value


def _entry(line: bytes) -> dict[str, Any]:
    """The content of a line. An incomplete line gets step infinity."""
    try:
        entry: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {}
        return {**entry, "step": float(entry["step"])}
    except (ValueError, LookupError, TypeError):
        return {"step": math.inf}


SHOWN = (
    "rewards/margins", "reward", "reward_std", "kl", "completions/mean_length", "completions/clipped_ratio",
    "clip_ratio/region_mean", "tau", "greedy_tau",
)  # fmt: skip
"""Means of a report beside the progress bar, where the model has them."""


def progress_note(state: StepMetrics) -> str:
    """The text beside the progress bar."""
    parts = [
        f"loss {state.loss:.4f} (mean of {state.report_targets:,} {state.unit})",
        f"{state.tokens_per_second:,.0f} tokens/s",
    ]
    for name, value in state.each[-1].losses.items():
        if not isinstance(value, list):
            parts.append(f"{name.replace('_', ' ')} {value:.4f}")
    for name in SHOWN:
        if (mean := state.means.get(name)) is not None:
            parts.append(f"{name.replace('_', ' ')} {mean:.3f}")
    for name, value in state.ratios.items():
        parts.append(f"{name.replace('_', ' ')} {' '.join(shown_share(share) for share in listed(value))}")
    if state.peak_memory is not None:
        parts.append(f"peak memory {state.peak_memory / 2**30:.1f} GiB")
    return ", ".join(parts)


def evaluation_note(step: int, values: Mapping[str, Value]) -> str:
    """The line about metrics of the validation split: "step 100: validation loss 2.0794, perplexity 8.0000"."""
    parts = (f"{name.replace('_', ' ')} {' '.join(map(shown_number, listed(value)))}" for name, value in values.items())
    return f"step {step:,}: validation {', '.join(parts)}"


def shown_number(value: float) -> str:
    """A number with four decimals; above a million, such as the perplexity of an untrained model, with four digits; a
    dash for NaN."""
    if math.isnan(value):
        return "-"
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def shown_share(value: float, decimals: int = 0) -> str:
    """A share in per cent, or a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:.{decimals}%}"


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
