"""Picture of loss curves in bf16 and float8: held-out loss by seed, and its difference beside the spread of seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

Record = dict[str, Any]
BF16, FLOAT8 = "ligermodels bf16", "ligermodels float8"
COLOURS = {BF16: "#1f77b4", FLOAT8: "#d62728"}
SAME = ("tokens", "parameters", "layers", "data")
"""Fields that must be equal in compared runs."""


def of_seeds(records: Sequence[Record]) -> dict[int, dict[str, list[tuple[float, float]]]]:
    """Seed -> provider -> tokens and held-out losses, of seeds with finished runs in both formats, on the data and with
    the sizes of the last record."""
    if not records:
        return {}
    seeds: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for record in records:  # losses, unlike times, compare between runs
        if all(record[key] == records[-1][key] for key in SAME):
            curves = seeds.setdefault(record["seed"], {})
            curves.pop(record["provider"], None)  # a failed run replaces an earlier run
            if "failed" not in record:
                curves[record["provider"]] = [(tokens, held_out) for tokens, _, held_out in record["points"]]
    return {seed: curves for seed, curves in sorted(seeds.items()) if {BF16, FLOAT8} <= curves.keys()}


def spreads(curves: Iterable[Sequence[tuple[float, float]]]) -> list[float]:
    """Highest minus lowest loss of the seeds, at each point."""
    return [max(losses) - min(losses) for losses in zip(*([y for _, y in curve] for curve in curves), strict=True)]


def of_spread(records: Sequence[Record]) -> float | None:
    """|mean final loss in float8 - mean in bf16| / spread of the seeds in bf16; None with fewer than three seeds."""
    found = of_seeds(records)
    if len(found) < 3:
        return None
    spread = spreads(curves[BF16] for curves in found.values())[-1]
    means = [mean(curves[provider][-1][1] for curves in found.values()) for provider in (FLOAT8, BF16)]
    return abs(means[0] - means[1]) / spread if spread else None


def draw(records: Sequence[Record], path: Path) -> None:
    """Write the picture of records that have at least one seed in both formats."""
    import matplotlib.pyplot as plt

    found, last = of_seeds(records), records[-1]
    figure, (losses, differences) = plt.subplots(1, 2, figsize=(13, 4.6), layout="constrained")
    for i, (seed, curves) in enumerate(found.items()):
        options: dict[str, Any] = {"linestyle": ("-", "--", ":", "-.")[i % 4], "linewidth": 1.2}
        tokens = _millions(count for count, _ in curves[BF16])
        held_out = {provider: [loss for _, loss in curves[provider]] for provider in (BF16, FLOAT8)}
        for provider, values in held_out.items():
            losses.plot(tokens, values, color=COLOURS[provider], label=f"{provider}, seed {seed}", **options)
        gaps = [b - a for a, b in zip(*held_out.values(), strict=True)]
        differences.plot(tokens, gaps, color=COLOURS[FLOAT8], label=f"float8 - bf16, seed {seed}", **options)
    if len(found) > 1:
        spread = spreads(curves[BF16] for curves in found.values())
        label = "± spread of bf16's seeds (highest - lowest)"
        low = [-each for each in spread]
        differences.fill_between(tokens, low, spread, color=COLOURS[BF16], alpha=0.2, linewidth=0, label=label)
    differences.axhline(0.0, color="black", linewidth=0.8)
    losses.set_ylabel("held-out loss, nats a token")
    differences.set_ylabel("difference of held-out losses")
    for axes in (losses, differences):
        axes.set_xlabel("millions of tokens")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    work = last["case"].partition(", seed")[0]
    figure.suptitle(f"bf16 and float8, {work}: {last.get('gpu')}, {last.get('date')}", fontsize=10)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _millions(tokens: Iterable[float]) -> list[float]:
    return [count / 1e6 for count in tokens]
