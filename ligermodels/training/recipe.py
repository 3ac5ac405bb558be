"""Settings of every training run. Each kind of training adds settings in a subclass."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ligermodels.arguments import ActivationCheckpointing, Condition, no_effect, without_effect
from ligermodels.data.built_in_templates import TOKENS as BUILT_IN
from ligermodels.errors import ConfigError, short, validation_message
from ligermodels.parallel.plan import ParallelPlan
from ligermodels.training.locations import Located, absolute_data, absolute_settings, local_except
from ligermodels.training.optimizer_settings import OPTIMIZER_CONDITIONS, OptimizerSettings
from ligermodels.training.recipe_file import recipe_settings
from ligermodels.training.settings import (
    MONITORING_CONDITIONS,
    STREAMING,
    TEXT_OF_PATH,
    TOKENISING,
    DataForm,
    MonitoringSettings,
    Names,
    PathName,
    TokenisingSettings,
    check_known,
    check_weights,
    weights_of,
)

R = TypeVar("R", bound="TrainingRecipe")

CONDITIONS: tuple[Condition, ...] = (
    (
        ("evaluate_every", "validation_tokens"),
        lambda settings: settings["validation_fraction"] != 0,
        "needs a validation split, and validation_fraction is 0",
    ),
    *OPTIMIZER_CONDITIONS,
    *STREAMING,
    (("epochs",), lambda settings: settings["steps"] is None, "has no effect beside steps"),
    (("float8",), lambda settings: settings["dtype"] != "float64", "is for smaller dtypes than float64"),
    (("float8_gradients", "float8_exclude"), lambda settings: settings["float8"], "is for float8, which is false"),
    (
        ("excess_length_strategy",),
        lambda settings: settings["packing_strategy"] != "wrapped",
        "is for whole documents, and packing_strategy is wrapped",
    ),
    (
        ("keep_checkpoints",),
        lambda settings: settings["checkpoint_every"] is not None,
        "has no effect where checkpoint_every is null",
    ),
    *MONITORING_CONDITIONS,
)
"""Conditions of every recipe, checked in this order: a condition may depend on settings that were checked before."""


class TrainingRecipe(OptimizerSettings, TokenisingSettings, MonitoringSettings):
    """Settings of a run. The same recipe and data give the same run.

    Raises ConfigError for a value of another type or out of range, and for settings that contradict one another; the
    message names the field.

    Examples:
        >>> recipe = FineTuningRecipe(base="Qwen/Qwen2.5-0.5B-Instruct", data="chats.jsonl")
        >>> recipe = recipe.changed({"epochs": 2})
        >>> recipe = FineTuningRecipe.read("mine.yaml")
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    kind: ClassVar[str]
    """Name of the folder with the shipped recipes of this class."""
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
            "cuda_graph",
            "optimizer_in_bwd",
            "micro_batch_tokens",
            "parallel",
            "tokenizer",
            *TOKENISING,
            *MonitoringSettings.model_fields,
        }
    )
    """Settings that may change when a run resumes. They do not affect training, except for the order of sums. The path
    of the tokenizer may change, its content may not; and the plan, but not its `param_dtype`."""
    trains_heads: ClassVar[bool] = False
    """Whether heads are trained, alone or together with the model."""
    kept: ClassVar[frozenset[str]] = frozenset()
    """Settings that a resumed run takes from its checkpoint."""
    reads_start: ClassVar[bool] = False
    """Whether a run that resumes reads the heads in `start_from` again."""

    base: PathName = Field(None, description="The model: a checkpoint folder, or a Hugging Face hub id.")
    data: Annotated[tuple[str, ...], Located(absolute_data)] = Field(
        (),
        description="Texts, or files with a text or a chat in each record: .jsonl, .json, .csv, .parquet, "
        "also compressed; a folder, a glob, or hf:owner/name.",
    )
    data_weights: Annotated[tuple[float, ...], BeforeValidator(weights_of)] = Field(
        (),
        description="A weight for each value of `data`: its share of the documents of an epoch, such as 0.7,0.3.  "
        "[default: all documents of all]",
    )
    validation_fraction: float = Field(
        0.05, ge=0, le=1, lt=1, description="Fraction of the data in the validation split; 0: none."
    )
    validation_tokens: int | None = Field(
        None, ge=1, description="Tokens of the validation split to evaluate on.  [default: all]"
    )
    max_bad_lines: int = Field(0, ge=0, description="Unusable lines that are skipped, with a message each.")
    chat_template: Annotated[str | None, TEXT_OF_PATH, local_except(*BUILT_IN)] = Field(
        None, description=f"File of a chat template, or one of {', '.join(BUILT_IN)}.  [default: the checkpoint's]"
    )
    tokenizer: PathName = Field(
        None, description="Checkpoint folder or hub id of another tokenizer.  [default: the model's]"
    )
    date: str | None = Field(None, description="YYYY-MM-DD, for chat templates that write it.  [default: today]")

    steps: int | None = Field(None, ge=1, description="Optimizer steps.  [default: from the epochs]")
    epochs: float = Field(1.0, gt=0, description="Epochs, if steps is not given.")
    seq_len: int = Field(
        2048, ge=2, le=2**31 - 1, description="Tokens per sequence; documents are packed into sequences."
    )
    packing_strategy: Literal["bfd", "wrapped"] | None = Field(
        None,
        description="bfd: whole documents, by best-fit decreasing; wrapped: documents are split to fill sequences.  "
        "[default: bfd for chats, wrapped for texts]",
    )
    excess_length_strategy: Literal["truncate", "drop", "split", "raise"] = Field(
        "truncate", description="What happens to whole documents with more than seq_len tokens; a message counts them."
    )
    batch_tokens: int = Field(16384, ge=1, le=2**31 - 1, description="Most tokens per optimizer step.")
    micro_batch_tokens: int | None = Field(
        None, ge=1, description="Tokens per forward pass of a rank.  [default: batch_tokens, divided among the ranks]"
    )
    activation_checkpointing: ActivationCheckpointing = Field(
        "none",
        description="Recomputed in the backward pass, to save memory: nothing, cheap activations, or whole blocks; "
        "offload: whole blocks, with their inputs in host memory.",
    )
    cuda_graph: Literal["auto", "on", "off"] = Field(
        "auto", description="Each step as one CUDA graph; auto: of small models and short batches."
    )
    dtype: Literal["bfloat16", "float32", "float64"] | None = Field(
        None, description="Dtype of the parameters.  [default: the one in config.json, or float32]"
    )
    float8: bool = Field(
        False,
        description="Train the linear layers of the blocks in float8; evaluation is in the dtype of the parameters.",
    )
    float8_gradients: Literal["e5m2", "e4m3"] = Field(
        "e5m2", description="Float8: format of gradients; e5m2 has more range, e4m3 more precision."
    )
    float8_exclude: Names = Field(
        (), description="Float8: patterns of layers that are not converted, such as 'mlp' or '*.blocks.0.*'."
    )
    parallel: ParallelPlan = Field(
        ParallelPlan(), description="How the model is sharded over the processes of --gpus or torchrun."
    )
    seed: int = Field(0, description="Seed of the split, the order of the data, and rounding.")

    evaluate_every: int | None = Field(None, ge=1, description="Steps between evaluations.  [default: at the end]")
    checkpoint_every: int | None = Field(
        500, ge=1, description="Steps between checkpoints; null: no checkpoint is kept."
    )
    keep_checkpoints: int = Field(2, ge=1, description="Newest checkpoints to keep.")
    report_every: int | None = Field(
        None, ge=1, description="Steps between reports.  [default: a fiftieth of all, at most 10]"
    )

    def __init_subclass__(cls, *, init: bool = True, **config: Any) -> None:
        """`init=False` is for type checkers: the constructor that they would derive asks for every setting."""
        super().__init_subclass__(**config)

    @field_validator("*", mode="before")
    @classmethod
    def _within_int64(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{info.field_name}: must lie within int64, got {short(value)}")
        return value

    def __init__(self, **settings: Any) -> None:
        check_known(settings, type(self).model_fields, type(self).__name__)
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError("; ".join(map(validation_message, error.errors()))) from None

    @classmethod
    def read(cls: type[R], name_or_path: str | os.PathLike[str]) -> R:
        """The recipe in a YAML file, or a shipped recipe by its name.

        Raises ConfigError if the file cannot be read, or has an unknown setting or a wrong value; the message names the
        file.
        """
        return cls().changed(recipe_settings(name_or_path, cls.kind), str(name_or_path))

    @classmethod
    def check_kind(cls, recipe: object) -> None:
        """Raise ConfigError unless `recipe` is an instance of this class."""
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
        """`settings` under their current names; `source` is named in warnings."""
        return dict(settings)

    @field_validator("data", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(os.fspath(item) if isinstance(item, os.PathLike) else item for item in items)

    @field_validator("parallel", mode="before")
    @classmethod
    def _plan_of_section(cls, value: Any) -> Any:
        try:
            return ParallelPlan(**value) if isinstance(value, Mapping) else value
        except ConfigError as error:
            raise ConfigError(f"parallel.{error}") from None

    @field_validator("cuda_graph", mode="before")
    @classmethod
    def _yaml_switch(cls, value: Any) -> Any:
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value  # YAML reads on and off as bool

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
        """Raise ConfigError if settings contradict one another, or a setting has no effect with the others."""
        least, last = self.shortest_sequence
        if self.seq_len < least:
            raise ConfigError(
                f"seq_len: sequences of {self.seq_len} tokens have no target for the last {last}; it must be at least "
                f"{least}"
            )
        if self.trains_heads and self.parallel.tensor > 1:
            raise ConfigError("parallel.tensor: is for whole models; to train heads give shard and replicate")
        check_weights(self.data_weights, self.data, streaming=self.streaming)
        if "none" in self.track and len(self.track) > 1:
            raise ConfigError(f"track: has none and others, {', '.join(self.track)}; leave one out")
        micro = self.micro_batch_tokens or self.batch_tokens
        if micro % self.row_tokens or self.batch_tokens % micro:
            given = "" if self.micro_batch_tokens is None else f"micro_batch_tokens ({micro}), and that of "
            row = self.data_form.row_size(self.seq_len)
            raise ConfigError(f"batch_tokens ({self.batch_tokens}) must be a multiple of {given}{row}")
        self.check_optimizer(1, is_sharded=False)
        if self.streaming and self.steps is None:
            raise ConfigError("streaming: needs steps, because the documents of an epoch are not counted; give them")
        if self.parallel.activation_checkpointing is not None:
            raise ConfigError("parallel.activation_checkpointing: give activation_checkpointing, outside parallel")
        for name, reason in without_effect(self.conditions, dict(self), self.defaults()):
            raise ConfigError(no_effect(name, reason))

    @property
    def shortest_sequence(self) -> tuple[int, str]:
        """Tokens of the shortest sequences with a target for each head, and the name of the last head for messages."""
        return 2, "token"

    @property
    def trains_configs(self) -> bool:
        """Whether `base` may be a config without weights, to train from random weights."""
        return False

    @property
    def trains_embeddings(self) -> bool:
        """Whether embeddings of tokens that the base does not know are trained."""
        return self.trains_configs

    @property
    def data_form(self) -> DataForm:
        """The form of the records."""
        return DataForm()

    @property
    def row_tokens(self) -> int:
        """Most tokens of a row of a batch."""
        return self.seq_len * self.data_form.row_sequences

    @property
    def micro_batch_size(self) -> int:
        """Rows per forward pass of a single process."""
        return self.micro_batches()[0]

    @property
    def accumulation_steps(self) -> int:
        """Forward passes per optimizer step of a single process."""
        return self.micro_batches()[1]

    def micro_batches(self, ranks: int = 1) -> tuple[int, int]:
        """Rows per forward pass, and forward passes per optimizer step, of each of `ranks` data-parallel ranks.

        Raises ConfigError if the ranks cannot divide the batch.
        """
        sequences = self.batch_tokens // self.row_tokens
        micro = sequences // ranks if self.micro_batch_tokens is None else self.micro_batch_tokens // self.row_tokens
        if micro and sequences % (micro * ranks) == 0:
            return micro, sequences // (micro * ranks)
        if sequences % ranks:
            raise ConfigError(
                f"batch_tokens ({self.batch_tokens}) is {sequences} sequences, which {ranks} ranks cannot divide; make "
                f"it a multiple of {ranks * self.row_tokens}"
            )
        raise ConfigError(
            f"micro_batch_tokens ({self.micro_batch_tokens}) times {ranks} ranks must divide batch_tokens "
            f"({self.batch_tokens}); leave it out for {self.batch_tokens // ranks}"
        )

    def changed(self: R, settings: Mapping[str, Any], source: str = "recipe") -> R:
        """A copy with other settings.

        Settings that have no effect any more are reset to their defaults, unless they are in `settings`: `steps` if
        `epochs` is given, or the settings of evaluation without a validation split.

        Args:
            settings: name -> value; for the section `parallel` a dict of the settings to change in it.
            source: named in error messages.

        Raises:
            ConfigError: an unknown setting (the message names a similar one, if there is any), or a wrong value.

        Examples:
            >>> FineTuningRecipe(steps=100).changed({"epochs": 2}).steps is None
            True
        """
        settings, defaults = self.current_names(settings, source), self.defaults()
        check_known(settings, defaults, source)
        new = {**dict(self), **settings}
        for key, value in settings.items():
            if isinstance(section := getattr(self, key), BaseModel) and isinstance(value, Mapping):
                new[key] = {**dict(section), **value}
            elif isinstance(section, tuple) and isinstance(value, str | os.PathLike | float | int):
                new[key] = (value,)  # conditions are of tuples
        if "epochs" in settings and "steps" not in settings:
            new["steps"] = None
        for name, _ in without_effect(self.conditions, new, defaults):
            if name not in settings:
                new[name] = defaults[name]
        given = self.model_fields_set | settings.keys()  # other settings keep defaults that depend on settings
        try:
            return type(self)(**{name: value for name, value in new.items() if name in given})
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @property
    def start(self) -> str | None:
        """Folder or hub id of the heads that the run starts from; None: there are none."""
        return getattr(self, "start_from", None)

    def settings(self) -> dict[str, Any]:
        """Name -> value of each field, as JSON types."""
        return self.model_dump(mode="json")

    def absolute_settings(self) -> dict[str, Any]:
        """`settings`, with absolute paths in place of relative ones, so that a run resumes from any folder."""
        return absolute_settings(type(self).model_fields, self.settings())
