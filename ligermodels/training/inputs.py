"""What a run reads: its documents, and whether recipe and files are those that an interrupted run started with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ligermodels.data import fingerprint
from ligermodels.data.documents import Documents
from ligermodels.data.fingerprint import Fingerprint
from ligermodels.errors import CheckpointError, ConfigError, InputError, LigerModelsError
from ligermodels.training.base import Base
from ligermodels.training.recipe import R, TrainingRecipe

BY_CONTENT = {"base", "data", "chat_template"}
"""Settings that name files. Their content must be the same; their paths may differ."""

LENGTH = {"steps", "epochs"}
"""Settings of how long a run is. It may become longer when it resumes."""

Content = dict[str, list[Fingerprint]]
"""Fingerprints of the files of each of BY_CONTENT."""


def documents_of(
    recipe: TrainingRecipe, base: Base, say: Callable[[str], object], *, piece: int | None = None
) -> Documents:
    """The recipe's data as documents, by the tokenizer of `base`; long texts in pieces of so many bytes."""
    return Documents.of_checkpoint(
        base.tokenizer,
        recipe.data,
        config=base.config,
        chat_template=recipe.chat_template,
        date=recipe.date,
        max_bad_lines=recipe.max_bad_lines,
        on_bad_line=say,
        piece=piece,
    )


def same_recipe(recipe: R, before: Mapping[str, Any]) -> R:
    """`recipe` with the date and the settings in `kept` of `before`, those in a checkpoint. Raises ConfigError when
    they differ in a setting that affects training, other than LENGTH."""
    before = _current(recipe, before)
    kept = {name: before[name] for name in recipe.kept}
    recipe = recipe.model_copy(update={"date": recipe.date or before["date"], **kept})
    now = {
        name: value for name, value in recipe.settings().items() if name not in recipe.may_change | BY_CONTENT | LENGTH
    }
    if told := changes(now, before):
        raise ConfigError(f"the run cannot resume with another recipe: {told}; use the old one, or start over")
    return recipe


def length_changes(recipe: TrainingRecipe, before: Mapping[str, Any]) -> str:
    """How `recipe` differs from `before`, that of a checkpoint, in the length of the run; empty if it does not."""
    return changes({name: getattr(recipe, name) for name in sorted(LENGTH)}, _current(recipe, before))


def _current(recipe: TrainingRecipe, before: Mapping[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return recipe.current_names(before)


def changes(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """The settings `now` that differ from `before`, for a message; empty if none does."""
    changed = {name: value for name, value in now.items() if value != before.get(name)}
    return "; ".join(f"{name} was {before.get(name)!r}, is {value!r}" for name, value in changed.items())


def content_of(recipe: TrainingRecipe, base: Base) -> Content:
    """Fingerprints of what the run reads. Raises InputError and CheckpointError for unreadable files."""
    return {
        "base": base.fingerprints(),
        "data": data_content(recipe),
        "chat_template": _fingerprints([recipe.chat_template] if recipe.chat_template else [], CheckpointError),
    }


def data_content(recipe: TrainingRecipe) -> list[Fingerprint]:
    """Fingerprints of the data. Raises InputError for files that cannot be read."""
    return _fingerprints(recipe.data, InputError)


def require_same_content(now: Content, before: Content) -> None:
    """Raises InputError for other data, CheckpointError for another base or chat template, naming each file."""
    for what, kind in (("data", InputError), ("chat_template", CheckpointError), ("base", CheckpointError)):
        if told := list(_differences(now[what], before[what], in_order=what == "data")):
            raise kind(
                f"{what}: not what the run started with: {'; '.join(told)}. Give the original files, wherever they are "
                "now, or start over"
            )


def _fingerprints(files: Iterable[str], kind: type[LigerModelsError]) -> list[Fingerprint]:
    return [fingerprint.of_file(Path(file), kind) for file in files]


def _differences(now: list[Fingerprint], before: list[Fingerprint], *, in_order: bool) -> Iterable[str]:
    """Differences, file by file. Data files are matched by position, files of a checkpoint by name."""
    here, there = ({(i if in_order else one["name"]): one for i, one in enumerate(files)} for files in (now, before))
    for key in [*there, *(key for key in here if key not in there)]:
        if key not in here:
            yield f"{there[key]['name']} is missing"
        elif key not in there:
            yield f"{here[key]['name']} is new"
        elif here[key]["bytes"] != there[key]["bytes"]:
            yield f"{_name(here[key], there[key])} had {there[key]['bytes']:,} bytes, has {here[key]['bytes']:,}"
        elif here[key]["digest"] != there[key]["digest"]:
            yield f"{_name(here[key], there[key])} has other content"


def _name(now: Fingerprint, before: Fingerprint) -> str:
    return now["name"] if now["name"] == before["name"] else f"{now['name']} (was {before['name']})"
