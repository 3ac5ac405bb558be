"""Pictures of loss curves of two providers: held-out loss by seed, and its difference beside the spread of seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

Record = dict[str, Any]


class Comparison(NamedTuple):
    """Two providers; `baseline` has the spread of seeds."""

    baseline: str
    other: str

    @property
    def names(self) -> tuple[str, str]:
        """The providers' short names."""
        return self.baseline.removeprefix("ligermodels "), self.other.removeprefix("ligermodels ")


COMPARISONS = {
    "float8-loss": Comparison("ligermodels bf16", "ligermodels float8"),
    "adamw8bit-loss": Comparison("ligermodels adamw", "ligermodels adamw8bit"),
    "muon8bit-loss": Comparison("ligermodels muon", "ligermodels muon8bit"),
}
"""Name of a picture -> its comparison; the records of all are those of the benchmark float8-loss."""
COLOURS = ("#1f77b4", "#d62728")
SAME = ("tokens", "parameters", "layers", "data")
"""Fields that must be equal in compared runs."""


def of_seeds(
    records: Sequence[Record], comparison: Comparison = COMPARISONS["float8-loss"]
) -> dict[int, dict[str, list[tuple[float, float]]]]:
    """Seed -> provider -> tokens and held-out losses, of seeds with finished runs of both providers, on the data and
    with the sizes of the last record."""
    records = [record for record in records if record["provider"] in comparison]
    if not records:
        return {}
    seeds: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for record in records:  # losses, unlike times, compare between runs
        if all(record[key] == records[-1][key] for key in SAME):
            curves = seeds.setdefault(record["seed"], {})
            curves.pop(record["provider"], None)  # a failed run replaces an earlier run
            if "failed" not in record:
                curves[record["provider"]] = [(tokens, held_out) for tokens, _, held_out in record["points"]]
    return {seed: curves for seed, curves in sorted(seeds.items()) if {*comparison} <= curves.keys()}


def spreads(curves: Iterable[Sequence[tuple[float, float]]]) -> list[float]:
    """Highest minus lowest loss of the seeds, at each point."""
    return [max(losses) - min(losses) for losses in zip(*([y for _, y in curve] for curve in curves), strict=True)]


def of_spread(records: Sequence[Record], comparison: Comparison = COMPARISONS["float8-loss"]) -> float | None:
    """|mean final loss of the other provider - mean of the baseline| / spread of the baseline's seeds; None with fewer
    than three seeds."""
    found = of_seeds(records, comparison)
    if len(found) < 3:
        return None
    spread = spreads(curves[comparison.baseline] for curves in found.values())[-1]
    means = [mean(curves[provider][-1][1] for curves in found.values()) for provider in comparison]
    return abs(means[0] - means[1]) / spread if spread else None


def draw(records: Sequence[Record], path: Path, comparison: Comparison = COMPARISONS["float8-loss"]) -> None:
    """Write the picture of records that have at least one seed of both providers."""
    import matplotlib.pyplot as plt

    found, last = of_seeds(records, comparison), records[-1]
    baseline, other = comparison.names
    figure, (losses, differences) = plt.subplots(1, 2, figsize=(13, 4.6), layout="constrained")
    for i, (seed, curves) in enumerate(found.items()):
        options: dict[str, Any] = {"linestyle": ("-", "--", ":", "-.")[i % 4], "linewidth": 1.2}
        tokens = _millions(count for count, _ in curves[comparison.baseline])
        held_out = [[loss for _, loss in curves[provider]] for provider in comparison]
        for provider, values, colour in zip(comparison, held_out, COLOURS, strict=True):
            losses.plot(tokens, values, color=colour, label=f"{provider}, seed {seed}", **options)
        gaps = [b - a for a, b in zip(*held_out, strict=True)]
        differences.plot(tokens, gaps, color=COLOURS[1], label=f"{other} - {baseline}, seed {seed}", **options)
    if len(found) > 1:
        spread = spreads(curves[comparison.baseline] for curves in found.values())
        label = f"± spread of the seeds of {baseline} (highest - lowest)"
        low = [-each for each in spread]
        differences.fill_between(tokens, low, spread, color=COLOURS[0], alpha=0.2, linewidth=0, label=label)
    differences.axhline(0.0, color="black", linewidth=0.8)
    losses.set_ylabel("held-out loss, nats a token")
    differences.set_ylabel("difference of held-out losses")
    for axes in (losses, differences):
        axes.set_xlabel("millions of tokens")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    work = last["case"].partition(", seed")[0]
    figure.suptitle(f"{baseline} and {other}, {work}: {last.get('gpu')}, {last.get('date')}", fontsize=10)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _millions(tokens: Iterable[float]) -> list[float]:
    return [count / 1e6 for count in tokens]
