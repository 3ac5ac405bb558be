"""The folder of a run: its files, how they are written, and whether a run can resume there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from ligermodels.convert.config_json import read_json
from ligermodels.convert.files import ADAPTER, ADAPTER_CONFIG, WEIGHTS, matching
from ligermodels.convert.input_files import folder_to_write
from ligermodels.convert.locks import Locked, locked
from ligermodels.convert.saving import require_free
from ligermodels.errors import CheckpointError
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.inputs import BY_CONTENT, START, TEACHER, Content
from ligermodels.training.recipe import TrainingRecipe

if TYPE_CHECKING:
    from ligermodels.training.base import Base

RECIPE = "recipe.yaml"
CONTENT = "content.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
REFERENCE = "reference.npz"
CURVES = "curves.png"
"""Files of a run before its export. CONTENT is written first and marks the folder of a run."""
RESULT = (*WEIGHTS, "config.json", ADAPTER, "adapter_model.bin", ADAPTER_CONFIG, CURVES)
"""Patterns of the names of the files by which programs know the result of a run; exports replace all others too."""
LOCK = ".run.lock"
"""Locked as long as a run is alive."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock `folder` for one run; make it if it does not exist. The operating system unlocks it if the process dies.

    Raises CheckpointError if another run uses the folder, or it cannot be made.
    """
    new_folders = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    with ExitStack() as held:
        held.callback(_remove_empty, new_folders)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(folder / LOCK))
        except Locked:
            raise CheckpointError(f"{folder}: another run uses it; wait for its end, or give another folder") from None
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be written: {error}; give another folder") from error
        yield


def require_apart(out: Path, base: Base, recipe: TrainingRecipe) -> None:
    """Raise CheckpointError if `out` is the base, the tokenizer or the heads that the run of `recipe` reads: the result
    would replace them, and a resumed run reads them again."""
    settings = recipe.settings()
    # With new tokens for a chat template the files of `base` are changed copies.
    named = [(name, settings.get(name)) for name in ("base", "tokenizer", "teacher")]
    for name, folder in (
        *named,
        ("start_from", recipe.start),
        ("base", base.config.parent),
        ("tokenizer", base.tokenizer),
    ):
        folder = None if folder is None else os.path.expanduser(folder)
        if folder is not None and os.path.isdir(folder) and out.exists() and os.path.samefile(folder, out):
            raise CheckpointError(f"{out}: is the run's {name}, which its result would replace; give another folder")


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # not empty: the run has written a file
            folder.rmdir()


def has_checkpoints(folder: Path) -> bool:
    """Whether there is a checkpoint to resume from."""
    return bool(Checkpoints(folder / CHECKPOINTS).steps())


def require_usable(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise CheckpointError if a run could not write to `folder`, or not without replacing other files.

    Args:
        folder: the output folder.
        resume: whether the run resumes from checkpoints in it.
        overwrite: whether its content may be replaced.
    """
    folder = folder_to_write(folder)
    if overwrite:
        return
    if resume:
        _require_resumable(folder)
    elif has_checkpoints(folder):
        raise CheckpointError(
            f"{folder}: holds checkpoints of a run; resume=True continues from the newest, overwrite=True starts over"
        )
    elif not _is_before_first_step(folder):
        require_free(folder)


def _require_resumable(folder: Path) -> None:
    """Raise CheckpointError if `folder` holds neither a run with checkpoints nor a run that was interrupted before its
    first checkpoint."""
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    if checkpoints.steps():
        return
    checkpoints.newest()  # raises for checkpoints under other names
    require_run(folder)
    names = {path.name for path in folder.iterdir()}
    interrupted = CONTENT in names and not any(matching(name, RESULT) for name in names)
    if not interrupted and not _is_before_first_step(folder):
        if {CONTENT, RECIPE} <= names and _keeps_no_checkpoint(folder / RECIPE):
            raise CheckpointError(
                f"{folder}: a finished run, whose recipe has checkpoint_every: null, so that there is no checkpoint to "
                "resume from or to extend. To train its result further give that as the model, and another folder; for "
                "a run that can be extended set checkpoint_every"
            )
        raise CheckpointError(
            f"{folder}: holds no checkpoint to resume from, but something else; if that is a finished run there is "
            "nothing left to do, otherwise give another folder, or overwrite=True to start over"
        )


def require_run(folder: Path) -> None:
    """Raise CheckpointError if `folder` does not exist or is empty: a run that was killed at any moment leaves a file.
    Only before `alone_in`, which makes one, this is certain."""
    if not folder.is_dir() or not any(folder.iterdir()):
        raise CheckpointError(
            f"{folder}: there is no run to resume; give the folder of the run, or leave resume=True out for a new run "
            "(overwrite=True beside it resumes a run if there is one, and otherwise starts a new one)"
        )


def _is_before_first_step(folder: Path) -> bool:
    """Whether `folder` holds no more than a run leaves that ended before its first step, which any run may replace."""
    left = {_partial(CONTENT), LOCK, REFERENCE, _partial(REFERENCE)}
    with suppress(OSError):
        return folder.is_dir() and {path.name for path in folder.iterdir()} <= left
    return False


def _keeps_no_checkpoint(recipe: Path) -> bool:
    try:
        settings = yaml.safe_load(recipe.read_bytes())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return False
    return isinstance(settings, dict) and settings.get("checkpoint_every", 1) is None


def prepare(folder: Path, recipe: TrainingRecipe, content: Content, *, start_over: bool) -> None:
    """Create the folder of a run and write its first files.

    Args:
        folder: the folder.
        recipe: written to recipe.yaml.
        content: fingerprints of the files that the run reads, written to content.json.
        start_over: remove the checkpoints and metrics of an earlier run, and its result: of an adapter and a model in
            one folder, other programs would open the adapter.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if start_over:
        for name in (CHECKPOINTS, TENSORBOARD):
            shutil.rmtree(folder / name, ignore_errors=True)
        for path in (path for path in folder.iterdir() if matching(path.name, RESULT) and path.is_file()):
            path.unlink()
    for partial in folder.glob(".*.partial"):  # of killed processes
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink()
    write_atomically(folder / CONTENT, f"{json.dumps(content, indent=1)}\n".encode())
    write_atomically(
        folder / RECIPE, yaml.safe_dump(recipe.absolute_settings(), sort_keys=False, allow_unicode=True).encode()
    )


def read_content(folder: Path) -> Content:
    """The fingerprints that a run wrote. Raises CheckpointError or ConfigError if they are missing or damaged."""
    content: Content = read_json(folder / CONTENT)
    if content.keys() - {TEACHER, START} != BY_CONTENT:
        raise CheckpointError(f"{folder / CONTENT}: is damaged: it must hold {', '.join(sorted(BY_CONTENT))}")
    return content


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under another name and rename it; a file with the same content is not written again."""
    if not path.is_file() or path.read_bytes() != content:
        partial = path.with_name(_partial(path.name))
        with named_in_errors(path):
            partial.write_bytes(content)
        partial.replace(path)


@contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """Name `path` in an OSError without a file: Python names files that it cannot open, but not one on a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _partial(name: str) -> str:
    return f".{name}.partial"
