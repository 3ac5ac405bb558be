"""Locks between processes, which a process that has died does not keep."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

POLL = 0.005
"""Seconds between two attempts."""


class Locked(Exception):
    """Another holds the lock."""


@contextmanager
def locked(path: Path, *, wait: float = 0.0) -> Iterator[bool]:
    """Hold the lock of which `path`, made and removed here, is the file; gives whether this file system has locks.

    Raises Locked when another process, or another thread, holds it for longer than `wait` seconds; OSError when the
    file cannot be made.
    """
    deadline = time.monotonic() + wait
    while (descriptor := _taken(path)) is None:
        if time.monotonic() >= deadline:
            raise Locked(str(path))
        time.sleep(POLL)
    file, works = descriptor
    try:
        yield works
    finally:
        try:
            with suppress(OSError):
                path.unlink()
        finally:
            os.close(file)


def _taken(path: Path) -> tuple[int, bool] | None:
    """The open file of the lock, and whether it excludes others; None when another has it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder may have removed the file after it was opened here: that one excludes nobody.
        if os.path.samestat(os.fstat(file), os.stat(path)):
            return file, True
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF):  # as Lustre and NFS may say
            return file, False
        os.close(file)
        raise
    os.close(file)
    return None
