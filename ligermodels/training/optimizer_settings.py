"""Settings of recipes for the optimizer and the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from ligermodels.arguments import Condition, OptimizerName, check_optimizer
from ligermodels.errors import ConfigError, short

ScheduleName = Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt", "cosine_with_restarts"]
DecayType = Literal["linear", "cosine", "1-sqrt"]


Patterns = dict[str, Annotated[float, Field(ge=0)]]
"""Pattern of names -> number; see `parameter_groups`."""


class OptimizerSettings(BaseModel):
    """Settings of the optimizer and the learning-rate schedule, a part of `TrainingRecipe`."""

    optimizer: OptimizerName = Field(
        "adamw",
        description="muon: Muon for hidden matrices, AdamW for the others; adamw8bit, muon8bit: states in 8 bits; "
        "adafactor needs the least memory.",
    )
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
    learning_rate_patterns: Patterns = Field(
        {}, description="Other learning rates by name: PATTERN=RATE, such as decoder.embed=1e-5 or 'mlp.*=1e-4'."
    )
    weight_decay_patterns: Patterns = Field(
        {}, description="Other weight decays by name: PATTERN=DECAY, such as decoder.embed=0."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's beta1.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's beta2.")
    momentum: float = Field(0.95, ge=0, lt=1, description="Muon's momentum.")
    rounding: Literal["stochastic", "nearest"] = Field(
        "stochastic", description="AdamW and Muon: rounding of bfloat16 parameters; nearest loses small updates."
    )
    max_grad_norm: float | None = Field(
        1.0,
        gt=0,
        description="Clip the gradient to this norm; null in a recipe: no clipping.  "
        "[default: 1.0, with optimizer_in_bwd null]",
    )
    optimizer_in_bwd: bool = Field(
        False,
        description="Update each parameter in the backward pass and free its gradient, to save memory; without "
        "clipping, and with one micro-batch per step.",
    )

    @field_validator("learning_rate_patterns", "weight_decay_patterns", mode="before")
    @classmethod
    def _pairs(cls, value: Any, info: ValidationInfo) -> Any:
        """The form of flags, a list of texts PATTERN=NUMBER, as a dict."""
        if not isinstance(value, list | tuple):
            return value
        try:
            return {pattern: float(number) for pattern, number in (str(text).split("=") for text in value)}
        except ValueError:
            raise ConfigError(f"{info.field_name}: must be PATTERN=NUMBER, got {short(value)}") from None

    @model_validator(mode="after")
    def _default_clipping(self) -> OptimizerSettings:
        if self.optimizer_in_bwd and "max_grad_norm" not in self.model_fields_set:
            self.__dict__["max_grad_norm"] = None  # still a default: not in model_fields_set
        return self

    def check_optimizer(self, accumulation_steps: int, *, is_sharded: bool) -> None:
        """Raise ConfigError if the optimizer does not support several micro-batches per step, or several ranks."""
        check_optimizer(self.optimizer, in_backward=self.optimizer_in_bwd, is_sharded=is_sharded)
        if not self.optimizer_in_bwd:
            return
        if self.max_grad_norm is not None:
            raise ConfigError(
                f"max_grad_norm: is {self.max_grad_norm:g}, and optimizer_in_bwd updates parameters before the norm of "
                "all gradients is known; leave optimizer_in_bwd out, or start a run with max_grad_norm: null (--set "
                "max_grad_norm=null), which a run that resumes cannot change"
            )
        if accumulation_steps > 1:
            raise ConfigError(
                f"micro_batch_tokens: makes {accumulation_steps} micro-batches per step, and optimizer_in_bwd updates "
                "parameters in the backward pass of each; raise micro_batch_tokens, lower batch_tokens, or leave "
                "optimizer_in_bwd out"
            )

    def optimizer_summary(self) -> str:
        """A line about the optimizer, the learning rate and the schedule."""
        patterns = "".join(f", {pattern} {rate:g}" for pattern, rate in self.learning_rate_patterns.items())
        default = "" if "learning_rate" in self.model_fields_set else " (the default)"
        in_backward = ", in the backward pass without clipping" if self.optimizer_in_bwd else ""
        relative = " times the root mean square of each parameter" if self.optimizer == "adafactor" else ""
        rate = f"learning rate {self.learning_rate:g}{default}{patterns}{relative}"
        return f"{self.optimizer}{in_backward}: {rate}, schedule {self.schedule}"


OPTIMIZER_CONDITIONS: tuple[Condition, ...] = (
    (
        ("beta1", "beta2", "rounding"),
        lambda settings: settings["optimizer"] != "adafactor",
        "is a setting of AdamW, and the optimizer is another",
    ),
    (("momentum",), lambda settings: settings["optimizer"].startswith("muon"), "is a setting of Muon"),
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
"""Conditions of `OptimizerSettings`."""

DECAY = frozenset({"min_lr_ratio", "decay_steps", "decay_type"})
"""Settings that may change when a run resumes, if no step taken so far had another learning rate."""


def schedule_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `schedule_factor` among the settings of a recipe."""
    names = ("schedule", "min_lr_ratio", "decay_steps", "decay_type", "num_cycles")
    return {name: settings[name] for name in names}
