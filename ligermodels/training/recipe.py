"""Recipes: all that decides how Medusa heads are trained, in a YAML file or in the flags of the command line."""

from __future__ import annotations

import difflib
import math
import os
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from ligermodels.errors import ConfigError

SHIPPED = resources.files("ligermodels.training") / "recipes"


def _setting(
    default: Any,
    help: str,
    *,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> Any:
    limits = {"at_least": at_least, "at_most": at_most, "above": above, "below": below}
    return field(default=default, metadata={"help": help, **limits})


@dataclass(frozen=True)
class Condition:
    """When a setting has a meaning: whether it `holds`, by the settings, and what to say when it does not. `rival`: a
    setting that is for the same, of which the one that is given later counts."""

    holds: Callable[[Mapping[str, Any]], bool]
    words: str
    rival: str | None = None


STAGE_2 = Condition(lambda it: it["stage"] == 2, "is for stage 2; in stage 1 the model is frozen")
REFERENCE = Condition(lambda it: it["distill"] or it["drift"], "is for distill and drift, and neither is asked for")
ADAMW = Condition(lambda it: it["optimizer"] == "adamw", "is AdamW's, and the optimizer is another")
HELD_OUT = Condition(lambda it: it["held_out"] > 0, "is of what is held out, and held_out is 0")
BY_EPOCHS = Condition(lambda it: it["steps"] is None, "means nothing beside steps", rival="steps")
CHECKPOINTS = Condition(lambda it: it["checkpoint_every"] is not None, "means nothing where checkpoint_every is null")

CONDITIONS: tuple[tuple[str, Condition], ...] = (
    ("lambda0", STAGE_2),
    ("lambda0_schedule", STAGE_2),
    ("head_lr_multiplier", STAGE_2),
    ("distill", STAGE_2),
    ("drift", STAGE_2),
    ("drift", HELD_OUT),
    ("reference", REFERENCE),
    ("beta1", ADAMW),
    ("beta2", ADAMW),
    ("rounding", ADAMW),
    ("evaluate_every", HELD_OUT),
    ("held_out_tokens", HELD_OUT),
    ("epochs", BY_EPOCHS),
    ("keep_checkpoints", CHECKPOINTS),
)
"""Settings that have a meaning beside some others only; a condition may ask for settings that stand before it here."""


@dataclass(frozen=True)
class Recipe:
    """What decides a training of Medusa heads: with the same recipe and data it comes out the same.

    Raises ConfigError, which names the field, for a value of another type or out of its range, and for fields that
    contradict one another.
    """

    base: str | None = _setting(None, "The model: a checkpoint folder, or a Hugging Face hub id.")
    data: tuple[str, ...] = _setting(
        (), "Text, or .jsonl with a text or a chat (messages, or ShareGPT's conversations) in each line."
    )
    held_out: float = _setting(
        0.05, "Share of the lines and files that is kept for the scores; 0: none.", at_least=0, at_most=1
    )
    held_out_tokens: int | None = _setting(None, "So many of its tokens are scored.  [default: all]", at_least=1)
    max_bad_lines: int = _setting(0, "Unusable lines that are passed over, each with a message.", at_least=0)
    chat_template: str | None = _setting(None, "File of a chat template.  [default: the checkpoint's]")
    date: str | None = _setting(None, "YYYY-MM-DD, for templates that write it.  [default: that of the start]")

    heads: int = _setting(5, "Tokens to guess beyond the next one.", at_least=1)
    layers: int = _setting(1, "ResBlocks in a head.", at_least=1)
    lm_head: Literal["own", "shared"] = _setting("own", "An lm_head for each head, or the model's own.")
    start_from: str | None = _setting(
        None, "Heads to train on, such as those of stage 1: a folder, or a hub id.  [default: new ones]"
    )
    stage: int = _setting(1, "1: the model is frozen; 2: it learns with the heads.", at_least=1, at_most=2)

    decay: float = _setting(0.8, "Head i's loss counts decay ** i.", at_least=0)
    lambda0: float = _setting(0.2, "Stage 2: weight of the heads' loss beside the model's own.", at_least=0)
    lambda0_schedule: Literal["constant", "linear", "sine"] = _setting("constant", "Stage 2: lambda0's way up.")

    distill: bool = _setting(False, "Stage 2: the model learns to stay as it was, not from the data's own words.")
    drift: bool = _setting(False, "Stage 2: how far the model moves is scored; with distill it always is.")
    reference: Literal["device", "host"] = _setting(
        "device", "Where the untouched model is kept for these; host: its blocks in host memory, fetched at each use."
    )

    optimizer: Literal["adamw", "adafactor"] = _setting("adamw", "adafactor needs less memory.")
    learning_rate: float = _setting(5e-4, "The highest; of the model, in stage 2.", at_least=0)
    head_lr_multiplier: float = _setting(4.0, "Stage 2: the heads' learning rate over the model's.", at_least=0)
    warmup: int | None = _setting(
        None, "Steps to reach it.  [default: 40, or a tenth of the steps if fewer]", at_least=0
    )
    final_lr: float = _setting(0.1, "Share of it left at the end of the cosine.", at_least=0, at_most=1)
    weight_decay: float = _setting(0.0, "Of matrices.", at_least=0)
    beta1: float = _setting(0.9, "AdamW's.", at_least=0, below=1)
    beta2: float = _setting(0.95, "AdamW's.", at_least=0, below=1)
    grad_clip: float | None = _setting(1.0, "Largest norm of the gradient; null in a recipe: any.", above=0)

    steps: int | None = _setting(None, "Optimiser steps.  [default: as many as the epochs take]", at_least=1)
    epochs: float = _setting(1.0, "Times through the data, when steps are not given.", above=0)
    length: int = _setting(2048, "Tokens in a row; documents are packed into rows.", at_least=2)
    batch_tokens: int = _setting(16384, "Tokens in a step: rows times length.", at_least=1)
    micro_batch_tokens: int | None = _setting(
        None, "Tokens at once, whose gradients are summed up to a step's.  [default: all of them]", at_least=1
    )
    dtype: Literal["bfloat16", "float32", "float64"] | None = _setting(
        None, "Dtype of the parameters.  [default: the checkpoint's, which must be one of these]"
    )
    rounding: Literal["stochastic", "nearest"] = _setting(
        "stochastic", "AdamW's, where parameters are bfloat16: right on average, or the nearest and small steps lost."
    )
    seed: int = _setting(0, "Decides what is held out, the order of the rest, and how is rounded.")

    evaluate_every: int | None = _setting(None, "Steps between scores on what is held out.", at_least=1)
    checkpoint_every: int | None = _setting(500, "Steps between checkpoints; null in a recipe: none stays.", at_least=1)
    keep_checkpoints: int = _setting(2, "Checkpoints that are kept, the newest.", at_least=1)
    report_every: int | None = _setting(None, "Steps between reports.  [default: 50 reports in all]", at_least=1)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = checked(each.name, getattr(self, each.name))
            object.__setattr__(self, each.name, value)
            if isinstance(value, int | float) and (wanted := _outside(value, each.metadata)):
                raise ConfigError(f"{each.name}: must be {wanted}, got {value}")
        if self.date is not None:
            parse_date(self.date)
        if self.length < self.heads + 2:
            raise ConfigError(
                f"length: rows of {self.length} tokens have no target for the last of {self.heads} heads; it must be "
                f"at least {self.heads + 2}"
            )
        micro = self.micro_batch_tokens or self.batch_tokens
        if micro % self.length or self.batch_tokens % micro:
            raise ConfigError(
                f"batch_tokens ({self.batch_tokens}) must be a multiple of micro_batch_tokens ({micro}), and that one "
                f"of length ({self.length})"
            )
        for name, condition in _meaningless(vars(self)):
            raise ConfigError(f"{name}: {condition.words}; leave it out")

    @property
    def micro_batch_rows(self) -> int:
        """Rows in one pass through the model."""
        return (self.micro_batch_tokens or self.batch_tokens) // self.length

    @property
    def accumulate(self) -> int:
        """Passes in a step."""
        return self.batch_tokens // (self.micro_batch_tokens or self.batch_tokens)

    def lambda0_at(self, step: int, steps: int) -> float:
        """Weight of the heads' loss in `step`, from 1, of `steps`: lambda0, or on a straight or sine way up to it."""
        done = step / steps
        way = {"constant": 1.0, "linear": done, "sine": math.sin(done * math.pi / 2)}
        return self.lambda0 * way[self.lambda0_schedule]

    def changed(self, settings: Mapping[str, Any], source: str = "recipe") -> Recipe:
        """This with other settings. What has no meaning beside them, and is not among them, is as by default again; so
        are steps beside new epochs.

        Raises ConfigError, which names `source`, for a key that there is not.
        """
        known = [each.name for each in fields(self)]
        for key in settings:
            if key not in known:
                nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
                raise ConfigError(f"{source}: there is no setting {key!r}; the nearest is {nearest!r}")
        try:
            new = {**vars(self), **{name: checked(name, value) for name, value in settings.items()}}
            for name, condition in CONDITIONS:
                if name in settings and condition.rival is not None and condition.rival not in settings:
                    new[condition.rival] = DEFAULTS[condition.rival]
            for name, _ in _meaningless(new):
                if name not in settings:
                    new[name] = DEFAULTS[name]
            return Recipe(**new)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    def settings(self) -> dict[str, Any]:
        """Name and value of each field, in values that JSON and YAML have."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def read_recipe(name_or_path: str | os.PathLike[str]) -> Recipe:
    """The recipe in a YAML file, or one of those that are shipped, by its name (`shipped_recipes`).

    Raises ConfigError when there is none, and for keys that no recipe has.
    """
    text = recipe_text(name_or_path)
    try:
        content = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name_or_path}: not YAML: {' '.join(str(error).split())}") from None
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{name_or_path}: must hold 'key: value' lines")
    return Recipe().changed(content or {}, str(name_or_path))


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(file.name.removesuffix(".yaml") for file in SHIPPED.iterdir() if file.name.endswith(".yaml"))


def recipe_text(name_or_path: str | os.PathLike[str]) -> str:
    """The file of a recipe. Raises ConfigError when there is none."""
    path = Path(name_or_path)
    if str(name_or_path) in shipped_recipes() and not path.is_file():
        return (SHIPPED / f"{name_or_path}.yaml").read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{name_or_path}: no recipe can be read there ({reason}); those that are shipped are "
            f"{', '.join(shipped_recipes())}"
        ) from None


def checked(name: str, value: Any) -> Any:
    """`value` for the field `name` of a recipe, as its type: 1 is a float too, and so is "5e-4", text to YAML.

    Raises ConfigError for a value of another type.
    """
    for kind in kinds(HINTS[name]):
        if kind is type(None) and value is None:
            return None
        if get_origin(kind) is Literal and value in get_args(kind):
            return value
        if get_origin(kind) is tuple:
            items = [value] if isinstance(value, str) else value
            if isinstance(items, list | tuple) and all(isinstance(item, str | os.PathLike) for item in items):
                return tuple(map(str, items))
        if kind is str and isinstance(value, str | os.PathLike):
            return str(value)
        if kind is bool and isinstance(value, bool):
            return value
        if kind is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                number = float(value)
            except ValueError:
                continue
            if math.isfinite(number):
                return number
    raise ConfigError(f"{name}: must be {' or '.join(map(_words, kinds(HINTS[name])))}, got {value!r}")


def parse_date(text: str) -> datetime:
    """The start of a day, from YYYY-MM-DD; ConfigError for anything else."""
    try:
        found = datetime.strptime(text, "%Y-%m-%d")
        if found.date().isoformat() == text:
            return found
    except ValueError:
        pass
    raise ConfigError(f"date: must be YYYY-MM-DD, got {text!r}")


def kinds(hint: Any) -> tuple[Any, ...]:
    """The types that a field of type `hint` may have."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    if get_origin(kind) is tuple:
        return "a list of texts"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}[kind]


def _outside(value: float, limits: Mapping[str, Any]) -> str:
    """What `value` had to be, when it is not: "from 0 to 1", "at least 0 and below 1"."""
    low, high, above, below = (limits[name] for name in ("at_least", "at_most", "above", "below"))
    if low <= value <= high and above < value < below:
        return ""
    if math.isfinite(low) and math.isfinite(high):
        return f"from {low:g} to {high:g}"
    words = {"at least": low, "at most": high, "above": above, "below": below}
    return " and ".join(f"{word} {limit:g}" for word, limit in words.items() if math.isfinite(limit))


def _meaningless(values: Mapping[str, Any]) -> Iterator[tuple[str, Condition]]:
    """Settings that are not as by default, and the condition of each that does not hold; in the order of the table."""
    for name, condition in CONDITIONS:
        if values[name] != DEFAULTS[name] and not condition.holds(values):
            yield name, condition


HINTS = get_type_hints(Recipe)
"""Types of the fields."""
DEFAULTS = {each.name: each.default for each in fields(Recipe)}
"""Values of the fields where nothing else is said."""


class _Loader(yaml.SafeLoader):
    """YAML in which a date is text, and a key that stands twice is an error, not the last of the two."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {
        start: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
        for start, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[Any]()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found
