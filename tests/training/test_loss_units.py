"""The number behind a printed loss is that of the terms of its mean: targets, pairs or completions."""

import math
from pathlib import Path
from typing import Any

import pytest
from runs import make_pairs

from ligermodels.training import Callback, FineTuningRecipe, StepMetrics, fine_tune
from ligermodels.training.metrics import progress_note

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLED = {"objective": "grpo", "reward": "lengths:reward", "num_generations": 2, "max_completion_length": 4}


class Reports(Callback):
    def __init__(self) -> None:
        self.all: list[StepMetrics] = []

    def on_report(self, metrics: StepMetrics) -> None:
        self.all.append(metrics)


@pytest.mark.parametrize(
    ("settings", "unit", "total"),
    [
        ({"objective": "dpo"}, "pairs", 23),  # of 24, one is too long
        ({"objective": "kto"}, "completions", 46),
        ({**SAMPLED, "loss_type": "dr_grpo"}, "completions", 16),
        (SAMPLED, "targets", None),
    ],
)
def test_the_loss_of_a_report_is_the_mean_over_its_units(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], unit: str, total: int | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lengths.py").write_text("def reward(completion_ids, **_):\n    return [ids[0] for ids in completion_ids]\n")
    Path("prompts.jsonl").write_text("".join(f'{{"prompt": "say {i}"}}\n' for i in range(8)))
    make_pairs(Path("pairs.jsonl"))
    recipe = FineTuningRecipe(
        base=str(base),
        data="prompts.jsonl" if settings["objective"] == "grpo" else "pairs.jsonl",
        report_every=2,
        validation_fraction=0.0,
        seq_len=128,
        batch_tokens=128 if settings["objective"] == "kto" else 256,  # a row each step: the steps are one epoch
        dtype="float32",
        learning_rate=1e-3,
        track="none",
        **settings,
    )
    reports = Reports()
    fine_tune(recipe, "out", device="cpu", callbacks=[reports])
    for report in reports.all:
        weighted = math.fsum(step.loss * step.targets for step in report.each)
        assert report.loss == pytest.approx(weighted / report.report_targets)
    if total is None:  # the tokens of two completions in each step
        total = sum(round(2 * len(r.each) * r.means["completions/mean_length"]) for r in reports.all)  # type: ignore
    assert total == sum(report.report_targets for report in reports.all) == reports.all[-1].targets
    last = reports.all[-1]
    assert f"(mean of {last.report_targets} {unit})" in progress_note(last)
