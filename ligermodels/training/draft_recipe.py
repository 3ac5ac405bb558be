"""Settings that recipes of draft heads on a frozen model share: EAGLE-3, DFlash and DSpark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, field_validator

from ligermodels.arguments import QuantizedFormat
from ligermodels.training.recipe import CONDITIONS, Condition, TrainingRecipe


def draft_conditions(*new_head: str) -> tuple[Condition, ...]:
    """The conditions of a recipe of draft heads; `new_head` are the settings that describe a new head."""
    return (
        (
            new_head,
            lambda settings: settings["start_from"] is None,
            "is for a new head; the head in start_from has its own",
        ),
        (
            ("quantize_exclude",),
            lambda settings: settings["quantize"] is not None,
            "is for quantised weights; give quantize too",
        ),
        (("float8",), lambda settings: settings["quantize"] is None, "is for weights that quantize does not round"),
        (
            ("activation_checkpointing",),
            lambda settings: False,
            "is for the backward pass of the model, which is frozen",
        ),
        *CONDITIONS,
    )


class DraftRecipe(TrainingRecipe):
    """Settings of a run that trains a draft head on a frozen model."""

    trains_heads: ClassVar[bool] = True
    kept: ClassVar[frozenset[str]] = frozenset({"start_from"})

    start_from: str | None = Field(None, description="Head to start from: a folder or a hub id.  [default: a new head]")
    quantize: QuantizedFormat | None = Field(
        None, description="Keep the frozen weights of the model's blocks in 4 or 8 bits.  [default: in `dtype`]"
    )
    quantize_exclude: tuple[str, ...] = Field(
        (), description="Patterns of layers that are not quantised, such as mlp.experts or mlp.down."
    )
    boundaries: tuple[int, ...] = Field(
        (),
        description="States that the head reads, each by the number of layers before it.  "
        "[default: a few layers spread over the model]",
    )

    if TYPE_CHECKING:  # the constructor that type checkers derive would ask for every setting

        def __init__(self, **settings: Any) -> None: ...

    @field_validator("boundaries", mode="before")
    @classmethod
    def _several_numbers(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value
