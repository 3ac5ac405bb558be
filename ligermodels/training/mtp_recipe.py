"""Recipes for heads of multi-token prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ligermodels.arguments import MTP_STEPS
from ligermodels.errors import ConfigError
from ligermodels.training.recipe import TrainingRecipe

NEW = "new"
"""Value of `start_from` for a new head."""


class MTPRecipe(TrainingRecipe):
    """Settings of a run that trains a head of multi-token prediction.

    Examples:
        >>> recipe = MTPRecipe(base="Qwen/Qwen3.5-9B", data="chats.jsonl", num_steps=3)
    """

    kind: ClassVar[str] = "mtp"
    trains_heads: ClassVar[bool] = True
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
    start_from: str | None = Field(
        None, description="Head to start from: a folder, a hub id, or new.  [default: the model's own, else a new head]"
    )
    write: Literal["head", "checkpoint"] = Field(
        "head", description="Write the head alone, or the model's checkpoint with the head in it."
    )

    learning_rate: float = Field(5e-4, ge=0, description="Peak learning rate.")

    if TYPE_CHECKING:  # the constructor that type checkers derive would ask for every setting

        def __init__(self, **settings: Any) -> None: ...

    def check(self) -> None:
        steps = self.num_steps or max(MTP_STEPS, self.num_layers or 1)
        if self.seq_len < steps + 2:
            raise ConfigError(
                f"seq_len: sequences of {self.seq_len} tokens have no target for the last of {steps} steps; it must be "
                f"at least {steps + 2}"
            )
        if steps < (self.num_layers or 1):
            raise ConfigError(f"num_steps: {steps} steps do not reach all of {self.num_layers} layers (num_layers)")
        super().check()
