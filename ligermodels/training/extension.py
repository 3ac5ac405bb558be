"""Extending a run: more steps on resuming than it had before, or another decay of the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ligermodels.errors import ConfigError
from ligermodels.training.inputs import settings_before
from ligermodels.training.optimizer_settings import DECAY, schedule_options
from ligermodels.training.recipe import TrainingRecipe
from ligermodels.training.schedule import schedule_factor

LOSS_SCHEDULE = "heads_loss_weight_schedule"
"""Setting by which losses depend on the number of steps, as learning rates do, unless it is "constant"."""


def check_schedule(
    recipe: TrainingRecipe, steps: int, warmup_steps: int, start: int, checkpoint: Mapping[str, Any]
) -> bool:
    """Check the length and the schedule of a run, and of a run that resumes whether it may have them.

    A run that resumes may become longer. It may also become shorter, and change the settings in DECAY, if the learning
    rates of all steps that it took are those of the new schedule: in the stable phase of "wsd", or with "constant". A
    run does not become shorter if a LOSS_SCHEDULE gave its steps other losses.

    Args:
        recipe: the settings.
        steps: steps of the run.
        warmup_steps: its steps of linear warm-up.
        start: number of steps that were taken.
        checkpoint: run.json of the checkpoint to resume from; empty for a new run.

    Returns:
        Whether all steps that were taken had the learning rates and the losses of a run of this length.

    Raises:
        ConfigError: the decay is longer than the run, or the run may not become shorter or change its decay.
    """
    now = recipe.settings()
    if recipe.decay_steps is not None and recipe.decay_steps > steps - warmup_steps:
        raise ConfigError(
            f"decay_steps: {recipe.decay_steps:,} is more than the {steps - warmup_steps:,} steps after the warm-up"
        )
    if not checkpoint:
        return True
    before, steps_before = settings_before(recipe, checkpoint["recipe"]), checkpoint["steps"]
    old = _factors(before, steps_before, int(checkpoint.get("warmup_steps", warmup_steps)), start)
    new = _factors(now, steps, warmup_steps, start)
    differs = next((step for step in range(start) if old[step] != new[step]), None)
    keeps_rates = differs is None and steps >= start
    loss_schedule = now.get(LOSS_SCHEDULE, "constant")
    keeps_losses = loss_schedule == "constant" or steps == steps_before
    if keeps_rates and keeps_losses:
        return True
    if steps < steps_before:
        reason = f", with {LOSS_SCHEDULE} constant" if keeps_rates else ""
        raise ConfigError(
            f"steps: the run has {steps_before:,}, and would have {steps:,}; a run that resumes can be extended, and "
            f"only before the decay of a schedule wsd be shortened{reason}"
        )
    if keeps_rates:
        return False
    for name in sorted(DECAY):
        if now[name] != before[name]:
            raise ConfigError(
                f"{name}: was {before[name]!r}, is {now[name]!r}: step {differs} of the {start:,} steps that were "
                "taken would have had another learning rate; give the old value, or resume from a checkpoint before it"
            )
    return False


def _factors(settings: Mapping[str, Any], steps: int, warmup_steps: int, count: int) -> list[float]:
    """Factors of the learning rate in the first `count` steps of a run."""
    options = {"steps": steps, "warmup_steps": warmup_steps, **schedule_options(settings)}
    return [schedule_factor(step, **options) for step in range(count)]


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
    is_same: bool,
    say: Callable[[str], object],
) -> None:
    """Continue the schedule from `state`. An extended run has the learning rates of the longer run from here on.

    Args:
        schedule: the schedule of the whole run.
        optimizer: its optimizer.
        state: state dict of the schedule.
        steps: steps of the run.
        steps_before: steps that it had before it was extended.
        is_same: whether the steps taken are those of a run of `steps` steps; see `check_schedule`.
        say: called with a message about the extension.
    """
    schedule.load_state_dict(dict(state))
    groups, done = optimizer.param_groups, schedule.last_epoch
    rate = groups[0]["lr"]
    for group, base, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = base * factor(done)
    if steps == steps_before:
        return
    say(
        f"{'extended' if steps > steps_before else 'shortened'} from {steps_before:,} to {steps:,} steps: from step "
        f"{done + 1:,} on the learning-rate schedule is the schedule of {steps:,} steps (learning rate "
        f"{groups[0]['lr']:.3g}, was {rate:.3g}), so the result "
        f"{'is' if is_same else 'differs from'} that of a single run of {steps:,} steps"
    )
