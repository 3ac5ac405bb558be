"""Recipes: all settings that decide a training run, from a YAML file, from the flags of the command line, or both."""

from __future__ import annotations

import datetime
import difflib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ligermodels.errors import ConfigError
from ligermodels.training.renamed import current_settings

SHIPPED = resources.files("ligermodels.training") / "recipes"


Condition = tuple[tuple[str, ...], Callable[[Mapping[str, Any]], bool], str]
"""Settings; whether they have a meaning, given all settings; and why not otherwise."""

CONDITIONS: tuple[Condition, ...] = (
    (
        ("heads_loss_weight", "heads_loss_weight_schedule", "head_lr_multiplier", "distill", "kl_to_reference"),
        lambda settings: settings["stage"] == 2,
        "is for stage 2; in stage 1 the model is frozen",
    ),
    (
        ("kl_to_reference", "evaluate_every", "validation_tokens"),
        lambda settings: settings["validation_fraction"] != 0,
        "needs a validation split, and validation_fraction is 0",
    ),
    (
        ("reference",),
        lambda settings: settings["distill"] or settings["kl_to_reference"],
        "is for distill and kl_to_reference, and both are false",
    ),
    (
        ("beta1", "beta2", "rounding"),
        lambda settings: settings["optimizer"] == "adamw",
        "is a setting of AdamW, and the optimizer is another",
    ),
    (("epochs",), lambda settings: settings["steps"] is None, "has no effect beside steps"),
    (
        ("keep_checkpoints",),
        lambda settings: settings["checkpoint_every"] is not None,
        "has no effect where checkpoint_every is null",
    ),
)
"""Checked in this order: a condition may depend on settings that have been checked before."""


class Recipe(BaseModel):
    """Settings of a run. The same recipe and data give the same run.

    Raises ConfigError, which names the field, for a value of another type or out of range, and for settings that
    contradict one another.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    base: str | None = Field(None, description="The model: a checkpoint folder, or a Hugging Face hub id.")
    data: tuple[str, ...] = Field((), description="Text, or .jsonl with a text or a chat in each line.")
    validation_fraction: float = Field(
        0.05, ge=0, le=1, description="Fraction of the data in the validation split; 0: none."
    )
    validation_tokens: int | None = Field(None, ge=1, description="Tokens of it to evaluate on.  [default: all]")
    max_bad_lines: int = Field(0, ge=0, description="Unusable lines that are skipped, each with a message.")
    chat_template: str | None = Field(None, description="File of a chat template.  [default: the checkpoint's]")
    date: str | None = Field(None, description="YYYY-MM-DD, for chat templates that write it.  [default: today]")

    num_heads: int = Field(5, ge=1, description="Medusa heads: tokens predicted beyond the next one.")
    num_layers: int = Field(1, ge=1, description="ResBlocks per head.")
    lm_head: Literal["own", "shared"] = Field("own", description="An lm_head for each head, or the model's own.")
    start_from: str | None = Field(None, description="Heads to start from: a folder or a hub id.  [default: new heads]")
    stage: int = Field(1, ge=1, le=2, description="1: train the heads, model frozen; 2: train both.")

    decay: float = Field(0.8, ge=0, description="Loss weight of head i: decay ** i.")
    heads_loss_weight: float = Field(0.2, ge=0, description="Stage 2: weight of the heads' loss.")
    heads_loss_weight_schedule: Literal["constant", "linear", "sine"] = Field(
        "constant", description="Stage 2: how that weight rises over the run."
    )

    distill: bool = Field(False, description="Stage 2: the model's loss is KL(initial model || model).")
    kl_to_reference: bool = Field(False, description="Stage 2: evaluate the KL to the initial model; distill does.")
    reference: Literal["device", "cpu_offload"] = Field(
        "device", description="Where the initial model is kept; cpu_offload saves GPU memory and is slower."
    )

    optimizer: Literal["adamw", "adafactor"] = Field("adamw", description="adafactor needs less memory.")
    learning_rate: float = Field(5e-4, ge=0, description="Peak learning rate; in stage 2 that of the model.")
    head_lr_multiplier: float = Field(4.0, ge=0, description="Stage 2: learning rate of the heads / the model.")
    warmup_steps: int | None = Field(None, ge=0, description="Linear warm-up.  [default: 40, at most a tenth of all]")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="Final learning rate as a fraction of the peak.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay, of matrices only.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's beta1.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's beta2.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="Clip the gradient norm; null in a recipe: do not.")

    steps: int | None = Field(None, ge=1, description="Optimizer steps.  [default: from the epochs]")
    epochs: float = Field(1.0, gt=0, description="Epochs, where steps is not given.")
    seq_len: int = Field(2048, ge=2, description="Tokens per sequence; documents are packed into sequences.")
    batch_tokens: int = Field(16384, ge=1, description="Tokens per optimizer step.")
    micro_batch_tokens: int | None = Field(None, ge=1, description="Tokens per forward pass.  [default: batch_tokens]")
    dtype: Literal["bfloat16", "float32", "float64"] | None = Field(
        None, description="Dtype of the parameters.  [default: the checkpoint's, which must be one of these]"
    )
    rounding: Literal["stochastic", "nearest"] = Field(
        "stochastic", description="AdamW: rounding of bfloat16 parameters; nearest loses small updates."
    )
    seed: int = Field(0, description="Seed of the split, the order of the data, and rounding.")

    evaluate_every: int | None = Field(None, ge=1, description="Steps between evaluations.  [default: at the end]")
    checkpoint_every: int | None = Field(500, ge=1, description="Steps between checkpoints; null: none is kept.")
    keep_checkpoints: int = Field(2, ge=1, description="Newest checkpoints to keep.")
    report_every: int | None = Field(None, ge=1, description="Steps between reports.  [default: 50 reports in all]")

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError("; ".join(map(_message, error.errors()))) from None

    @field_validator("base", "chat_template", "start_from", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator("data", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(os.fspath(item) if isinstance(item, os.PathLike) else item for item in items)

    @field_validator("date")
    @classmethod
    def _is_date(cls, value: str | None) -> str | None:
        with suppress(ValueError):
            if value is None or datetime.date.fromisoformat(value).isoformat() == value:  # reads other formats too
                return value
        raise ConfigError(f"date: must be YYYY-MM-DD, got {value!r}")

    @model_validator(mode="after")
    def _is_consistent(self) -> Recipe:
        if self.seq_len < self.num_heads + 2:
            raise ConfigError(
                f"seq_len: sequences of {self.seq_len} tokens have no target for the last of {self.num_heads} heads; "
                f"it must be at least {self.num_heads + 2}"
            )
        micro = self.micro_batch_tokens or self.batch_tokens
        if micro % self.seq_len or self.batch_tokens % micro:
            raise ConfigError(
                f"batch_tokens ({self.batch_tokens}) must be a multiple of micro_batch_tokens ({micro}), and that one "
                f"of seq_len ({self.seq_len})"
            )
        for name, reason in _without_meaning(dict(self)):
            raise ConfigError(f"{name}: {reason}; leave it out")
        return self

    @property
    def micro_batch_size(self) -> int:
        """Sequences per forward pass."""
        return (self.micro_batch_tokens or self.batch_tokens) // self.seq_len

    @property
    def accumulation_steps(self) -> int:
        """Forward passes per optimizer step."""
        return self.batch_tokens // (self.micro_batch_tokens or self.batch_tokens)

    def heads_loss_weight_at(self, step: int, steps: int) -> float:
        """Weight of the heads' loss in `step`, counted from 1, of `steps`."""
        done = step / steps
        factor = {"constant": 1.0, "linear": done, "sine": math.sin(done * math.pi / 2)}
        return self.heads_loss_weight * factor[self.heads_loss_weight_schedule]

    def changed(self, settings: Mapping[str, Any], source: str = "recipe") -> Recipe:
        """A copy with other settings. Those that lose their meaning, and are not among `settings`, are reset to their
        defaults: with stage 1 what is for stage 2, and with epochs the steps.

        Raises ConfigError, which names `source`, for an unknown setting, with the nearest known one.
        """
        settings = current_settings(settings, source)
        for key in settings:
            if key not in DEFAULTS:
                nearest = difflib.get_close_matches(str(key), DEFAULTS, n=1, cutoff=0.0)[0]
                raise ConfigError(f"{source}: there is no setting {key!r}; the nearest is {nearest!r}")
        new = {**dict(self), **settings}
        if "epochs" in settings and "steps" not in settings:
            new["steps"] = None
        for name, _ in _without_meaning(new):
            if name not in settings:
                new[name] = DEFAULTS[name]
        try:
            return Recipe(**new)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    def settings(self) -> dict[str, Any]:
        """Name and value of each field, as JSON and YAML types."""
        return self.model_dump(mode="json")


DEFAULTS = {name: field.default for name, field in Recipe.model_fields.items()}
"""Default of each setting."""


def read_recipe(name_or_path: str | os.PathLike[str]) -> Recipe:
    """The recipe in a YAML file, or a shipped one, by its name (`shipped_recipes`).

    Raises ConfigError, which names the file, when it cannot be read, and as `Recipe.changed`.
    """
    text = recipe_text(name_or_path)
    try:
        content = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{name_or_path}: not YAML: {' '.join(str(error).split())}") from None
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{name_or_path}: must hold 'key: value' lines")
    return Recipe().changed(content or {}, str(name_or_path))


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(file.name.removesuffix(".yaml") for file in SHIPPED.iterdir() if file.name.endswith(".yaml"))


def recipe_text(name_or_path: str | os.PathLike[str]) -> str:
    """The content of a recipe's file. Raises ConfigError when it cannot be read."""
    path = Path(name_or_path)
    if str(name_or_path) in shipped_recipes() and not path.is_file():
        return (SHIPPED / f"{name_or_path}.yaml").read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{name_or_path}: cannot be read ({reason}); the shipped recipes are {', '.join(shipped_recipes())}"
        ) from None


def _message(error: Any) -> str:
    """A pydantic error in one line. Those of the validators above say all themselves."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    text = error["msg"].replace("Input should be", "must be")
    return f"{'.'.join(map(str, error['loc']))}: {text}, got {error['input']!r}"


def _without_meaning(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Settings that differ from their default though they have no meaning, with the reason. Evaluated lazily, so a
    caller may reset one before the next is checked."""
    for names, has_meaning, reason in CONDITIONS:
        for name in names:
            if settings[name] != DEFAULTS[name] and not has_meaning(settings):
                yield name, reason


class _Loader(yaml.SafeLoader):
    """YAML 1.1, except that dates are text, 1e-3 is a number, and a repeated key is an error."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {
        start: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
        for start, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[Any]()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is repeated", key_node.start_mark)
            seen.add(key)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
