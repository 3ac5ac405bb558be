"""Write folders completely or not at all."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ligermodels.convert.files import CHECKPOINT
from ligermodels.convert.input_files import folder_to_write, shown
from ligermodels.convert.journal import (
    JOURNAL,
    LOCK,
    finish,
    is_folder,
    replace_files,
    settle,
    sync,
    sync_folder,
    temporary_name,
)
from ligermodels.convert.locks import Locked, locked
from ligermodels.errors import CheckpointError, LigerModelsError

FULL = "the disk is too full"
LEAST_FREE = 1 << 16
"""A disk with fewer free bytes is full: `needed` is approximate."""
WAIT = 0.5
"""Seconds to wait for another process that saves into the same folder. Long enough for a reader that finishes the save
of a killed process: see `journal.settle`."""


@contextmanager
def written_whole(
    folder: Path, needed: int, *, overwrite: bool = False, replaced: Collection[str] = CHECKPOINT
) -> Iterator[Path]:
    """Context manager that gives a temporary folder; at the end its files move into `folder`.

    On an exception the temporary folder is removed, and `folder` is unchanged. If the process is killed, `folder` is
    unchanged, or the next reader moves the files (`journal.settle`); the next save removes leftovers.

    Args:
        folder: the folder to write. A link is followed.
        needed: approximate bytes of the files.
        overwrite: replace a checkpoint in `folder`; its other files stay.
        replaced: patterns of the names of files to replace: weights, configs and tokenizer.

    Raises:
        CheckpointError: `folder` is a file, is not empty without `overwrite`, is being written by another process, or
            cannot be written.
    """
    folder = _resolved(folder)
    exists = folder.is_dir()
    # The temporary folder is within an existing folder, which may be a mount or have a read-only parent.
    parent = folder if exists else folder.parent
    new_parents = [path for path in (parent, *parent.parents) if not path.exists()]
    temporary = parent / temporary_name(folder)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with locked(folder / LOCK if exists else _lock_beside(folder), wait=WAIT) as lock_works:
            if lock_works:  # otherwise leftovers may belong to a live process
                _remove_leftovers(folder, exists)
            (finish if lock_works else settle)(folder)
            if not overwrite and exists and not is_empty(folder):
                raise CheckpointError(
                    f"{folder}: is not empty; give another folder, or overwrite=True to replace a checkpoint"
                )
            temporary.mkdir()
            if shutil.disk_usage(temporary).free < needed:
                raise OSError(FULL)
            with _full_disk_named(temporary, needed):
                yield temporary
            _sync_all(temporary)
            if exists:
                replace_files(folder, temporary, replaced)
        if not exists:
            temporary.rename(folder)  # fails if another process has filled it meanwhile
            sync_folder(parent)
    except Locked:
        raise CheckpointError(
            f"{folder}: another process is saving into it; wait for it, or give another folder"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be written: {error}; it needs {needed:,} bytes{_free(parent)}; {_outcome(folder)}"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for path in new_parents:
            with suppress(OSError):  # not empty: the save succeeded, or another process uses it
                path.rmdir()


@contextmanager
def _full_disk_named(folder: Path, needed: int) -> Iterator[None]:
    """Raise OSError for any error in writing `folder` if the disk has no room for what is missing of `needed` bytes:
    libraries report a full disk by errors of their own, such as torch's "unexpected pos"."""
    try:
        yield
    except (OSError, LigerModelsError, KeyboardInterrupt):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if shutil.disk_usage(folder).free < max(needed - written, LEAST_FREE):
            raise OSError(FULL) from error
        raise


def _resolved(folder: Path) -> Path:
    try:
        folder = folder.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError before Python 3.13, for a link to itself
        raise CheckpointError(f"{shown(folder)}: is no path: {error}") from None
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; give a folder")
    return folder


def _lock_beside(folder: Path) -> Path:
    """Lock of a folder that does not exist yet."""
    return folder.parent / f".{folder.name}.lock"


def is_empty(folder: Path) -> bool:
    """Whether `folder` holds nothing except locks and leftovers of a killed save."""
    return all(
        _is_partial(path, folder) or (re.fullmatch(r"\.\w+\.lock", path.name) and path.is_file())
        for path in folder.iterdir()
    )


def require_free(folder: Path) -> None:
    """Raise CheckpointError if `folder` is a file, holds files, or cannot be written."""
    path = folder_to_write(folder)
    try:
        free = not path.exists() or is_empty(path)
    except OSError as error:
        raise CheckpointError(f"{shown(folder)}: cannot be read: {error.strerror or error}") from None
    if not free:
        raise CheckpointError(f"{folder}: exists and is not an empty folder; give another, or overwrite=True")


def _is_partial(path: Path, folder: Path) -> bool:
    """Whether `path` is a temporary folder of a save into `folder`: see `temporary_name`."""
    match = re.fullmatch(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{8}}\.partial", path.name)
    return match is not None and is_folder(path)


def _remove_leftovers(folder: Path, exists: bool) -> None:
    """Remove temporary folders of killed saves into `folder`, whose lock the caller holds."""
    _remove_partial(folder, folder if exists else folder.parent)
    beside = _lock_beside(folder)
    if exists and beside.exists():  # left by a save that was killed before `folder` existed
        with suppress(Locked, OSError), locked(beside):
            _remove_partial(folder, folder.parent)


def _remove_partial(folder: Path, parent: Path) -> None:
    for path in parent.iterdir():
        if _is_partial(path, folder):
            # Renamed first: a process that still wants to move it to its final name must not get half of it.
            with suppress(OSError):
                shutil.rmtree(path.rename(parent / temporary_name(folder)), ignore_errors=True)


def _sync_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        sync(path)
    sync_folder(folder)


def _outcome(folder: Path) -> str:
    """Text for the message: the state of `folder` after a failed save."""
    if is_folder(folder / JOURNAL):
        return "the new files replace the old ones once the folder is opened and its files can be renamed"
    return "nothing was written"


def _free(path: Path) -> str:
    try:
        return f", {shutil.disk_usage(path).free:,} are free"
    except OSError:
        return ""
