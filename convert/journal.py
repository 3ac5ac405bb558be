"""The files of a checkpoint replaced by those of another, all or none, and read as one save left them.

Readers, Hugging Face's tools among them, look for files by fixed names, so several files have to be replaced one after
another. Before the first of them, all new files are complete in JOURNAL, a folder within the checkpoint's; its rename
to that name is the commit point. Then the old files are moved into it, beginning with those by which readers find a
checkpoint, and the new ones out of it, ending with these. A reader that does not know this folder finds the old
checkpoint, none, or the new one at any moment. One that does finishes what a killed process has begun, or waits for a
process that is still at work.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from ligermodels.convert.files import ADAPTER, ADAPTER_CONFIG, INDEX, SINGLE, matching
from ligermodels.convert.input_files import read_json_object, shown
from ligermodels.convert.locks import POLL, Locked, locked
from ligermodels.errors import CheckpointError

JOURNAL = ".replacing"
PLAN, OLD = ".plan.json", ".old"
"""Within it: the names of the files to move, and the folder that the old ones are moved to."""
LOCK = ".save.lock"
"""Held, within a folder, by whoever changes its files."""
WAIT = 60.0
"""Seconds to wait for a process that replaces the files of a folder."""

ENTRIES = (INDEX, SINGLE, ADAPTER, "config.json", ADAPTER_CONFIG)
"""The files by which others find a checkpoint: gone first, there last."""


def temporary_name(folder: Path) -> str:
    """A new name for what is not, or no longer, part of `folder`."""
    return f".{folder.name}.{secrets.token_hex(4)}.partial"


def replace_files(folder: Path, temporary: Path, replaced: Collection[str]) -> None:
    """Make the files of `temporary`, a folder within `folder`, those of `folder`, in place of its files whose names
    match the patterns `replaced`. The caller holds the lock.

    Raises OSError when that fails; then all is as before, but for a disk on which it cannot be: see `settle`.
    """
    new = [path.name for path in temporary.iterdir()]
    old = [path.name for path in folder.iterdir() if path.name in new or matching(path.name, replaced)]
    if folders := [name for name in old if (folder / name).is_dir()]:
        raise OSError(f"{folders[0]} is a folder there")
    (temporary / OLD).mkdir()
    (temporary / PLAN).write_text(json.dumps({"old": _first(old), "new": _first(new)[::-1]}), encoding="utf-8")
    sync(temporary / PLAN)
    sync_folder(temporary)
    journal = folder / JOURNAL
    temporary.rename(journal)
    try:
        finish(folder)
    except BaseException:
        if all((journal / name).exists() for name in new) and not any((journal / OLD).iterdir()):
            journal.rename(temporary)
        raise


def settle(folder: Path) -> None:
    """Finish what a process that was killed has begun in `folder`; wait for one that is alive.

    Raises CheckpointError when it cannot be finished, takes longer than WAIT, or is not what a save leaves.
    """
    journal, deadline = folder / JOURNAL, time.monotonic() + WAIT
    while is_folder(journal):
        try:
            with locked(folder / LOCK) as works:
                if works or time.monotonic() > deadline:  # else it may be another's who is alive
                    finish(folder)
            time.sleep(0 if works else POLL)
        except Locked:
            if time.monotonic() > deadline:
                raise CheckpointError(f"{folder}: its files are being replaced by another process; try again") from None
            time.sleep(POLL)
        except OSError as error:
            raise CheckpointError(
                f"{folder}: a process was killed while it replaced the checkpoint there by another, and that cannot be "
                f"finished: {error}; open it once where its files can be renamed, or save it anew into another folder"
            ) from error


def finish(folder: Path) -> None:
    """Move the files as the journal says, if there is one, whatever has been moved by now. The caller holds the lock.

    Raises OSError when that fails; what it has moved is back then. CheckpointError for a journal of no save.
    """
    journal = folder / JOURNAL
    if not is_folder(journal):
        return
    old, new = _plan(journal)
    sync_folder(folder)
    aside = [(folder / name, journal / OLD / name) for name in old]
    into_place = [(journal / name, folder / name) for name in new]
    moved: list[tuple[Path, Path]] = []
    try:
        for source, target in (*aside, *into_place):
            # Of the old files one that is aside has been moved, and what has its name now is new.
            if source.exists() and not (target.parent.name == OLD and target.exists()):
                moved.append((source, target))
                source.rename(target)
        sync_folder(folder)
        done = journal.rename(folder / temporary_name(folder))
    except BaseException:
        for source, target in reversed(moved):
            if target.exists() and not source.exists():
                target.rename(source)
        raise
    shutil.rmtree(done, ignore_errors=True)


def _plan(journal: Path) -> tuple[list[str], list[str]]:
    """Names of the old files and of the new ones; CheckpointError for a journal that none of ours is: it moves nothing.

    The plan is on the disk before a folder becomes the journal: a save that was killed has it.
    """
    try:
        plan = read_json_object(journal / PLAN, CheckpointError)
        old, new = plan.get("old"), plan.get("new")
        if isinstance(old, list) and isinstance(new, list) and all(map(_is_name, [*old, *new])):
            return old, new
        wrong = f"{journal / PLAN}: does not name the files to move"
    except CheckpointError as error:
        wrong = str(error)
    raise CheckpointError(
        f"{shown(journal)}: holds a save to be finished, by a plan that cannot be followed: {wrong}; make it readable, "
        "or, where it is damaged or of no save, move what you need out of that folder (new files are in it, those that "
        f"they replace in its {OLD}) and remove it"
    )


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..")


def _first(names: Collection[str]) -> list[str]:
    return sorted(names, key=lambda name: (ENTRIES.index(name) if name in ENTRIES else len(ENTRIES), name))


def is_folder(path: Path) -> bool:
    """Whether it is a folder itself, not a link to one, which might be anywhere."""
    with suppress(OSError, ValueError):  # no path can be named so: those who open it say that
        return stat.S_ISDIR(path.lstat().st_mode)
    return False


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    with suppress(OSError):  # Not every file system can do this to a folder.
        sync(path)
