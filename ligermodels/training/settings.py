"""Parts of recipes: types of settings, conditions on them, and settings of the data, trackers and evaluations."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field

from ligermodels.arguments import Condition, without_effect
from ligermodels.errors import ConfigError
from ligermodels.training.import_path import absolute_import, short_import
from ligermodels.training.locations import LOCAL, Located

SHORT = {"learning_rate": "lr"}
"""Setting -> second name of its flag, which is no name of a setting."""


def check_known(names: Iterable[Any], known: Iterable[str], source: str) -> None:
    """Raise ConfigError, which begins with `source` and names a similar setting, for a name that is not `known`."""
    known = list(known)
    for key in names:
        if key not in known:
            near = [name for name, short in SHORT.items() if short == key]
            near += difflib.get_close_matches(str(key), known, n=1)
            hint = f"the nearest is {near[0]!r}" if near else "the --help of the train command lists all"
            raise ConfigError(f"{source}: there is no setting {key!r}; {hint}")


def with_effect(
    conditions: Sequence[Condition], settings: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """All settings of a stored run; those without effect, which earlier releases took, have their default.

    Args:
        conditions: when settings have an effect.
        settings: name -> value of the stored settings.
        defaults: name -> default of all settings.
    """
    values = {**defaults, **settings}
    for name, _ in without_effect(conditions, values, defaults):
        values[name] = defaults[name]
    return values


QUANTIZED: tuple[Condition, ...] = (
    (
        ("quantize_exclude",),
        lambda settings: settings["quantize"] is not None or settings.get("sampling_quantize") is not None,
        "is for quantised weights; give quantize too, or with the objective grpo sampling_quantize",
    ),
    (("float8",), lambda settings: settings["quantize"] is None, "is for weights that quantize does not round"),
)
"""Conditions of recipes with the setting `quantize`."""


def one_or_several(value: Any) -> Any:
    """A tuple of one value or of several."""
    return (value,) if isinstance(value, str | float | int) else tuple(value) if isinstance(value, list) else value


Names = Annotated[tuple[str, ...], BeforeValidator(one_or_several)]
"""A name, or several."""
Numbers = Annotated[tuple[float, ...], BeforeValidator(one_or_several)]
Integers = Annotated[tuple[int, ...], BeforeValidator(one_or_several)]
TEXT_OF_PATH = BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)
PathName = Annotated[str | None, TEXT_OF_PATH, LOCAL]
"""A path or a hub id, as text."""
CODE = Located(absolute_import, compared=short_import)
ImportPath = Annotated[str | None, CODE]
"""MODULE:NAME, or FOLDER/MODULE:NAME."""
ImportPaths = Annotated[Names, CODE]
"""An import path, or several."""


class DataForm(NamedTuple):
    """The form of a run's records.

    name: "documents", texts and chats; "pairs" of a chosen and a rejected completion; "unpaired" completions with a
        label; or "prompts", whose completions are sampled.
    row_sequences: sequences that a row of a batch must hold.
    batch_steps: optimizer steps on each batch.
    mismatched: whether unpaired completions come with mismatched ones, for KTO's estimate of the KL divergence.
    prompt_targets: whether the likelihood of chosen sequences counts their prompts.
    """

    name: Literal["documents", "pairs", "unpaired", "prompts"] = "documents"
    row_sequences: int = 1
    batch_steps: int = 1
    mismatched: bool = False
    prompt_targets: bool = False

    @property
    def samples(self) -> bool:
        """Whether training samples the completions of the records, and is validated by their reward."""
        return self.name == "prompts"

    @property
    def record(self) -> str:
        """What a record is called in messages."""
        return {"documents": "document", "prompts": "prompt"}.get(self.name, "prompt with its completion")

    @property
    def best_result(self) -> str:
        """What the best validation result of a run is called in messages."""
        return "highest validation reward" if self.samples else "lowest validation loss"

    def row_size(self, seq_len: int) -> str:
        """Most tokens of a row, for messages."""
        if self.row_sequences == 1:
            return f"seq_len ({seq_len})"
        if self.samples:
            return f"{self.row_sequences} times seq_len ({seq_len}), for the completions of a prompt"
        return f"twice seq_len ({seq_len}), for the two sequences of a pair"


def weights_of(value: Any) -> Any:
    """The weights in a number, in a text such as "0.7,0.3", or in a list of both; other values unchanged."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    parts = [part for item in items for part in (item.split(",") if isinstance(item, str) else [item])]
    try:
        return tuple(float(part) if isinstance(part, str | int) else part for part in parts)
    except ValueError:
        raise ConfigError(f"data_weights: must be numbers, got {value!r}") from None


def check_weights(weights: Sequence[float], data: Sequence[str], *, streaming: bool) -> None:
    """Raise ConfigError unless all weights are positive numbers, one for each value of `data`, if there are any.

    Args:
        weights: the weights.
        data: the setting `data`; empty if it is not given yet.
        streaming: whether the data is streamed, so that its documents are not counted.
    """
    if any(not 0 < weight < math.inf for weight in weights):
        raise ConfigError(f"data_weights: must be positive numbers, got {', '.join(map(str, weights))}")
    if weights and data and len(weights) != len(data):
        raise ConfigError(f"data_weights: must have a weight for each value of data, {len(data)}, got {len(weights)}")
    if weights and streaming:
        raise ConfigError("data_weights: counts documents, which streaming does not; leave one of the two out")


TOKENISING = ("dataset_num_proc", "token_cache")
"""Settings that may change when a run resumes."""

STREAMING: tuple[Condition, ...] = (
    (("shuffle_buffer_size",), lambda settings: settings["streaming"], "is for streaming, which is false"),
    (("token_cache",), lambda settings: not settings["streaming"], "is for data with an index; streaming keeps none"),
)
"""Conditions of settings: see `recipe.CONDITIONS`."""


class TokenisingSettings(BaseModel):
    """Settings of tokenising and streaming."""

    streaming: bool = Field(
        False, description="Read the data from start to end, without an index, for data larger than memory."
    )
    shuffle_buffer_size: int = Field(
        10_000, ge=1, le=2**31 - 1, description="Streaming: documents that are shuffled together."
    )

    dataset_num_proc: int | None = Field(
        None,
        ge=0,
        le=1024,
        description="Processes that tokenise; 0: the training process.  [default: one per CPU, at most 16; of ranks on "
        "one machine each gets its share]",
    )
    token_cache: bool = Field(
        True, description="Keep tokens on disk for later runs: in LIGERMODELS_CACHE, or else in ~/.cache/ligermodels."
    )


class MonitoringSettings(BaseModel):
    """Settings of trackers, callbacks and evaluations. They may change when a run resumes."""

    track: Annotated[
        tuple[Literal["tensorboard", "trackio", "wandb", "none"], ...], BeforeValidator(one_or_several)
    ] = Field(
        (), description="Trackers: tensorboard, trackio, wandb, or none.  [default: tensorboard, if it is installed]"
    )
    project: str | None = Field(
        None, description="Trackers: project of the run.  [default: name of the output folder's parent folder]"
    )
    run_name: str | None = Field(None, description="Trackers: name of the run.  [default: name of the output folder]")
    callback: ImportPaths = Field(
        (), description="Import path of a subclass of training.Callback, as module:Class.  [default: none]"
    )
    early_stopping_patience: int | None = Field(
        None,
        ge=1,
        description="End after this many evaluations in a row without a lower validation loss (grpo: a higher reward); "
        "needs evaluate_every.  [default: never]",
    )
    early_stopping_threshold: float = Field(
        0.0, ge=0, description="Early stopping: a loss that is lower by at most this is no improvement."
    )
    load_best_model_at_end: bool = Field(
        False,
        description="Keep the checkpoint with the lowest validation loss (grpo: the highest reward), and write its "
        "model as the result.",
    )


MONITORING_CONDITIONS: tuple[Condition, ...] = (
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
