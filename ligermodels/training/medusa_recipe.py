"""Recipes for Medusa heads."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from ligermodels.arguments import Condition
from ligermodels.training.recipe import CONDITIONS, TrainingRecipe
from ligermodels.training.renamed import current_settings
from ligermodels.training.settings import PathName


class MedusaRecipe(TrainingRecipe, init=False):
    """Settings of a run that trains Medusa heads.

    Examples:
        >>> recipe = MedusaRecipe(base="meta-llama/Llama-3.1-8B", data="chats.jsonl", num_heads=3)
        >>> stage_2 = recipe.changed({"stage": 2, "start_from": "heads/", "distill": True, "learning_rate": 1e-5})
    """

    kind: ClassVar[str] = "medusa"
    trains_heads: ClassVar[bool] = True
    conditions: ClassVar[tuple[Condition, ...]] = (
        (
            (
                "heads_loss_weight",
                "heads_loss_weight_schedule",
                "head_lr_multiplier",
                "distill",
                "kl_to_reference",
                "activation_checkpointing",
            ),
            lambda settings: settings["stage"] == 2,
            "is for stage 2; in stage 1 the model is frozen",
        ),
        (
            ("kl_to_reference",),
            lambda settings: settings["validation_fraction"] != 0,
            "needs a validation split, and validation_fraction is 0",
        ),
        (
            ("reference",),
            lambda settings: settings["distill"] or settings["kl_to_reference"],
            "is for distill and kl_to_reference, and both are false",
        ),
        *CONDITIONS,
    )
    may_change: ClassVar[frozenset[str]] = TrainingRecipe.may_change | {"kl_to_reference", "reference"}
    kept: ClassVar[frozenset[str]] = frozenset({"start_from"})

    num_heads: int = Field(5, ge=1, description="Medusa heads: tokens predicted beyond the next one.")
    num_layers: int = Field(1, ge=1, description="ResBlocks per head.")
    lm_head: Literal["own", "shared"] = Field(
        "own", description="own: an lm_head for each head; shared: the model's lm_head."
    )
    start_from: PathName = Field(None, description="Heads to start from: a folder or a hub id.  [default: new heads]")
    stage: int = Field(1, ge=1, le=2, description="1: train the heads on the frozen model; 2: train both.")

    decay: float = Field(0.8, ge=0, description="Loss weight of head i: decay ** i.")
    heads_loss_weight: float = Field(0.2, ge=0, description="Stage 2: weight of the heads' loss.")
    heads_loss_weight_schedule: Literal["constant", "linear", "sine"] = Field(
        "constant", description="Stage 2: how the weight of the heads' loss rises over the run."
    )

    distill: bool = Field(
        False, description="Stage 2: the loss of the model is KL(initial model || model), not cross entropy."
    )
    kl_to_reference: bool = Field(
        False, description="Stage 2: evaluate the KL to the initial model; distill implies it."
    )
    reference: Literal["device", "cpu_offload"] = Field(
        "device", description="Where the initial model is kept; cpu_offload saves GPU memory and is slower."
    )

    learning_rate: float = Field(5e-4, ge=0, description="Peak learning rate; in stage 2 of the model.")
    head_lr_multiplier: float = Field(4.0, ge=0, description="Stage 2: learning rate of the heads / the model.")

    @classmethod
    def current_names(cls, settings: Mapping[str, Any], source: str = "") -> dict[str, Any]:
        return current_settings(settings, source)

    @property
    def shortest_sequence(self) -> tuple[int, str]:
        return self.num_heads + 2, f"of {self.num_heads} heads"

    def heads_loss_weight_at(self, step: int, steps: int) -> float:
        """Weight of the heads' loss in `step`, counted from 1, of `steps`."""
        done = step / steps
        factor = {"constant": 1.0, "linear": done, "sine": math.sin(done * math.pi / 2)}
        return self.heads_loss_weight * factor[self.heads_loss_weight_schedule]


def read_recipe(name_or_path: str | os.PathLike[str]) -> MedusaRecipe:
    """The recipe for Medusa heads in a YAML file, or a shipped recipe by its name; the same as `MedusaRecipe.read`."""
    return MedusaRecipe.read(name_or_path)
