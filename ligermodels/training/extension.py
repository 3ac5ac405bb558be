"""Extending a run: more steps on resuming than it had before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ligermodels.errors import ConfigError


def check_longer(steps: int, before: int) -> None:
    """Raises ConfigError where a run of `before` steps would have fewer."""
    if steps < before:
        raise ConfigError(
            f"steps: the run has {before:,}, and would have {steps:,}; a run that resumes can be extended, not "
            "shortened"
        )


def warmup_steps(given: int | None, steps: int, about: Mapping[str, Any]) -> int:
    """Steps of warm-up: as given, else those that the run `about` began with, so that a longer one does not warm up
    again; else 40, at most a tenth of all."""
    if given is not None:
        return given
    default = min(40, about.get("steps", steps) // 10)
    return int(about.get("warmup_steps", default))


def continue_schedule(
    schedule: LambdaLR,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    *,
    steps: int,
    before: int,
    say: Callable[[str], object],
) -> None:
    """Continue the schedule from `state`. Of a run that had `before` steps, and now has more, the learning rates are
    those of the longer one from here on, which `say` tells."""
    schedule.load_state_dict(dict(state))
    if steps == before:
        return
    groups, done = optimizer.param_groups, schedule.last_epoch
    rate = groups[0]["lr"]
    for group, base, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = base * factor(done)
    say(
        f"extended from {before:,} to {steps:,} steps: from step {done + 1:,} on the schedule is that of {steps:,} "
        f"steps (learning rate {groups[0]['lr']:.3g}, was {rate:.3g}). The steps before had that of {before:,}, so the "
        f"result is not that of {steps:,} steps at once"
    )
