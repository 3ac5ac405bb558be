"""Replace the files of a checkpoint by the files of another checkpoint: all of them or none.

Readers, Hugging Face's tools included, look for files by fixed names, so the files have to be replaced one after
another. First, all new files are completed in a folder within the checkpoint's folder. Renaming that folder to JOURNAL
is the commit point. Then the old files are moved into it, ENTRIES first, and the new files out of it, ENTRIES last.
Readers find a checkpoint by its ENTRIES. So at any moment other programs find the old checkpoint, none, or the new one.
Readers of this package wait for a live process, and finish the moves of a killed process.
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
from typing import cast

from ligermodels.convert.files import ADAPTER, ADAPTER_CONFIG, CHAT_TEMPLATES, INDEX, SINGLE, indexed_shards, matching
from ligermodels.convert.input_files import read_json_object, shown
from ligermodels.convert.json_values import is_file_name, is_list_of
from ligermodels.convert.locks import POLL, Locked, locked
from ligermodels.errors import CheckpointError

JOURNAL = ".replacing"
PLAN, OLD = ".plan.json", ".old"
"""Within JOURNAL: the file with the names of the files to move, and the folder for the old files."""
LOCK = ".save.lock"
"""Lock file within a folder; a process holds it while it changes the files."""
WAIT = 60.0
"""Seconds to wait for a process that replaces the files of a folder."""

ENTRIES = (INDEX, SINGLE, ADAPTER, "config.json", ADAPTER_CONFIG)
"""Files by which readers find a checkpoint: removed first, and added last."""


def temporary_name(folder: Path) -> str:
    """A new name for a folder with files that are not yet, or no longer, part of `folder`."""
    return f".{folder.name}.{secrets.token_hex(4)}.partial"


def replace_files(folder: Path, temporary: Path, replaced: Collection[str]) -> None:
    """Replace files of `folder` by the files of `temporary`. The caller holds the lock.

    Args:
        folder: folder of a checkpoint.
        temporary: folder within `folder` with the new files.
        replaced: patterns of the names of old files to remove. With an index, the shards that it names are removed too:
            under any names, programs that read all safetensors of a folder would take them for the new weights.

    Raises:
        OSError: a move failed. All moves have been undone, unless undoing failed too; then `settle` finishes them.
    """
    new = [path.name for path in temporary.iterdir()]
    gone = {*new, *(indexed_shards(folder) if matching(INDEX, replaced) else ())}
    old = [path.name for path in folder.iterdir() if path.name in gone or matching(path.name, replaced)]
    if folders := [name for name in old if (folder / name).is_dir() and name != CHAT_TEMPLATES]:
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
    """Finish the moves of a killed process in `folder`, and wait until a live process has finished.

    Raises:
        CheckpointError: the moves cannot be finished, take longer than WAIT, or the journal is not a save's.
    """
    journal, deadline = folder / JOURNAL, time.monotonic() + WAIT
    while is_folder(journal):
        try:
            with locked(folder / LOCK) as works:
                if works or time.monotonic() > deadline:  # otherwise the journal may belong to a live process
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
    """Make the moves of the journal that have not been made yet, if there is a journal. The caller holds the lock.

    Raises:
        OSError: a move failed; the moves of this call have been undone.
        CheckpointError: the journal is not a save's.
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
            # If an old file is already in OLD, the file that has its name now is a new one.
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
    """Names of the old and of the new files; CheckpointError if the journal has no valid plan.

    A save syncs its plan to disk before it makes the journal, so the journal of a killed save always has one.
    """
    try:
        plan = read_json_object(journal / PLAN, CheckpointError)
        old, new = plan.get("old"), plan.get("new")
        if is_list_of(old, is_file_name) and is_list_of(new, is_file_name):
            return cast(list[str], old), cast(list[str], new)
        fault = f"{journal / PLAN}: does not name the files to move"
    except CheckpointError as error:
        fault = str(error)
    raise CheckpointError(
        f"{shown(journal)}: holds an unfinished save with a plan that cannot be followed: {fault}; make it readable. "
        "If it is damaged, move the files that you need out of that folder (new files are in it, the files that they "
        f"replace are in its {OLD}) and remove it"
    )


def _first(names: Collection[str]) -> list[str]:
    return sorted(names, key=lambda name: (ENTRIES.index(name) if name in ENTRIES else len(ENTRIES), name))


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder, and not a link to one."""
    with suppress(OSError, ValueError):  # an impossible name; opening the path reports it
        return stat.S_ISDIR(path.lstat().st_mode)
    return False


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    with suppress(OSError):  # not supported by every file system
        sync(path)
