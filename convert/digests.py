"""SHA-256 of weight files: written into the index of a checkpoint, and compared with it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from ligermodels.convert.files import INDEX, SINGLE, read_digests, read_index
from ligermodels.errors import CheckpointError

CHUNK = 1 << 22
"""Bytes that are read at a time."""


def digest_of(path: Path, progress: Callable[[int], object] = lambda count: None) -> str:
    """SHA-256 of a file, in hexadecimal digits; `progress` gets the bytes read since. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            progress(len(chunk))
    return digest.hexdigest()


def check_digests(folder: Path, progress: Callable[[int, int], object] = lambda done, total: None) -> list[str]:
    """Compare the shards in `folder` with the digests in its index; returns the names of those that are right.

    None are where there are no digests: one file alone has no index, and other writers have no digests in theirs.
    `progress` is called with bytes done and bytes in all.

    Raises CheckpointError that names every shard that is missing, damaged or of another checkpoint.
    """
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return []
    digests, files = read_digests(folder), sorted(set(read_index(folder).values()))
    if not digests:
        return []
    done, total = 0, sum((folder / file).stat().st_size for file in files if (folder / file).is_file())

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    wrong = []
    for file in files:
        try:
            if digest_of(folder / file, advance) != digests.get(file):
                wrong.append(file)
        except OSError as error:
            wrong.append(f"{file} ({error.strerror})")
    if wrong:
        raise CheckpointError(
            f"{folder}: {len(wrong)} of {len(files)} shards are not those that were written, by the SHA-256 in "
            f"{INDEX}: {', '.join(wrong)}; fetch or save the checkpoint again"
        )
    return files
