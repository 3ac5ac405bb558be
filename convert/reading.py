"""The files of a checkpoint, read as one save left them."""

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
    """What `open_files` gives, all of one save: it is called again when the checkpoint in `folder` was replaced
    meanwhile. It opens files in the stack, which is closed at the end; what is open stays as it is when it is replaced.

    Of several `ranks` all call this, and get the same save. Raises CheckpointError when others replace it all the time,
    and what `open_files` raises.
    """
    ranks, deadline = ranks or Ranks(), time.monotonic() + WAIT
    while True:
        with ExitStack() as opened:
            failure: Exception | None = None
            with ranks.step(str(folder), ""):  # All have seen the folder before any opens it,
                settle(folder)
                before = _stamp(folder)
            try:
                found = open_files(opened)
            except (LigerModelsError, OSError) as error:
                failure = error
            ranks.gather(None)  # and see it again after all have.
            if not any(ranks.gather(_stamp(folder) != before)):
                with ranks.step(str(folder), ""):
                    if failure is not None:
                        raise failure
                yield found
                return
        if any(ranks.gather(time.monotonic() > deadline)):
            raise CheckpointError(f"{folder}: its files are being replaced again and again; try later")


def _stamp(folder: Path) -> Any:
    """What is another after any save into `folder`."""
    found = {}
    with suppress(OSError, ValueError), os.scandir(folder) as entries:  # those who open it say what is wrong
        for entry in entries:
            if entry.name == JOURNAL or matching(entry.name, (*CHECKPOINT, ADAPTER, ADAPTER_CONFIG)):
                with suppress(OSError):
                    it = entry.stat()
                    found[entry.name] = it.st_ino, it.st_size, it.st_mtime_ns
    return found
