"""A disk that is full while a run writes: an error that names the file, and nothing half-written under its name."""

import errno
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from ligermodels.convert.saving import written_whole
from ligermodels.errors import CheckpointError
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


class _OfLibrary(BaseException):
    """An error such as torch's CheckpointException, which is no Exception."""


@pytest.mark.parametrize(("free", "error"), [(50, CheckpointError), (1 << 20, _OfLibrary)])
def test_a_full_disk_is_named_also_where_a_library_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, error: type[BaseException]
) -> None:
    frees = iter([1 << 20, free, free])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=next(frees)))
    message = "the disk is too full; it needs 200 bytes, 50 are free" if free == 50 else "unexpected pos"
    with pytest.raises(error, match=message), written_whole(tmp_path / "step-1", 200) as folder:
        (folder / "tensors").write_bytes(bytes(100))
        raise _OfLibrary("unexpected pos 704 vs 598")
    assert not list(tmp_path.iterdir())
