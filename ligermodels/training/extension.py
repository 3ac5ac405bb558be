"""Extending a run: more steps on resuming than it had before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ligermodels.errors import ConfigError


def check_longer(steps: int, steps_before: int) -> None:
    """Raise ConfigError if `steps` is less than the steps that the run had before."""
    if steps < steps_before:
        raise ConfigError(
            f"steps: the run has {steps_before:,}, and would have {steps:,}; a run that resumes can be extended, not "
            "shortened"
        )


def warmup_steps(recipe_steps: int | None, steps: int, checkpoint: Mapping[str, Any]) -> int:
    """Steps of linear warm-up.

    Args:
        recipe_steps: the setting of the recipe; None for the default: 40, at most a tenth of all steps.
        steps: steps of the run.
        checkpoint: run.json of the checkpoint to resume from; empty for a new run. An extended run keeps the default
            that it started with, so that it does not warm up again.
    """
    if recipe_steps is not None:
        return recipe_steps
    default = min(40, checkpoint.get("steps", steps) // 10)
    return int(checkpoint.get("warmup_steps", default))


def continue_schedule(
    schedule: LambdaLR,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    *,
    steps: int,
    steps_before: int,
    say: Callable[[str], object],
) -> None:
    """Continue the schedule from `state`. An extended run has the learning rates of the longer run from here on.

    Args:
        schedule: the schedule of the whole run.
        optimizer: its optimizer.
        state: state dict of the schedule.
        steps: steps of the run.
        steps_before: steps that it had before it was extended.
        say: called with a message about the extension.
    """
    schedule.load_state_dict(dict(state))
    if steps == steps_before:
        return
    groups, done = optimizer.param_groups, schedule.last_epoch
    rate = groups[0]["lr"]
    for group, base, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = base * factor(done)
    say(
        f"extended from {steps_before:,} to {steps:,} steps: from step {done + 1:,} on the learning-rate schedule is "
        f"the schedule of {steps:,} steps (learning rate {groups[0]['lr']:.3g}, was {rate:.3g}), so the result differs "
        f"from a single run of {steps:,} steps"
    )
