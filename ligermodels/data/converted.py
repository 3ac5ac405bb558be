"""Conversions of data files to lines of JSON or to plain text, kept in a cache.

Documents are read in random order, which compressed files, tables and JSON arrays do not allow. Each is therefore
written once as lines of JSON, or as text, to the folder LIGERMODELS_CACHE (default: ~/.cache/ligermodels), and again
when the file changes. The folder may be removed when no run reads from it.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from ligermodels.convert.input_files import open_file
from ligermodels.convert.locks import locked
from ligermodels.errors import InputError, LigerModelsError

VERSION = 6
"""Part of the names of conversions: another version converts otherwise."""


def converted(
    path: Path, convert: Callable[[BinaryIO], Iterable[bytes]], say: Callable[[str], object] = lambda message: None
) -> Path:
    """The conversion of a file, from the cache if the file has not changed.

    Args:
        path: the file.
        convert: function from the open file to the parts of its conversion.
        say: called with a message before the file is converted.

    Raises:
        InputError: the file cannot be read or converted, or the cache cannot be written.
    """
    with open_file(path, InputError) as content:
        status = os.fstat(content.fileno())
        key = f"{path.absolute()} {status.st_size} {status.st_mtime_ns}"

        def write(target: Path) -> None:
            say(f"{path}: converting it once, to {target.parent}")
            write_parts(target, convert(content))

        return cached("data", key, path.name, write)


def write_parts(target: Path, parts: Iterable[bytes]) -> None:
    """Write a file, part by part."""
    with open(target, "wb") as file:
        for part in parts:
            file.write(part)


def newest(room: str, name: str) -> Path | None:
    """The file or folder with this name that this version wrote to the cache last; None if there is none."""
    found = [path for path in cache_room(room).glob("*") if path.name.split("-", 1)[-1] == _versioned(name)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def cache_room(name: str) -> Path:
    """The folder `name` in LIGERMODELS_CACHE, by default ~/.cache/ligermodels: "data" for conversions, "checkpoints"
    for copies with new tokens, "tokens" for tokens."""
    return Path(os.environ.get("LIGERMODELS_CACHE") or "~/.cache/ligermodels").expanduser() / name


def _versioned(name: str) -> str:
    return f"v{VERSION}-{name[-80:]}"


def cached(room: str, key: str, name: str, write: Callable[[Path], object]) -> Path:
    """A file or folder in the cache; of several processes one writes it, and the others wait.

    Args:
        room: folder within the cache.
        key: text that identifies the content.
        name: its name, for people who look into the cache.
        write: called with the path to write to, if the cache does not have it.

    Raises:
        InputError: the cache cannot be written.
    """
    folder = cache_room(room)
    digest = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:24]
    target = folder / f"{digest}-{_versioned(name)}"
    partial = target.with_name(f".{target.name}.partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f".{digest}.lock", wait=math.inf):
            if not target.exists():
                _remove(partial)  # of a process that was killed
                try:
                    write(partial)
                    partial.replace(target)
                finally:
                    _remove(partial)
    except LigerModelsError:
        raise
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be written: {error.strerror or error}; set LIGERMODELS_CACHE to another folder"
        ) from None
    return target


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
