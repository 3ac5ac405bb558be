"""Recipes for heads of multi-token prediction."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ligermodels.arguments import MTP_STEPS
from ligermodels.errors import ConfigError
from ligermodels.training.locations import local_except
from ligermodels.training.recipe import TrainingRecipe
from ligermodels.training.settings import TEXT_OF_PATH

NEW = "new"
"""Value of `start_from` for a new head."""


class MTPRecipe(TrainingRecipe, init=False):
    """Settings of a run that trains a head of multi-token prediction.

    Examples:
        >>> recipe = MTPRecipe(base="Qwen/Qwen3.5-9B", data="chats.jsonl", num_steps=3)
    """

    kind: ClassVar[str] = "mtp"
    trains_heads: ClassVar[bool] = True
    reads_start: ClassVar[bool] = True
    may_change: ClassVar[frozenset[str]] = TrainingRecipe.may_change | {"write"}
    kept: ClassVar[frozenset[str]] = frozenset({"start_from"})

    num_steps: int | None = Field(
        None,
        ge=1,
        description="How often the head is applied: tokens predicted beyond the next one.  [default: 3, or the number "
        "of its layers if that is more]",
    )
    num_layers: int | None = Field(
        None, ge=1, description="Layers of the head.  [default: as in the head to start from; 1 for a new head]"
    )
    decay: float = Field(0.6, ge=0, description="Loss weight of step j: decay ** j, divided by the sum of all.")
    start_from: Annotated[str | None, TEXT_OF_PATH, local_except(NEW)] = Field(
        None, description="Head to start from: a folder, a hub id, or new.  [default: the model's own, else a new head]"
    )
    write: Literal["head", "checkpoint"] = Field(
        "head", description="Write the head alone, or the model's checkpoint with the head in it."
    )

    learning_rate: float = Field(5e-4, ge=0, description="Peak learning rate.")

    @property
    def start(self) -> str | None:
        return None if self.start_from == NEW else self.start_from

    @property
    def all_steps(self) -> int:
        """How often the head is applied, if it has `num_layers` layers."""
        return self.num_steps or max(MTP_STEPS, self.num_layers or 1)

    @property
    def shortest_sequence(self) -> tuple[int, str]:
        return self.all_steps + 2, f"of {self.all_steps} steps"

    def check(self) -> None:
        if self.all_steps < (self.num_layers or 1):
            raise ConfigError(
                f"num_steps: {self.all_steps} steps do not reach all of {self.num_layers} layers (num_layers)"
            )
        super().check()
