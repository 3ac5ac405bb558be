"""Settings of a recipe for trackers, callbacks, early stopping and the best checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

Condition = tuple[tuple[str, ...], Callable[[Mapping[str, Any]], bool], str]


def one_or_several(value: Any) -> Any:
    """A tuple of one value or of several."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Track = Annotated[
    tuple[Literal["tensorboard", "trackio", "wandb", "none"], ...],
    BeforeValidator(one_or_several),
    Field(description="Trackers: tensorboard, trackio, wandb, or none.  [default: tensorboard, if it is installed]"),
]
Project = Annotated[
    str | None, Field(description="Trackers: project of the run.  [default: name of the output folder's parent folder]")
]
RunName = Annotated[str | None, Field(description="Trackers: name of the run.  [default: name of the output folder]")]
ImportPaths = Annotated[
    tuple[str, ...],
    BeforeValidator(one_or_several),
    Field(description="Import path of a subclass of training.Callback, as module:Class.  [default: none]"),
]
Patience = Annotated[
    int | None,
    Field(
        ge=1,
        description="End after this many evaluations in a row without a lower validation loss; needs evaluate_every.  "
        "[default: never]",
    ),
]
Threshold = Annotated[
    float, Field(ge=0, description="Early stopping: a loss that is lower by at most this is no improvement.")
]
LoadBest = Annotated[
    bool, Field(description="Keep the checkpoint with the lowest validation loss, and write its model as the result.")
]

CONDITIONS: tuple[Condition, ...] = (
    (
        ("project", "run_name"),
        lambda settings: bool({"trackio", "wandb"} & {*settings["track"]}),
        "is for trackers; give track: trackio or wandb too",
    ),
    (
        ("early_stopping_patience", "load_best_model_at_end"),
        lambda settings: settings["validation_fraction"] != 0 and settings["evaluate_every"] is not None,
        "compares evaluations; give evaluate_every, and a validation_fraction above 0",
    ),
    (
        ("early_stopping_threshold",),
        lambda settings: settings["early_stopping_patience"] is not None,
        "is for early stopping; give early_stopping_patience too",
    ),
)
MAY_CHANGE = frozenset(
    {
        "track",
        "project",
        "run_name",
        "callback",
        "early_stopping_patience",
        "early_stopping_threshold",
        "load_best_model_at_end",
    }
)
