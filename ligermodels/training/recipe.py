"""The settings that every training run has; each kind of training adds its own in a class of its own."""

from __future__ import annotations

import datetime
import difflib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from ligermodels.errors import ConfigError, short, validation_message
from ligermodels.parallel.plan import ParallelPlan
from ligermodels.training.recipe_file import parse_setting, recipe_settings

R = TypeVar("R", bound="TrainingRecipe")

Condition = tuple[tuple[str, ...], Callable[[Mapping[str, Any]], bool], str]
"""Settings; whether they have a meaning, given all settings; and why not otherwise."""

CONDITIONS: tuple[Condition, ...] = (
    (
        ("evaluate_every", "validation_tokens"),
        lambda settings: settings["validation_fraction"] != 0,
        "needs a validation split, and validation_fraction is 0",
    ),
    (
        ("beta1", "beta2", "rounding"),
        lambda settings: settings["optimizer"] == "adamw",
        "is a setting of AdamW, and the optimizer is another",
    ),
    (("epochs",), lambda settings: settings["steps"] is None, "has no effect beside steps"),
    (("float8",), lambda settings: settings["dtype"] != "float64", "is for smaller dtypes than float64"),
    (("float8_gradients", "float8_exclude"), lambda settings: settings["float8"], "is for float8, which is false"),
    (
        ("keep_checkpoints",),
        lambda settings: settings["checkpoint_every"] is not None,
        "has no effect where checkpoint_every is null",
    ),
)
"""Of every recipe. Checked in this order: a condition may depend on settings that have been checked before."""


class TrainingRecipe(BaseModel):
    """Settings of a run. The same recipe and data give the same run.

    Raises ConfigError, which names the field, for a value of another type or out of range, and for settings that
    contradict one another.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    kind: ClassVar[str]
    """The folder of the shipped recipes of this class."""
    conditions: ClassVar[tuple[Condition, ...]] = CONDITIONS
    may_change: ClassVar[frozenset[str]] = frozenset(
        {
            "evaluate_every",
            "checkpoint_every",
            "keep_checkpoints",
            "report_every",
            "validation_tokens",
            "max_bad_lines",
            "activation_checkpointing",
            "micro_batch_tokens",
            "parallel",
            "tokenizer",
        }
    )
    """Settings that may change when a run resumes: they do not affect training, but for the order in which numbers are
    added. (The content of the tokenizer does.)"""
    trains_heads: ClassVar[bool] = False
    """Whether heads beside the model are trained, with it or alone."""
    kept: ClassVar[frozenset[str]] = frozenset()
    """Settings that a resumed run takes from its checkpoint."""
    base: str | None = Field(None, description="The model: a checkpoint folder, or a Hugging Face hub id.")
    data: tuple[str, ...] = Field((), description="Text, or .jsonl with a text or a chat in each line.")
    validation_fraction: float = Field(
        0.05, ge=0, le=1, lt=1, description="Fraction of the data in the validation split; 0: none."
    )
    validation_tokens: int | None = Field(None, ge=1, description="Tokens of it to evaluate on.  [default: all]")
    max_bad_lines: int = Field(0, ge=0, description="Unusable lines that are skipped, each with a message.")
    chat_template: str | None = Field(None, description="File of a chat template.  [default: the checkpoint's]")
    tokenizer: str | None = Field(
        None, description="Checkpoint folder or hub id of another tokenizer.  [default: the model's]"
    )
    date: str | None = Field(None, description="YYYY-MM-DD, for chat templates that write it.  [default: today]")

    optimizer: Literal["adamw", "adafactor"] = Field("adamw", description="adafactor needs less memory.")
    learning_rate: float = Field(2e-5, ge=0, description="Peak learning rate.")
    warmup_steps: int | None = Field(None, ge=0, description="Linear warm-up.  [default: 40, at most a tenth of all]")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="Final learning rate as a fraction of the peak.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay, of matrices only.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's beta1.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's beta2.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="Clip the gradient norm; null in a recipe: do not.")

    steps: int | None = Field(None, ge=1, description="Optimizer steps.  [default: from the epochs]")
    epochs: float = Field(1.0, gt=0, description="Epochs, where steps is not given.")
    seq_len: int = Field(
        2048, ge=2, le=2**31 - 1, description="Tokens per sequence; documents are packed into sequences."
    )
    batch_tokens: int = Field(16384, ge=1, le=2**31 - 1, description="Tokens per optimizer step.")
    micro_batch_tokens: int | None = Field(
        None, ge=1, description="Tokens per forward pass of a rank.  [default: batch_tokens, divided among the ranks]"
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        "none", description="What the backward pass computes again, in less memory: cheap results, or whole blocks."
    )
    dtype: Literal["bfloat16", "float32", "float64"] | None = Field(
        None, description="Dtype of the parameters.  [default: the checkpoint's, which must be one of these]"
    )
    float8: bool = Field(False, description="Linear layers of the blocks compute in float8; evaluation does not.")
    float8_gradients: Literal["e5m2", "e4m3"] = Field(
        "e5m2", description="Float8: format of gradients, of more range or of more precision."
    )
    float8_exclude: tuple[str, ...] = Field(
        (), description="Float8: patterns of names of layers that stay as they are, such as 'mlp' or '*.blocks.0.*'."
    )
    rounding: Literal["stochastic", "nearest"] = Field(
        "stochastic", description="AdamW: rounding of bfloat16 parameters; nearest loses small updates."
    )
    parallel: ParallelPlan = Field(ParallelPlan(), description="How the model is spread over torchrun's processes.")
    seed: int = Field(0, description="Seed of the split, the order of the data, and rounding.")

    evaluate_every: int | None = Field(None, ge=1, description="Steps between evaluations.  [default: at the end]")
    checkpoint_every: int | None = Field(500, ge=1, description="Steps between checkpoints; null: none is kept.")
    keep_checkpoints: int = Field(2, ge=1, description="Newest checkpoints to keep.")
    report_every: int | None = Field(None, ge=1, description="Steps between reports.  [default: 50 reports in all]")

    @field_validator("*", mode="before")
    @classmethod
    def _within_int64(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{info.field_name}: must lie within int64, got {short(value)}")
        return value

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError("; ".join(map(validation_message, error.errors()))) from None

    @classmethod
    def read(cls: type[R], name_or_path: str | os.PathLike[str]) -> R:
        """The recipe in a YAML file, or a shipped one, by its name.

        Raises ConfigError, which names the file, when it cannot be read, and as `changed`.
        """
        return cls().changed(recipe_settings(name_or_path, cls.kind), str(name_or_path))

    @classmethod
    def check_kind(cls, recipe: object) -> None:
        """ConfigError unless `recipe` is one of this kind."""
        if not isinstance(recipe, cls):
            name = cls.__name__
            raise ConfigError(
                f"recipe: must be a {name}, got a {type(recipe).__name__}; {name}(**settings) makes one, and "
                f"{name}.read(file)"
            )

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Default of each setting."""
        return {name: field.default for name, field in cls.model_fields.items()}

    @classmethod
    def current_names(cls, settings: Mapping[str, Any], source: str = "") -> dict[str, Any]:
        """`settings`, from `source`, with those that have been renamed under their new names."""
        return dict(settings)

    @field_validator("base", "chat_template", "tokenizer", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator("data", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(os.fspath(item) if isinstance(item, os.PathLike) else item for item in items)

    @field_validator("float8_exclude", mode="before")
    @classmethod
    def _one_or_several_patterns(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @field_validator("parallel", mode="before")
    @classmethod
    def _plan_of_section(cls, value: Any) -> Any:
        try:
            return ParallelPlan(**value) if isinstance(value, Mapping) else value
        except ConfigError as error:
            raise ConfigError(f"parallel.{error}") from None

    @field_validator("date")
    @classmethod
    def _is_date(cls, value: str | None) -> str | None:
        with suppress(ValueError):
            if value is None or datetime.date.fromisoformat(value).isoformat() == value:  # reads other formats too
                return value
        raise ConfigError(f"date: must be YYYY-MM-DD, got {value!r}")

    @model_validator(mode="after")
    def _is_consistent(self: R) -> R:
        self.check()
        return self

    def check(self) -> None:
        """Raises ConfigError where settings contradict one another, or one has no meaning beside the others."""
        if self.trains_heads and self.parallel.tensor > 1:
            raise ConfigError("parallel.tensor: is for whole models; heads are trained with shard and replicate")
        micro = self.micro_batch_tokens or self.batch_tokens
        if micro % self.seq_len or self.batch_tokens % micro:
            raise ConfigError(
                f"batch_tokens ({self.batch_tokens}) must be a multiple of micro_batch_tokens ({micro}), and that one "
                f"of seq_len ({self.seq_len})"
            )
        if self.parallel.activation_checkpointing is not None:
            raise ConfigError("parallel.activation_checkpointing: is a setting of its own in a recipe; give it there")
        for name, reason in self._without_meaning(dict(self)):
            raise ConfigError(f"{name}: {reason}; leave it out")

    @property
    def trains_configs(self) -> bool:
        """Whether `base` may be a config without weights: a model with random weights is trained then."""
        return False

    @property
    def micro_batch_size(self) -> int:
        """Sequences per forward pass, of one process."""
        return self.micro_batches()[0]

    @property
    def accumulation_steps(self) -> int:
        """Forward passes per optimizer step, of one process."""
        return self.micro_batches()[1]

    def micro_batches(self, ranks: int = 1) -> tuple[int, int]:
        """Sequences per forward pass, and forward passes per optimizer step, of each of so many ranks that divide the
        batch among them. Raises ConfigError when they cannot."""
        sequences = self.batch_tokens // self.seq_len
        micro = sequences // ranks if self.micro_batch_tokens is None else self.micro_batch_tokens // self.seq_len
        if micro and sequences % (micro * ranks) == 0:
            return micro, sequences // (micro * ranks)
        if sequences % ranks:
            raise ConfigError(
                f"batch_tokens ({self.batch_tokens}) is {sequences} sequences, which {ranks} ranks cannot divide among "
                f"them; make it a multiple of {ranks * self.seq_len}"
            )
        raise ConfigError(
            f"micro_batch_tokens ({self.micro_batch_tokens}) times {ranks} ranks must divide batch_tokens "
            f"({self.batch_tokens}); leave it out for {self.batch_tokens // ranks}"
        )

    def changed(self: R, settings: Mapping[str, Any], source: str = "recipe") -> R:
        """A copy with other settings; those of a section (`parallel`) take the place of single ones of it. Settings
        that lose their meaning, and are not among `settings`, are reset to their defaults: with epochs the steps, and
        without a validation split what is for it.

        Raises ConfigError, which names `source`, for an unknown setting, with the nearest known one.
        """
        settings, defaults = self.current_names(settings, source), self.defaults()
        for key in settings:
            if key not in defaults:
                nearest = difflib.get_close_matches(str(key), defaults, n=1, cutoff=0.0)[0]
                raise ConfigError(f"{source}: there is no setting {key!r}; the nearest is {nearest!r}")
        new = {**dict(self), **settings}
        for key, value in settings.items():
            if isinstance(section := getattr(self, key), BaseModel) and isinstance(value, Mapping):
                new[key] = {**dict(section), **value}
        if "epochs" in settings and "steps" not in settings:
            new["steps"] = None
        for name, _ in self._without_meaning(new):
            if name not in settings:
                new[name] = defaults[name]
        try:
            return type(self)(**new)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    def changed_by(self: R, assignments: Sequence[str], source: str) -> R:
        """A copy with the settings that are written as KEY=VALUE, the last one of a key. Errors are those of `changed`
        and `parse_setting`."""
        return self.changed(dict(parse_setting(text, source) for text in assignments), source)

    def settings(self) -> dict[str, Any]:
        """Name and value of each field, as JSON and YAML types."""
        return self.model_dump(mode="json")

    @classmethod
    def _without_meaning(cls, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Settings that differ from their default though they have no meaning, with the reason. Evaluated lazily, so a
        caller may reset one before the next is checked."""
        defaults = cls.defaults()
        for names, has_meaning, reason in cls.conditions:
            for name in names:
                if settings[name] != defaults[name] and not has_meaning(settings):
                    yield name, reason
