"""Read the files of a checkpoint as a single save wrote them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from ligermodels.convert.files import ADAPTER, ADAPTER_CONFIG, CHECKPOINT, matching
from ligermodels.convert.journal import JOURNAL, WAIT, settle
from ligermodels.convert.ranks import Ranks
from ligermodels.errors import CheckpointError, LigerModelsError

T = TypeVar("T")


@contextmanager
def reading(folder: Path, open_files: Callable[[ExitStack], T], ranks: Ranks | None = None) -> Iterator[T]:
    """Context manager that opens files of one and the same save, and gives the result of `open_files`.

    `open_files` is called again if another process replaced the checkpoint meanwhile. Files that are open keep their
    content when they are replaced.

    Args:
        folder: folder of a checkpoint.
        open_files: function that opens the files in the stack that it gets; the stack is closed at the end.
        ranks: ranks that all call this and get the same save. Default: this process alone.

    Raises:
        CheckpointError: other processes keep replacing the checkpoint; or an error of `open_files`.
    """
    ranks, deadline = ranks or Ranks(), time.monotonic() + WAIT
    while True:
        with ExitStack() as opened:
            failure: Exception | None = None
            with ranks.step(str(folder), ""):  # all ranks see the folder before any rank opens it,
                settle(folder)
                before = _stamp(folder)
            try:
                result = open_files(opened)
            except (LigerModelsError, OSError) as error:
                failure = error
            ranks.gather(None)  # and again after all ranks have opened it
            if not any(ranks.gather(_stamp(folder) != before)):
                with ranks.step(str(folder), ""):
                    if failure is not None:
                        raise failure
                yield result
                return
        if any(ranks.gather(time.monotonic() > deadline)):
            raise CheckpointError(f"{folder}: other processes keep replacing its files; try again later")


def _stamp(folder: Path) -> Any:
    """A value that any save into `folder` changes."""
    stamp = {}
    with suppress(OSError, ValueError), os.scandir(folder) as entries:  # opening the folder reports errors
        for entry in entries:
            if entry.name == JOURNAL or matching(entry.name, (*CHECKPOINT, ADAPTER, ADAPTER_CONFIG)):
                with suppress(OSError):
                    status = entry.stat()
                    stamp[entry.name] = status.st_ino, status.st_size, status.st_mtime_ns
    return stamp
