"""A disk that is full while a run writes: an error that names the file, and nothing half-written under its name."""

import errno
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ligermodels.training.folder import write_atomically
from ligermodels.training.metrics import Metrics


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writes beyond `size` bytes fail, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _write_whole(folder: Path) -> None:
    write_atomically(folder / "metrics.jsonl", b"{}\n" * 100)


def _append(folder: Path) -> None:
    metrics = Metrics(folder)
    try:
        for step in range(100):
            metrics.write(step, {"loss": 1.0})
    finally:
        metrics.close()


@pytest.mark.parametrize("write", [_write_whole, _append])
def test_the_file_is_named(tmp_path: Path, write: Callable[[Path], None]) -> None:
    with pytest.raises(OSError, match=r"metrics\.jsonl") as raised, files_of_at_most(100):
        write(tmp_path)
    assert raised.value.errno == errno.EFBIG
    assert (tmp_path / "metrics.jsonl").exists() == (write is _append)
