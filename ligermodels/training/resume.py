"""Whether a run may go on: with the recipe, the data and the base that it began with, wherever these now lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.training import fingerprint
from ligermodels.training.fingerprint import Fingerprint
from ligermodels.training.recipe import Recipe

FREE = {
    "evaluate_every",
    "checkpoint_every",
    "keep_checkpoints",
    "report_every",
    "held_out_tokens",
    "max_bad_lines",
    "drift",
    "reference",
}
"""Settings that may change when a run goes on: they decide nothing of what is trained."""
BY_CONTENT = {"base", "data", "chat_template"}
"""Settings that name files: what these hold must be the same, not where they are."""

Content = dict[str, list[Fingerprint]]
"""Fingerprints of the files of each of BY_CONTENT."""


def same_recipe(recipe: Recipe, before: Mapping[str, Any]) -> Recipe:
    """`recipe` with the date of `before`, and the heads that it started from, wherever they are now: they are in the
    checkpoint. ConfigError when it differs in what decides the training."""
    recipe = replace(recipe, date=recipe.date or before["date"], start_from=before["start_from"])
    now = recipe.settings()
    kept = now.keys() - FREE - BY_CONTENT
    if changed := [name for name in now if name in kept and now[name] != before.get(name)]:
        told = "; ".join(f"{name} was {before.get(name)!r}, is {now[name]!r}" for name in changed)
        raise ConfigError(f"the run cannot go on with another recipe: {told}; use the old one, or begin anew")
    return recipe


def content_of(recipe: Recipe, folder: Path) -> Content:
    """What the run reads: `folder` is that of the base. Raises InputError and CheckpointError for unreadable files."""
    template = [recipe.chat_template] if recipe.chat_template else []
    return {
        "base": fingerprint.of_checkpoint(folder),
        "data": data_content(recipe),
        "chat_template": _fingerprints(template, CheckpointError),
    }


def data_content(recipe: Recipe) -> list[Fingerprint]:
    """Of the recipe's data. Raises InputError for files that cannot be read."""
    return _fingerprints(recipe.data, InputError)


def require_same_content(now: Content, before: Content) -> None:
    """InputError for other data, CheckpointError for another base or chat template; each file at fault is named."""
    for what, kind in (("data", InputError), ("chat_template", CheckpointError), ("base", CheckpointError)):
        if told := list(_differences(now[what], before[what], in_order=what == "data")):
            raise kind(
                f"{what}: not what the run began with: {'; '.join(told)}. Give it what it had, wherever that is now, "
                "or begin anew"
            )


def _fingerprints(files: Iterable[str], kind: type[Exception]) -> list[Fingerprint]:
    try:
        return [fingerprint.of_file(Path(file)) for file in files]
    except OSError as error:
        raise kind(f"{error.filename}: cannot be read: {error.strerror or error}") from None


def _differences(now: list[Fingerprint], before: list[Fingerprint], *, in_order: bool) -> Iterable[str]:
    """Files of data count by their place, those of a checkpoint by their name."""
    here, there = ({(i if in_order else one["name"]): one for i, one in enumerate(files)} for files in (now, before))
    for key in [*there, *(key for key in here if key not in there)]:
        if key not in here:
            yield f"{there[key]['name']} is missing"
        elif key not in there:
            yield f"{here[key]['name']} was not there"
        elif here[key]["bytes"] != there[key]["bytes"]:
            yield f"{_name(here[key], there[key])} had {there[key]['bytes']:,} bytes, has {here[key]['bytes']:,}"
        elif here[key]["digest"] != there[key]["digest"]:
            yield f"{_name(here[key], there[key])} has other content"


def _name(now: Fingerprint, before: Fingerprint) -> str:
    return now["name"] if now["name"] == before["name"] else f"{now['name']} (it was {before['name']})"
