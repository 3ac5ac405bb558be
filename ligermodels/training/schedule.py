"""Learning-rate schedules by name: the factor of the peak learning rate as a pure function of the step.

The schedules are those of `transformers.optimization`, except that the first step already has a learning rate: step i
has the factor that transformers gives to step i + 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ligermodels.arguments import check_count, is_number
from ligermodels.errors import InputError, short
from ligermodels.training.optimizer_settings import DecayType, ScheduleName
from ligermodels.training.renamed import renamed_arguments

CURVES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
    "1-sqrt": lambda x: 1 - math.sqrt(x),
}
"""From 1 at x = 0 to 0 at x = 1. "1-sqrt" is from Haegele et al., 2024 (https://arxiv.org/abs/2405.18392)."""


def schedule_factor(
    step: int,
    schedule: ScheduleName,
    steps: int,
    *,
    warmup_steps: int = 0,
    min_lr_ratio: float = 0.1,
    decay_steps: int | None = None,
    decay_type: DecayType = "linear",
    num_cycles: int = 2,
) -> float:
    """Factor of the peak learning rate at `step`.

    In the warm-up the factor rises linearly: it is 1 / warmup_steps at step 0, and 1 at step warmup_steps - 1.

    Args:
        step: number of the step, from 0.
        schedule: what follows the warm-up. "cosine" and "linear" fall to min_lr_ratio at the last step;
            "cosine_with_restarts" is `num_cycles` cosines; "constant" stays at 1; "wsd" (warmup, stable, decay; Hu et
            al., 2024, https://arxiv.org/abs/2404.06395) stays at 1 and falls to min_lr_ratio in the last `decay_steps`
            steps; "inverse_sqrt" is sqrt(w / (w + i)) at step i after the warm-up of w steps (10,000 without warm-up).
        steps: number of steps. The factor stays at its last value afterwards.
        warmup_steps: steps of linear warm-up.
        min_lr_ratio: last factor.
        decay_steps: "wsd": steps of the decay. Default: a fifth of `steps`, at most all steps after the warm-up.
        decay_type: "wsd": curve of the decay.
        num_cycles: "cosine_with_restarts": number of cosines.

    Returns:
        The factor, from 0 to 1.

    Raises:
        InputError: an unknown name, a number out of range, or more warm-up and decay than steps.
    """
    _check(schedule, steps, warmup_steps, min_lr_ratio, decay_steps, decay_type, num_cycles)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    after = step + 1 - warmup_steps
    if schedule == "inverse_sqrt":
        timescale = warmup_steps or 10_000
        return math.sqrt(timescale / (timescale + after))
    curve, done = "cosine", min(1.0, after / max(1, steps - warmup_steps))
    if schedule == "constant":
        done = 0.0
    elif schedule == "linear":
        curve = "linear"
    elif schedule == "cosine_with_restarts":
        done = num_cycles * done % 1 if done < 1 else 1.0
    elif schedule == "wsd":
        decay = default_decay_steps(steps, warmup_steps) if decay_steps is None else decay_steps
        curve, done = decay_type, min(max(0, step + 1 - (steps - decay)), decay) / max(1, decay)
    return min_lr_ratio + (1 - min_lr_ratio) * CURVES[curve](done)


def _check(
    schedule: str,
    steps: int,
    warmup_steps: int,
    min_lr_ratio: float,
    decay_steps: int | None,
    decay_type: str,
    num_cycles: int,
) -> None:
    """Raise InputError for the arguments that `schedule_factor` refuses."""
    for name, value, choices in (
        ("schedule", schedule, get_args(ScheduleName)),
        ("decay_type", decay_type, get_args(DecayType)),
    ):
        if value not in choices:
            raise InputError(f"{name}: must be one of {', '.join(choices)}, got {value!r}")
    check_count("steps", steps)
    check_count("warmup_steps", warmup_steps, least=0, most=steps)
    check_count("num_cycles", num_cycles)
    if not (is_number(min_lr_ratio) and 0 <= min_lr_ratio <= 1):
        raise InputError(f"min_lr_ratio: must be from 0 to 1, got {short(min_lr_ratio)}")
    if decay_steps is not None and check_count("decay_steps", decay_steps, least=0) > steps - warmup_steps:
        raise InputError(
            f"decay_steps: must be from 0 to the steps after the warm-up, {steps - warmup_steps}, got {decay_steps}"
        )


def default_decay_steps(steps: int, warmup_steps: int) -> int:
    """Steps of the decay of "wsd": a fifth of all `steps`, at most all steps after the warm-up."""
    return min(steps // 5, steps - warmup_steps)


def lr_schedule(
    optimizer: Optimizer,
    schedule: ScheduleName,
    steps: int,
    *,
    warmup_steps: int = 0,
    min_lr_ratio: float = 0.1,
    decay_steps: int | None = None,
    decay_type: DecayType = "linear",
    num_cycles: int = 2,
) -> LambdaLR:
    """A learning-rate schedule by name; `train` steps it.

    Args:
        optimizer: its learning rates are the peak learning rates.
        schedule: "cosine", "linear", "constant", "wsd", "inverse_sqrt" or "cosine_with_restarts": see
            `schedule_factor`.
        steps: number of optimizer steps.
        warmup_steps: steps of linear warm-up. Default: 0.
        min_lr_ratio: final learning rate as a fraction of the peak; not for "constant" and "inverse_sqrt".
        decay_steps: "wsd": steps of the decay. Default: a fifth of `steps`.
        decay_type: "wsd": curve of the decay, "linear", "cosine" or "1-sqrt".
        num_cycles: "cosine_with_restarts": number of cosines.

    Returns:
        The schedule.

    Raises:
        InputError: an unknown name, a number out of range, or more warm-up and decay than steps.

    Examples:
        >>> optimizer = adamw(model.parameters(), 2e-5)
        >>> schedule = lr_schedule(optimizer, "wsd", 1000, warmup_steps=40, decay_steps=200)
    """
    factor = partial(
        schedule_factor, schedule=schedule, steps=steps, warmup_steps=warmup_steps, min_lr_ratio=min_lr_ratio,
        decay_steps=decay_steps, decay_type=decay_type, num_cycles=num_cycles,
    )  # fmt: skip
    factor(0)  # checks the arguments before the optimizer is changed
    return LambdaLR(optimizer, factor)


@renamed_arguments(warmup="warmup_steps", floor="min_lr_ratio")
def warmup_cosine(optimizer: Optimizer, steps: int, *, warmup_steps: int = 0, min_lr_ratio: float = 0.1) -> LambdaLR:
    """A learning-rate schedule with linear warm-up and cosine decay: `lr_schedule` of the name "cosine".

    Args:
        optimizer: its learning rates are the peak learning rates.
        steps: number of optimizer steps.
        warmup_steps: steps of linear warm-up.
        min_lr_ratio: final learning rate as a fraction of the peak.

    Returns:
        The schedule.

    Raises:
        InputError: a number out of range, or more warm-up than steps.
    """
    return lr_schedule(optimizer, "cosine", steps, warmup_steps=warmup_steps, min_lr_ratio=min_lr_ratio)
