"""Faults of a disk: at any change of the files below a folder the process is killed, or the call fails.

Changes are seen by Python's audit hooks (opening for writing, mkdir, rename, unlink, rmdir, ...). What writes outside
of Python, and contents, are counted where they end: a fault there cuts what has been written in half.
"""

import errno
import os
import pathlib
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch

from ligermodels.convert import safetensors_writer

Fault = Literal["kill", "error"]
PATHS = {"open": 1, "os.mkdir": 1, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.link": 2, "os.symlink": 2}
"""Audit event -> how many of its first arguments are paths."""
CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Killed(BaseException):
    """The process is gone: no change of the disk follows, cleaning up among them."""


class Disk:
    """Counts the changes below `root`. With `at`, that one fails: by "kill" so do all that follow."""

    def __init__(self, root: pathlib.Path, at: int | None = None, fault: Fault = "kill") -> None:
        self.root, self.at, self.fault = os.path.realpath(root), at, fault
        self.changes, self.struck, self.paused = 0, False, 0
        self.lock = threading.RLock()

    def change(self) -> bool:
        """Count one; whether it is the one that fails, or comes after the end of the process."""
        with self.lock:
            if self.paused:
                return False
            self.changes += 1
            strikes = self.changes == self.at
            self.struck |= strikes
            return strikes or (self.struck and self.fault == "kill")

    def failure(self) -> BaseException:
        return Killed() if self.fault == "kill" else OSError(errno.EIO, os.strerror(errno.EIO))

    def is_below(self, path: Any) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        path = os.fsdecode(path)
        # Names alone are relative to a descriptor: those that rmtree removes.
        return not os.path.isabs(path) or os.path.realpath(os.path.dirname(path)).startswith(self.root)


_disk: Disk | None = None
_installed = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    disk = _disk
    if disk is None or event not in PATHS:
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & CHANGES):
        return
    if any(disk.is_below(path) for path in arguments[: PATHS[event]]) and disk.change():
        raise disk.failure()


def _torn(disk: Disk, function: Callable[..., Any], path_of: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose result, the file at `path_of(its arguments)`, is cut in half by a fault."""

    def call(*args: Any, **options: Any) -> Any:
        path = path_of(*args, **options)
        if not disk.is_below(path):
            return function(*args, **options)
        if disk.struck and disk.fault == "kill":
            raise disk.failure()
        with disk.lock:
            disk.paused += 1
        try:
            found = function(*args, **options)
        finally:
            with disk.lock:
                disk.paused -= 1
        if disk.change():
            os.truncate(path, os.path.getsize(path) // 2)
            raise disk.failure()
        return found

    return call


@contextmanager
def faulty(root: pathlib.Path, at: int | None = None, fault: Fault = "kill") -> Iterator[Disk]:
    """A `Disk` for what is done within. A kill ends the block, quietly; errors pass."""
    global _disk, _installed
    if not _installed:  # For ever: hooks cannot be removed.
        sys.addaudithook(_hook)
        _installed = True
    disk = Disk(root, at, fault)
    with pytest.MonkeyPatch.context() as patch:
        for place, name, path_of in (
            (safetensors_writer, "save_file", lambda tensors, path, **_: path),
            (torch, "save", lambda found, file, **_: file),
            (pathlib.Path, "write_bytes", lambda path, *_, **__: path),
            (pathlib.Path, "write_text", lambda path, *_, **__: path),
            (shutil, "copyfile", lambda source, target, **_: target),
        ):
            patch.setattr(place, name, _torn(disk, getattr(place, name), path_of))
        _disk = disk
        try:
            yield disk
        except Killed:
            pass
        finally:
            _disk = None


def moments(count: int, wanted: int | None) -> list[int]:
    """Changes 1 to `count`; of these at most `wanted`, evenly spread, the first and the last among them."""
    if wanted is None or count <= wanted:
        return list(range(1, count + 1))
    return sorted({1 + round(i * (count - 1) / (wanted - 1)) for i in range(wanted)})
