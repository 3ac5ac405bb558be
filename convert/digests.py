"""SHA-256 of weight files: in the index of a checkpoint in shards, in the header of a file by itself; and compared.

A file cannot hold its own digest. A single-file checkpoint holds the SHA-256 of itself with the 64 digits replaced by
zeros: copies and renames keep it, a program that writes the file anew drops it.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

from ligermodels.convert.files import INDEX, SINGLE, read_digests, read_index
from ligermodels.errors import CheckpointError

CHUNK = 1 << 22
"""Bytes that are read at a time."""

KEY = "ligermodels.sha256"
"""Where the metadata in a safetensors header has the file's digest."""
ZEROS = "0" * 64
METADATA = {"format": "pt", KEY: ZEROS}
"""Metadata of a file to `seal`; transformers asks for the format."""
HEADER_BYTES = 100_000_000
"""Most bytes of a header, as in the safetensors library."""


def digest_of(
    path: Path, progress: Callable[[int], object] = lambda count: None, *, zeros_at: int | None = None
) -> str:
    """SHA-256 of a file, in hexadecimal digits; `progress` gets the bytes read since. With `zeros_at`, that of the file
    with ZEROS from this byte on. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        if zeros_at is not None:
            digest.update(file.read(zeros_at) + ZEROS.encode())
            progress(file.seek(zeros_at + len(ZEROS)))
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            progress(len(chunk))
    return digest.hexdigest()


def seal(path: Path) -> str:
    """Write the digest of a safetensors file with METADATA into its header, and return it. Raises OSError."""
    # The library writes metadata in an order that differs from call to call; equal tensors are to be equal files.
    ordered, other = (json.dumps(dict(each), separators=(",", ":")).encode() for each in permutations(METADATA.items()))
    header = _header(path).replace(other, ordered, 1)
    with path.open("r+b") as file:
        file.seek(8)
        file.write(header)
    if (sealed := _sealed(header)) is None:
        raise OSError(f"{path.name}: its header has no {KEY}")
    place = sealed[1]
    digest = digest_of(path, zeros_at=place)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(digest.encode())
    return digest


def check_digests(folder: Path, progress: Callable[[int, int], object] = lambda done, total: None) -> list[str]:
    """Compare the safetensors files in `folder` with the digests in its index and in their headers; returns the names
    of those that are right.

    Files without a digest, as those of other programs, are not among them. `progress` is called with bytes done and
    bytes in all.

    Raises CheckpointError that names every file that is missing, damaged or of another checkpoint.
    """
    wanted: dict[str, tuple[str | None, int | None]] = {}  # the digest, and its place if that is the file itself
    wrong = []
    if not (folder / SINGLE).is_file() and (folder / INDEX).is_file() and (digests := read_digests(folder)):
        wanted = {file: (digests.get(file), None) for file in sorted(set(read_index(folder).values()))}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            if path.name not in wanted and (sealed := _sealed(_header(path))) is not None:
                wanted[path.name] = sealed
        except OSError as error:
            wrong.append(f"{path.name} ({error.strerror or error})")
    done, total = 0, sum((folder / file).stat().st_size for file in wanted if (folder / file).is_file())

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    for file, (digest, place) in wanted.items():
        try:
            if digest_of(folder / file, advance, zeros_at=place) != digest:
                wrong.append(file)
        except OSError as error:
            wrong.append(f"{file} ({error.strerror})")
    if wrong:
        count = len(set(wanted) | {name.partition(" (")[0] for name in wrong})
        raise CheckpointError(
            f"{folder}: {len(wrong)} of {count} weight files are not those that were written, by their SHA-256: "
            f"{', '.join(wrong)}; fetch or save the checkpoint again"
        )
    return list(wanted)


def _header(path: Path) -> bytes:
    """The JSON in the header of a safetensors file. Raises OSError, also for a file that has none."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= HEADER_BYTES else b""
    if len(header) != length or not header.startswith(b"{") or not header.rstrip().endswith(b"}"):
        raise OSError("its header is damaged")
    return header


def _sealed(header: bytes) -> tuple[str, int] | None:
    """The digest that a header holds, and at which byte of the file; None where it holds none. Raises OSError for a
    damaged one."""
    # In what the library writes, names have their quotes escaped: nothing but this key and its value reads like this.
    begin = f'"{KEY}":"'.encode()
    at = header.find(begin) + len(begin)
    if at < len(begin):
        return None
    digest = header[at : at + len(ZEROS)].decode("ascii", "replace")
    if len(digest) < len(ZEROS) or not set(digest) <= set(string.hexdigits):
        raise OSError("its digest is damaged")
    return digest, 8 + at
