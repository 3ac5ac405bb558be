"""The folder of a run: what its files are, how they are written, and whether a run may go on there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import yaml

from ligermodels.convert.config_json import read_json
from ligermodels.errors import CheckpointError
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.recipe import Recipe
from ligermodels.training.resume import BY_CONTENT, Content

RECIPE, CONTENT, METRICS, CHECKPOINTS, TENSORBOARD = (
    "recipe.yaml",
    "content.json",
    "metrics.jsonl",
    "checkpoints",
    "tensorboard",
)
"""What a run has in its folder before it ends; CONTENT is written first, and tells that the others are a run's."""


def has_checkpoints(folder: Path) -> bool:
    """Whether there is a step to go on from."""
    return bool(Checkpoints(folder / CHECKPOINTS).steps())


def require_resumable(folder: Path) -> None:
    """CheckpointError when a run can neither go on in `folder` nor begin there without harm to what it holds."""
    if has_checkpoints(folder) or not folder.exists():
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
    whole = {name for name in names if not (name.startswith(".") and name.endswith(".partial"))}
    begun = CONTENT in names and whole <= {RECIPE, CONTENT, METRICS, CHECKPOINTS, TENSORBOARD}
    if not begun and not names <= {_partial(CONTENT)}:
        raise CheckpointError(
            f"{folder}: holds no checkpoint to go on from, but something else; if that is a finished run there is "
            "nothing left to do, otherwise give another folder, or --overwrite to begin anew"
        )


def prepare(folder: Path, recipe: Recipe, content: Content, *, anew: bool) -> None:
    """Make `folder`, without what processes that were killed, or with `anew` an earlier run, left; note what the run
    is of."""
    folder.mkdir(parents=True, exist_ok=True)
    if anew:
        for name in (CHECKPOINTS, TENSORBOARD):
            shutil.rmtree(folder / name, ignore_errors=True)
    for left in folder.glob(".*.partial"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink()
    write_whole(folder / CONTENT, f"{json.dumps(content, indent=1)}\n".encode())
    write_whole(folder / RECIPE, yaml.safe_dump(recipe.settings(), sort_keys=False, allow_unicode=True).encode())


def read_content(folder: Path) -> Content:
    """Fingerprints of what the run in `folder` reads. Raises CheckpointError or ConfigError when there are none."""
    path = folder / CONTENT
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; without it nobody knows what the run has learned from")
    found: Content = read_json(path)
    if found.keys() != BY_CONTENT:
        raise CheckpointError(f"{path}: is damaged: it must hold {', '.join(sorted(BY_CONTENT))}")
    return found


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name, and rename it: it is as before, or all there. One that is the same stays."""
    if not path.is_file() or path.read_bytes() != content:
        partial = path.with_name(_partial(path.name))
        partial.write_bytes(content)
        partial.replace(path)


def _partial(name: str) -> str:
    return f".{name}.partial"
