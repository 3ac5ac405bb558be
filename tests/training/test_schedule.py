"""Learning-rate schedules: values by hand, those of transformers, and runs that are continued with another decay."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import losses, recipe_for

from ligermodels.errors import ConfigError, InputError
from ligermodels.training import Console, FineTuningRecipe, lr_schedule, schedule_factor, train_heads
from ligermodels.training.optimizer_settings import ScheduleName

HALF = math.sqrt(0.5)
BY_HAND: dict[str, tuple[dict[str, Any], list[float]]] = {
    "cosine": ({"min_lr_ratio": 0.0}, [0.5, 1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2, 0, 0]),
    "linear": ({"min_lr_ratio": 0.2}, [0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
    "constant": ({}, [0.5, 1, 1, 1, 1, 1, 1]),
    "wsd": ({"min_lr_ratio": 0.5, "decay_steps": 2}, [0.5, 1, 1, 1, 0.75, 0.5, 0.5]),
    "inverse_sqrt": ({}, [0.5, 1, math.sqrt(2 / 3), HALF, math.sqrt(2 / 5), math.sqrt(2 / 6), math.sqrt(2 / 7)]),
    "cosine_with_restarts": ({"min_lr_ratio": 0.0, "num_cycles": 2}, [0.5, 1, 0.5, 1, 0.5, 0, 0]),
}
"""Of 6 steps, of which 2 are warm-up, and of the step after the last."""


@pytest.mark.parametrize("name", BY_HAND)
def test_values_by_hand(name: ScheduleName) -> None:
    options, wanted = BY_HAND[name]
    found = [schedule_factor(step, name, 6, warmup_steps=2, **options) for step in range(7)]
    assert found == pytest.approx(wanted, abs=1e-15)


def test_decays_by_hand() -> None:
    for curve, wanted in (
        ("linear", [1, 0.75, 0.5, 0.25, 0]),
        ("cosine", [1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2, 0]),
        ("1-sqrt", [1, 0.5, 1 - HALF, 1 - math.sqrt(0.75), 0]),
    ):
        found = [schedule_factor(i, "wsd", 9, min_lr_ratio=0.0, decay_steps=4, decay_type=curve) for i in range(4, 9)]
        assert found == pytest.approx(wanted, abs=1e-15)
    assert [schedule_factor(i, "wsd", 10, min_lr_ratio=0.0) for i in range(6, 10)] == [1, 1, 0.5, 0]  # by default
    assert [schedule_factor(i, "wsd", 4, decay_steps=0) for i in range(5)] == [1] * 5


@pytest.mark.parametrize("warmup", [0, 7])
def test_those_of_transformers(warmup: int) -> None:
    """Step i has the factor that transformers gives to step i + 1."""
    theirs: Any = pytest.importorskip("transformers.optimization")
    steps = {"num_training_steps": 40}
    for name, options, function, arguments in (
        ("cosine", {"min_lr_ratio": 0.0}, theirs.get_cosine_schedule_with_warmup, steps),
        ("cosine", {"min_lr_ratio": 0.3}, theirs.get_cosine_with_min_lr_schedule_with_warmup,
         {**steps, "min_lr_rate": 0.3}),
        ("linear", {"min_lr_ratio": 0.0}, theirs.get_linear_schedule_with_warmup, steps),
        ("constant", {}, theirs.get_constant_schedule_with_warmup, {}),
        ("inverse_sqrt", {}, theirs.get_inverse_sqrt_schedule, {}),
        ("cosine_with_restarts", {"min_lr_ratio": 0.0, "num_cycles": 3},
         theirs.get_cosine_with_hard_restarts_schedule_with_warmup, {**steps, "num_cycles": 3}),
        *(
            ("wsd", {"min_lr_ratio": 0.1, "decay_steps": 12, "decay_type": curve}, theirs.get_wsd_schedule,
             {**steps, "num_decay_steps": 12, "decay_type": curve, "min_lr_ratio": 0.1})
            for curve in ("linear", "cosine", "1-sqrt")
        ),
    ):  # fmt: skip
        optimizers = [torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0) for _ in range(2)]
        ours = lr_schedule(optimizers[0], name, 40, warmup_steps=warmup, **options)
        other = function(optimizers[1], num_warmup_steps=warmup, **arguments)
        rates: list[list[float]] = [[], []]
        for _ in range(41):
            for optimizer, schedule, found in zip(optimizers, (ours, other), rates, strict=True):
                found.append(schedule.get_last_lr()[0])
                optimizer.step()
                schedule.step()
        # With a least learning rate, transformers' warm-up of wsd begins there; ours is that of the other schedules.
        first = warmup if name == "wsd" else 0
        assert rates[0][first:-1] == pytest.approx(rates[1][first + 1 :], abs=1e-12), (name, options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "step"}, "schedule: must be one of cosine, linear, constant, wsd, .*, got 'step'"),
        ({"decay_type": "exp"}, "decay_type: must be one of linear, cosine, 1-sqrt, got 'exp'"),
        ({"decay_steps": 9}, "decay_steps: must be from 0 to the steps after the warm-up, 8, got 9"),
        ({"num_cycles": 0}, "num_cycles: must be a whole number of at least 1, got 0"),
        ({"num_cycles": 1.5}, "num_cycles: must be a whole number of at least 1, got 1.5"),
        ({"warmup_steps": 11}, "warmup_steps: must be at most 10, got 11"),
        ({"warmup_steps": 0.1}, "warmup_steps: must be a whole number of at least 0, got 0.1"),  # ten times the peak
        ({"steps": 10.5}, "steps: must be a whole number of at least 1, got 10.5"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio: must be from 0 to 1, got 1.5"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    options = {"schedule": "wsd", "steps": 10, "warmup_steps": 2, **options}
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    with pytest.raises(InputError, match=message):
        lr_schedule(optimizer, **options)
    assert "initial_lr" not in optimizer.param_groups[0]
    with pytest.raises(InputError, match=message):
        schedule_factor(0, **options)


# -- runs --------------------------------------------------------------------------------------------------------------


def rates(out: Path) -> list[float]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["learning_rate"] for line in lines if "learning_rate" in line]


def test_a_run_is_continued_into_a_decay_that_is_chosen_later(base: Path, data: Path, tmp_path: Path) -> None:
    """From the stable phase of wsd, in fewer steps or more; the result is that of a run that had it from the start."""
    common = {"schedule": "wsd", "warmup_steps": 2, "report_every": 1, "evaluate_every": None, "learning_rate": 1.0}
    stable = recipe_for(base, data, **common, steps=6, decay_steps=0, checkpoint_every=2)
    with pytest.raises(ConfigError, match="decay_steps: 5 is more than the 4 steps after the warm-up"):
        train_heads(stable.changed({"decay_steps": 5}), tmp_path / "none")
    out, said = tmp_path / "out", list[str]()
    assert train_heads(stable, out).finished and rates(out) == [0.5, 1, 1, 1, 1, 1]
    decayed = stable.changed({"steps": 9, "decay_steps": 2, "min_lr_ratio": 0.0, "decay_type": "1-sqrt"})
    assert train_heads(decayed, out, resume=True, console=Console(said.append)).finished
    assert rates(out) == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 1 - HALF, 0])
    assert [line for line in said if "so the result is that of a single run of 9 steps" in line]
    train_heads(decayed, tmp_path / "whole")
    assert losses(out) == losses(tmp_path / "whole")
    with pytest.raises(ConfigError, match="decay_type: was '1-sqrt', is 'linear': step 7 of the 9 steps"):
        train_heads(decayed.changed({"decay_type": "linear"}), out, resume=True)
    with pytest.raises(ConfigError, match="steps: the run has 9, and would have 8"):
        train_heads(decayed.changed({"steps": 8}), out, resume=True)


def test_a_stopped_run_decays_earlier_than_it_was_to(base: Path, data: Path, tmp_path: Path) -> None:
    common = {"schedule": "wsd", "warmup_steps": 0, "report_every": 1, "evaluate_every": None, "learning_rate": 1.0}
    recipe = recipe_for(base, data, **common, steps=12, decay_steps=4, min_lr_ratio=0.0, keep_checkpoints=9)
    out = tmp_path / "out"
    train_heads(recipe, out)
    for step in (6, 9, 12):  # as if it had been stopped after step 3
        shutil.rmtree(out / f"checkpoints/step-{step}")
    shorter = recipe.changed({"steps": 5, "decay_steps": 2})
    assert train_heads(shorter, out, resume=True).step == 5
    assert rates(out) == pytest.approx([1, 1, 1, 0.5, 0])
    with pytest.raises(ConfigError, match="steps: the run has 5, and would have 4"):
        train_heads(shorter.changed({"steps": 4}), out, resume=True)


def test_settings_that_have_no_effect_are_refused() -> None:
    for settings, message in (
        ({"decay_steps": 5}, "decay_steps: is for the schedule wsd; otherwise leave it out"),
        ({"decay_type": "cosine"}, "decay_type: is for the schedule wsd"),
        ({"num_cycles": 3}, "num_cycles: is for the schedule cosine_with_restarts"),
        ({"schedule": "constant", "min_lr_ratio": 0.5}, "min_lr_ratio: is for schedules that fall to it"),
        ({"schedule": "wsdd"}, "schedule: must be 'cosine', 'linear', "),
    ):
        with pytest.raises(ConfigError, match=message):
            FineTuningRecipe(**settings)
