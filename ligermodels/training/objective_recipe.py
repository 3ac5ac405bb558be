"""The objectives by name, with the form of their data and their settings."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from ligermodels.arguments import Condition
from ligermodels.errors import ConfigError
from ligermodels.training.policy_recipe import POLICY, POLICY_CONDITIONS, PolicySettings, check_policy
from ligermodels.training.recipe import CONDITIONS, TrainingRecipe
from ligermodels.training.settings import DataForm, ImportPath, Names, Numbers, PathName


class ObjectiveSettings(NamedTuple):
    """An objective, as recipes know it.

    data: form of the records.
    settings: names of the settings that it uses, of those in `ObjectiveRecipe`.
    """

    data: DataForm
    settings: tuple[str, ...] = ()


_F_DIVERGENCE = ("f_divergence_type", "f_alpha_divergence_coef")
_PAIRS = DataForm("pairs", row_sequences=2)
OBJECTIVES = {
    "sft": ObjectiveSettings(DataForm()),
    "dpo": ObjectiveSettings(
        _PAIRS, ("beta", "loss_type", "loss_weights", "label_smoothing", "discopop_tau", *_F_DIVERGENCE)
    ),
    "ipo": ObjectiveSettings(_PAIRS, ("beta", *_F_DIVERGENCE)),
    "orpo": ObjectiveSettings(_PAIRS._replace(prompt_targets=True), ("beta",)),
    "simpo": ObjectiveSettings(_PAIRS, ("beta", "simpo_gamma", "label_smoothing")),
    "cpo": ObjectiveSettings(_PAIRS, ("beta", "loss_type", "label_smoothing", "cpo_alpha")),
    "kto": ObjectiveSettings(
        DataForm("unpaired", mismatched=True), ("beta", "loss_type", "desirable_weight", "undesirable_weight")
    ),
    "distill": ObjectiveSettings(DataForm(), ("teacher", "beta", "temperature")),
    "grpo": ObjectiveSettings(DataForm("prompts"), POLICY),
}
"""Objectives by name."""

SETTINGS = tuple(dict.fromkeys(name for objective in OBJECTIVES.values() for name in objective.settings))


def _condition(setting: str) -> Condition:
    users = [name for name, objective in OBJECTIVES.items() if setting in objective.settings]
    reason = f"is a setting of the objective{'s' if len(users) > 1 else ''} {', '.join(users)}"
    return (setting,), lambda settings: setting in OBJECTIVES[settings["objective"]].settings, reason


class ObjectiveRecipe(TrainingRecipe, PolicySettings, init=False):
    """Settings of a run with an objective."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        *(_condition(setting) for setting in SETTINGS),
        (
            ("loss",),
            lambda settings: settings["objective"] not in ("distill", "grpo"),
            "has no effect with the objectives distill and grpo",
        ),
        (
            ("packing_strategy",),
            lambda settings: OBJECTIVES[settings["objective"]].data.name == "documents",
            "is for texts and chats, and the objective is for preference data or prompts, which are never split",
        ),
        (
            ("dataset_num_proc", "token_cache"),
            lambda settings: OBJECTIVES[settings["objective"]].data.name == "documents",
            "is for texts and chats; preference data and prompts are read by the training process",
        ),
        *POLICY_CONDITIONS,
        *CONDITIONS,
    )

    objective: Literal["sft", "dpo", "ipo", "orpo", "simpo", "cpo", "kto", "distill", "grpo"] = Field(
        "sft",
        description="What is trained: next tokens, preferences (pairs; kto: labels), a teacher's predictions, or "
        "(grpo) rewards of sampled completions.",
    )
    loss: ImportPath = Field(
        None, description="A loss of your own, MODULE:FUNCTION, on the data of the objective.  [default: its own]"
    )
    beta: float | None = Field(
        None,
        ge=0,
        description="Strength of the preference term; distill: 0 forward KL, 1 reverse KL, between them JSD; grpo: "
        "weight of the KL to the reference.  [default: 0.1, simpo 2, distill 0.5, grpo 0]",
    )
    loss_type: Names = Field(
        (),
        description="Variants of the loss by TRL's names, such as robust.  [default: sigmoid; kto for kto; dapo for "
        "grpo]",
    )
    loss_weights: Numbers = Field((), description="dpo: weight of each loss_type.  [default: 1]")
    label_smoothing: float | None = Field(
        None, ge=0, lt=0.5, description="Probability that the sides of a pair are swapped.  [default: 0]"
    )
    f_divergence_type: str | None = Field(None, description="dpo, ipo: f-divergence.  [default: reverse_kl]")
    f_alpha_divergence_coef: float | None = Field(
        None, description="dpo, ipo: alpha of alpha_divergence.  [default: 0.5]"
    )
    discopop_tau: float | None = Field(None, gt=0, description="dpo: for loss_type discopop.  [default: 0.05]")
    simpo_gamma: float | None = Field(None, description="simpo: target margin of the rewards.  [default: 0.5]")
    cpo_alpha: float | None = Field(None, description="cpo: weight of the chosen's likelihood.  [default: 1]")
    desirable_weight: float | None = Field(None, gt=0, description="kto: weight of desirable losses.  [default: 1]")
    undesirable_weight: float | None = Field(None, gt=0, description="kto: weight of the other losses.  [default: 1]")
    teacher: PathName = Field(None, description="distill: the teacher, a checkpoint folder or a hub id.")
    temperature: float | None = Field(
        None, gt=0, description="distill: divides the logits of both; grpo: of the sampler and the loss.  [default: 1]"
    )

    @property
    def data_form(self) -> DataForm:
        """The form of the records."""
        form = OBJECTIVES[self.objective].data
        if form.samples:
            return form._replace(row_sequences=self.num_generations, batch_steps=self.num_iterations)
        return form._replace(mismatched=form.mismatched and self.loss_type != ("apo_zero_unpaired",))

    @property
    def objective_options(self) -> dict[str, Any]:
        """The settings of the objective that are given, by name."""
        values = {name: getattr(self, name) for name in OBJECTIVES[self.objective].settings}
        return {name: value for name, value in values.items() if value not in (None, ())}

    def check(self) -> None:
        super().check()
        if self.objective == "distill" and self.teacher is None:
            raise ConfigError("teacher: the objective distill needs a teacher; give a checkpoint folder or a hub id")
        if self.objective == "distill" and (self.beta or 0.0) > 1:
            raise ConfigError(f"beta: must be from 0 to 1 with the objective distill, got {self.beta}")
        if self.data_form.name != "documents" and self.streaming:
            raise ConfigError("streaming: is for texts and chats; other records are read in any order")
        if self.data_form.name != "documents" and self.excess_length_strategy == "split":
            raise ConfigError(
                "excess_length_strategy: preference data cannot be split, nor can prompts; give truncate, drop or raise"
            )
        if self.objective == "grpo":
            check_policy(dict(self))
        if self.loss_weights and len(self.loss_weights) != max(1, len(self.loss_type)):
            raise ConfigError(
                f"loss_weights: has {len(self.loss_weights)} numbers for {max(1, len(self.loss_type))} loss_type"
            )
