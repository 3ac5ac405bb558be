"""Folders that are written whole or not at all."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ligermodels.convert.files import CHECKPOINT
from ligermodels.convert.input_files import shown
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
from ligermodels.errors import CheckpointError

WAIT = 0.5
"""Seconds to wait for another who saves into the same folder: long enough for a reader that finishes what a killed
process has begun, see `journal.settle`."""


@contextmanager
def written_whole(
    folder: Path, needed: int, *, overwrite: bool = False, replaced: Collection[str] = CHECKPOINT
) -> Iterator[Path]:
    """A temporary folder to fill with about `needed` bytes of files, which become those of `folder` on leaving.

    On any exception it is removed and `folder` is as before. When the process is killed, `folder` is as before, or its
    readers find what has been written (`journal.settle`); the next save removes what is left over. `overwrite` replaces
    a checkpoint in `folder` (weights, configs, tokenizer: what the patterns `replaced` match); other files stay.

    Raises CheckpointError when `folder` is a file, holds something without `overwrite`, is being written by another, or
    cannot be written.
    """
    try:
        folder = folder.resolve()  # Of a link, what it points to is replaced.
    except (OSError, RuntimeError) as error:  # RuntimeError: Python below 3.13, of a link to itself
        raise CheckpointError(f"{shown(folder)}: is no path: {error}") from None
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; give a folder")
    # In the folder if it is there: it may be a mount, and its parent may be read-only.
    is_there = folder.is_dir()
    beside = folder.parent / f".{folder.name}.lock"
    parent, lock = (folder, folder / LOCK) if is_there else (folder.parent, beside)
    new_parents = [path for path in (parent, *parent.parents) if not path.exists()]
    temporary = parent / temporary_name(folder)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with locked(lock, wait=WAIT) as works:
            if works:  # else they may be another's who is alive
                _remove_leftovers(folder, parent)
                if is_there and beside.exists():  # of a save that was killed before there was a folder
                    with suppress(Locked, OSError), locked(beside):
                        _remove_leftovers(folder, folder.parent)
            (finish if works else settle)(folder)
            if not overwrite and is_there and not is_empty(folder):
                raise CheckpointError(
                    f"{folder}: is not empty; give another folder, or overwrite=True to replace a checkpoint"
                )
            temporary.mkdir()
            if shutil.disk_usage(temporary).free < needed:
                raise OSError("the disk is too full")
            yield temporary
            for path in temporary.iterdir():
                sync(path)
            sync_folder(temporary)
            if is_there:
                replace_files(folder, temporary, replaced)
        if not is_there:
            temporary.rename(folder)  # Fails if someone else has filled it meanwhile.
            sync_folder(parent)
    except Locked:
        raise CheckpointError(f"{folder}: another is saving into it; wait for that, or give another folder") from None
    except OSError as error:
        outcome = "nothing was written"
        if is_folder(folder / JOURNAL):
            outcome = "what was written takes the place of what was there as soon as the folder is read and can be"
        raise CheckpointError(
            f"{folder}: cannot be written: {error}; it needs {needed:,} bytes{_free(parent)}; {outcome}"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for path in new_parents:
            with suppress(OSError):  # Not empty: all went well, or another uses it.
                path.rmdir()


def is_empty(folder: Path) -> bool:
    """Whether `folder` holds nothing but locks, and what a killed save has left over, which the next one removes."""
    return all(
        _is_partial(path, folder) or (re.fullmatch(r"\.\w+\.lock", path.name) and path.is_file())
        for path in folder.iterdir()
    )


def _is_partial(path: Path, folder: Path) -> bool:
    """Whether it is a folder that a save into `folder` has made: see `temporary_name`."""
    found = re.fullmatch(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{8}}\.partial", path.name)
    return found is not None and is_folder(path)


def _remove_leftovers(folder: Path, parent: Path) -> None:
    for path in parent.iterdir():
        if _is_partial(path, folder):
            # Whoever would still give it its final name finds it gone, instead of half gone.
            with suppress(OSError):
                shutil.rmtree(path.rename(parent / temporary_name(folder)), ignore_errors=True)


def _free(path: Path) -> str:
    try:
        return f", {shutil.disk_usage(path).free:,} are free"
    except OSError:
        return ""
