"""SHA-256 digests of weight files: written into checkpoints, and compared.

The index of a sharded checkpoint has the digest of each shard. A single file has its digest in its own header. Since a
file cannot contain its own digest, this digest is computed with 64 zeros in its place. Copies and renames keep it; a
program that writes the file anew drops it.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

from ligermodels.convert.files import INDEX, SINGLE, read_digests, read_index
from ligermodels.errors import CheckpointError

CHUNK = 1 << 22
"""Bytes per read."""

KEY = "ligermodels.sha256"
"""Key of the digest in the metadata of a safetensors header."""
ZEROS = "0" * 64
METADATA = {"format": "pt", KEY: ZEROS}
"""Metadata of a file before `seal`. transformers requires the format."""
HEADER_BYTES = 100_000_000
"""Largest header in bytes; the safetensors library has the same limit."""


class StoredDigest(NamedTuple):
    """A digest that a checkpoint has of a file.

    Args:
        digest: 64 hexadecimal digits; None if the index names the file without a digest.
        offset: byte of the digest in the file itself; None if it is in the index.
    """

    digest: str | None
    offset: int | None = None


def digest_of(
    path: Path, progress: Callable[[int], object] = lambda count: None, *, zeros_at: int | None = None
) -> str:
    """SHA-256 of a file.

    Args:
        path: the file.
        progress: called with the number of bytes read since the last call.
        zeros_at: byte from which 64 zeros replace the content.

    Returns:
        64 hexadecimal digits.

    Raises:
        OSError: the file cannot be read.
    """
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
    # The library writes the two entries of the metadata in random order; equal tensors should make equal files.
    ordered, other = (json.dumps(dict(it), separators=(",", ":")).encode() for it in permutations(METADATA.items()))
    header = _header(path).replace(other, ordered, 1)
    with path.open("r+b") as file:
        file.seek(8)
        file.write(header)
    stored = _stored(header)
    if stored is None or stored.offset is None:
        raise OSError(f"{path.name}: its header has no {KEY}")
    digest = digest_of(path, zeros_at=stored.offset)
    with path.open("r+b") as file:
        file.seek(stored.offset)
        file.write(digest.encode())
    return digest


def check_digests(folder: Path, progress: Callable[[int, int], object] = lambda done, total: None) -> list[str]:
    """Compare the safetensors files in `folder` with the digests in its index and in their headers.

    Args:
        folder: folder of a checkpoint.
        progress: called with the bytes done and the bytes in all.

    Returns:
        Names of the files whose digests match. Files without a digest, written by other programs, are left out.

    Raises:
        CheckpointError: files are missing, damaged or belong to another checkpoint; the message names all of them.
    """
    stored, faults = _stored_digests(folder)
    done, total = 0, sum((folder / file).stat().st_size for file in stored if (folder / file).is_file())

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    for file, (digest, offset) in stored.items():
        try:
            if digest_of(folder / file, advance, zeros_at=offset) != digest:
                faults[file] = ""
        except OSError as error:
            faults[file] = f" ({error.strerror})"
    if faults:
        raise CheckpointError(
            f"{folder}: {len(faults)} of {len({*stored, *faults})} weight files do not match their SHA-256: "
            f"{', '.join(file + reason for file, reason in faults.items())}; fetch or save the checkpoint again"
        )
    return list(stored)


def _stored_digests(folder: Path) -> tuple[dict[str, StoredDigest], dict[str, str]]:
    """File -> its digest, from the index and from headers; and file -> reason, for files with a damaged header."""
    stored: dict[str, StoredDigest] = {}
    faults: dict[str, str] = {}
    if not (folder / SINGLE).is_file() and (folder / INDEX).is_file() and (digests := read_digests(folder)):
        stored = {file: StoredDigest(digests.get(file)) for file in sorted(set(read_index(folder).values()))}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            if path.name not in stored and (digest := _stored(_header(path))) is not None:
                stored[path.name] = digest
        except OSError as error:
            faults[path.name] = f" ({error.strerror or error})"
    return stored, faults


def _header(path: Path) -> bytes:
    """The JSON in the header of a safetensors file. Raises OSError, also for a file without such a header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= HEADER_BYTES else b""
    if len(header) != length or not header.startswith(b"{") or not header.rstrip().endswith(b"}"):
        raise OSError("its header is damaged")
    return header


def _stored(header: bytes) -> StoredDigest | None:
    """The digest in a header; None if it has none. Raises OSError for a damaged digest."""
    # The library escapes quotes in tensor names, so only this key and its value can match.
    start = f'"{KEY}":"'.encode()
    at = header.find(start) + len(start)
    if at < len(start):
        return None
    digest = header[at : at + len(ZEROS)].decode("ascii", "replace")
    if len(digest) < len(ZEROS) or not set(digest) <= set(string.hexdigits):
        raise OSError("its digest is damaged")
    return StoredDigest(digest, 8 + at)
