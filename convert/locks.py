"""Locks between processes. The system releases the lock of a process that dies."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

POLL = 0.005
"""Seconds between two attempts to take a lock."""


class Locked(Exception):
    """Another process or thread holds the lock."""


@contextmanager
def locked(path: Path, *, wait: float = 0.0) -> Iterator[bool]:
    """Context manager that holds a lock; gives False if the file system has no locks, and True otherwise.

    Args:
        path: the lock file. It is created here, and removed at the end.
        wait: seconds to wait for the lock.

    Raises:
        Locked: another process or thread holds the lock for longer than `wait`.
        OSError: the file cannot be created.
    """
    deadline = time.monotonic() + wait
    while (lock := _take(path)) is None:
        if time.monotonic() >= deadline:
            raise Locked(str(path))
        time.sleep(POLL)
    file, works = lock
    try:
        yield works
    finally:
        try:
            with suppress(OSError):
                path.unlink()
        finally:
            os.close(file)


def _take(path: Path) -> tuple[int, bool] | None:
    """Descriptor of the lock file, and whether the file system has locks; None if the lock is taken."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder may have removed the file after it was opened here; a lock on it would exclude nobody.
        if os.path.samestat(os.fstat(file), os.stat(path)):
            return file, True
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF):  # from Lustre and NFS
            return file, False
        os.close(file)
        raise
    os.close(file)
    return None
