"""Settings of recipes for the optimizer and the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

OptimizerName = Literal["adamw", "adafactor"]
ScheduleName = Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt", "cosine_with_restarts"]
DecayType = Literal["linear", "cosine", "1-sqrt"]


class OptimizerSettings(BaseModel):
    """Settings of the optimizer and the learning-rate schedule, a part of `TrainingRecipe`."""

    optimizer: OptimizerName = Field("adamw", description="adafactor needs less memory.")
    learning_rate: float = Field(2e-5, ge=0, description="Peak learning rate.")
    schedule: ScheduleName = Field(
        "cosine", description="Learning rate after the warm-up; wsd: constant, then a decay in the last steps."
    )
    warmup_steps: int | None = Field(
        None, ge=0, description="Steps of linear warm-up.  [default: 40, at most a tenth of all]"
    )
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="Final learning rate as a fraction of the peak.")
    decay_steps: int | None = Field(None, ge=0, description="wsd: steps of the decay.  [default: a fifth of all steps]")
    decay_type: DecayType = Field("linear", description="wsd: curve of the decay.")
    num_cycles: int = Field(2, ge=1, description="cosine_with_restarts: number of cosines.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay, for matrices only.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's beta1.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's beta2.")
    rounding: Literal["stochastic", "nearest"] = Field(
        "stochastic", description="AdamW: rounding of bfloat16 parameters; nearest loses small updates."
    )
    max_grad_norm: float | None = Field(
        1.0, gt=0, description="Clip the gradient to this norm; null in a recipe: no clipping."
    )


OPTIMIZER_CONDITIONS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Any]], bool], str], ...] = (
    (
        ("beta1", "beta2", "rounding"),
        lambda settings: settings["optimizer"] == "adamw",
        "is a setting of AdamW, and the optimizer is another",
    ),
    (
        ("min_lr_ratio",),
        lambda settings: settings["schedule"] not in ("constant", "inverse_sqrt"),
        "is for schedules that fall to it, and the schedule is constant or inverse_sqrt",
    ),
    (("decay_steps", "decay_type"), lambda settings: settings["schedule"] == "wsd", "is for the schedule wsd"),
    (
        ("num_cycles",),
        lambda settings: settings["schedule"] == "cosine_with_restarts",
        "is for the schedule cosine_with_restarts",
    ),
)
"""Conditions of `OptimizerSettings`; see `recipe.Condition`."""

DECAY = frozenset({"min_lr_ratio", "decay_steps", "decay_type"})
"""Settings that may change when a run resumes, if no step taken so far had another learning rate."""


def schedule_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `schedule_factor` among the settings of a recipe."""
    names = ("schedule", "min_lr_ratio", "decay_steps", "decay_type", "num_cycles")
    return {name: settings[name] for name in names}
