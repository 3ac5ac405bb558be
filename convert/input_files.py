"""Open files that a user names: only regular files of limited size, and JSON of limited depth.

All code that reads a user's file, or a file of a checkpoint, uses these functions. Impossible file names, FIFOs and
devices (reading would block or never end), links to themselves, oversized files and text that is not UTF-8 raise an
error of the class that the caller chooses (`error_class`); the message names the file.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

from ligermodels.errors import CheckpointError, LigerModelsError

ErrorClass = type[LigerModelsError]

MIB = 2**20
JSON_BYTES = 64 * MIB
"""Largest JSON file in bytes. The index of the largest published checkpoints has about 15 MB."""
TEXT_BYTES = 4 * MIB
"""Largest recipe or chat template in bytes."""
TOKENIZER_BYTES = 512 * MIB
"""Largest tokenizer.json in bytes; published files have up to about 35 MB."""
DEPTH = 100
"""Deepest nesting of JSON. Python walks, compares and prints values of this depth within its recursion limit."""


def shown(path: object) -> str:
    """A path for a message: shortened if no file can have it, and without control characters and lone surrogates."""
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(path))
    return text if len(text) <= 1024 else f"{text[:80]}... ({len(text):,} characters)"


def as_path(name: object, error_class: ErrorClass, argument: str) -> Path:
    """The path `name` with `~` expanded.

    Args:
        name: a str or path-like object.
        error_class: class of the error.
        argument: description of `name` for the message, such as "the folder to write".

    Raises:
        error_class: no file can have this name.
    """
    try:
        path = Path(name)  # type: ignore[arg-type]
    except TypeError:
        raise error_class(f"{argument} must be a str or a path, got {type(name).__name__}") from None
    text = os.fspath(name)  # type: ignore[call-overload]
    if not text:
        raise error_class(f"{argument} is empty; give one")
    try:
        os.fsencode(text)
        path = path.expanduser()
    except (ValueError, RuntimeError) as error:  # lone surrogates; a user without a home
        raise error_class(f"{argument} {shown(text)}: is no path: {error}") from None
    if "\0" in text:
        raise error_class(f"{argument} {text!r}: has a null byte, which no path has")
    return path


def folder_to_write(name: object) -> Path:
    """The path of a folder to write, with `~` expanded; CheckpointError if it is a file, if no folder can have this
    name, or if it, or a folder above it, may not be entered."""
    path = as_path(name, CheckpointError, "the folder to write")
    try:
        os.lstat(path / "config.json")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise CheckpointError(
            f"{shown(path)}: cannot be written: {error.strerror or error}; give another folder"
        ) from None
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{shown(path)}: is a file; give a folder")
    return path


def is_present(path: Path, error_class: ErrorClass) -> bool:
    """Whether `path` is a regular file; `error_class` if it is something else, such as a link to nothing."""
    if os.path.isfile(path):
        return True
    if os.path.lexists(path):
        raise error_class(f"{shown(path)}: {_what_it_is(path)}, not a file")
    return False


def _what_it_is(path: Path) -> str:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return "is a link to nothing, or to itself"
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
    return f"is a {kinds.get(stat.S_IFMT(mode), 'device')}"


def open_file(path: Path, error_class: ErrorClass, most: int | None = None, hint: str = "") -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: the file.
        error_class: class of the error.
        most: largest size in bytes; None for any size.
        hint: text to append to the message.

    Raises:
        error_class: the file is missing, not regular, too large, or cannot be read.
    """
    descriptor = -1
    try:
        # Without O_NONBLOCK, opening a FIFO that has no writer would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise error_class(f"{shown(path)}: {_what_it_is(path)}, not a file{hint}")
        if most is not None and status.st_size > most:
            raise error_class(
                f"{shown(path)}: has {status.st_size:,} bytes, more than the {most:,} that such a file may have"
            )
        opened = os.fdopen(descriptor, "rb")
        descriptor = -1
        return opened
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise error_class(f"{shown(path)}: no such file{hint}") from None
        raise error_class(f"{shown(path)}: cannot be read: {error.strerror or error}{hint}") from None
    except LigerModelsError:  # before ValueError, since some of these are ValueErrors
        raise
    except ValueError as error:  # null bytes and lone surrogates
        raise error_class(f"{shown(path)}: no path: {error}") from None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def read_bytes(path: Path, error_class: ErrorClass, most: int, hint: str = "") -> bytes:
    """The content of a regular file of at most `most` bytes.

    Args:
        path: the file.
        error_class: class of the error.
        most: largest size in bytes.
        hint: text to append to the message.

    Raises:
        error_class: the file is missing, not regular, too large, or cannot be read.
    """
    with open_file(path, error_class, most, hint) as file:
        try:
            content = file.read(most + 1)
        except OSError as error:
            raise error_class(f"{shown(path)}: cannot be read: {error.strerror or error}") from None
    if len(content) > most:  # it has grown
        raise error_class(f"{shown(path)}: has more than the {most:,} bytes that such a file may have")
    return content


def read_text(path: Path, error_class: ErrorClass, hint: str = "") -> str:
    """The text of a file of at most TEXT_BYTES in UTF-8, with all line ends as `\\n`.

    Args:
        path: the file.
        error_class: class of the error.
        hint: text to append to the message.

    Raises:
        error_class: the file is missing, not regular, too large, not UTF-8, or cannot be read.
    """
    try:
        text = read_bytes(path, error_class, TEXT_BYTES, hint).decode()
    except UnicodeDecodeError as error:
        raise error_class(f"{shown(path)}: cannot be read: not UTF-8 text: {error}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json_object(path: Path, error_class: ErrorClass, hint: str = "", *, most: int = JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file of at most `most` bytes.

    Args:
        path: the file.
        error_class: class of the error.
        hint: text to append to the message if there is no such file.
        most: largest size in bytes.

    Raises:
        error_class: the file is missing, too large, not JSON, nested too deep, or holds something else.
    """
    content = read_bytes(path, error_class, most, hint)
    try:
        value = parse_json(content)
    except ValueError as error:
        raise error_class(f"{shown(path)}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise error_class(f"{shown(path)}: holds a {type(value).__name__}, not an object")
    return value


class RepeatedField(ValueError):
    """An object of a JSON text has a name twice."""


def parse_json(content: str | bytes, *, unique: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        content: the text, or its bytes in UTF-8.
        unique: whether an object may have a name only once. By default the last value of a name counts.

    Raises:
        RepeatedField: with `unique`, an object has a name twice.
        ValueError: it is not JSON in UTF-8, or is nested deeper than DEPTH.
    """
    text = content.decode() if isinstance(content, bytes) else content
    try:
        value = json.loads(text, object_pairs_hook=_object if unique else None)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEPTH} levels") from None
    if text.count("[") + text.count("{") > DEPTH:
        check_depth(value)
    return value


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these fields. Raises RepeatedField if two have the same name: one of them would be lost."""
    found = dict(fields)
    if len(found) < len(fields):
        name = next(name for name, count in Counter(name for name, _ in fields).items() if count > 1)
        raise RepeatedField(f"an object has the field {name!r} twice")
    return found


def check_depth(value: Any) -> None:
    """ValueError if dicts, lists and tuples are nested deeper than DEPTH, or in themselves."""
    level = [value]
    for _ in range(DEPTH + 2):
        # By id, so that a value that is nested many times in one level is visited once.
        nested = {id(item): item for item in level if isinstance(item, dict | list | tuple)}.values()
        if not nested:
            return
        level = [inner for outer in nested for inner in (outer.values() if isinstance(outer, dict) else outer)]
    raise ValueError(f"nested deeper than {DEPTH} levels")
