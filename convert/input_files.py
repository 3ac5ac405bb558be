"""Opening files that a user names: regular files of bounded size alone, and JSON of bounded depth.

Everything that reads a file which a user names, or which lies in a checkpoint, comes through here. Names that no file
can have, FIFOs and devices (which would block or never end), links to themselves, files too large to be what they are
named, and text that is no UTF-8 end in an error of the caller's class that names the file.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from ligermodels.errors import CheckpointError, LigerModelsError

Kind = type[LigerModelsError]

MIB = 2**20
JSON_BYTES = 64 * MIB
"""Most bytes of a JSON file. The index of the largest published checkpoints has about 15 MB."""
TEXT_BYTES = 4 * MIB
"""Most bytes of a recipe or a chat template."""
TOKENIZER_BYTES = 512 * MIB
"""Most bytes of a tokenizer.json; published ones have up to about 35 MB."""
DEPTH = 100
"""Deepest nesting of JSON: Python can walk, compare and print that deep without reaching its recursion limit."""


def shown(path: object) -> str:
    """A path for a message: shortened where no file has one so long, without control and half characters."""
    text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in str(path))
    return text if len(text) <= 1024 else f"{text[:80]}... ({len(text):,} characters)"


def as_path(name: object, kind: Kind, what: str) -> Path:
    """A path with `~` expanded; `kind` where `name`, which is `what`, can be none."""
    if not isinstance(name, str | os.PathLike) or not isinstance(os.fspath(name), str):
        raise kind(f"{what} must be a str or a path, got {type(name).__name__}")
    text = os.fspath(name)
    if not text:
        raise kind(f"{what} is empty; give one")
    try:
        os.fsencode(text)
        path = Path(text).expanduser()
    except (ValueError, RuntimeError) as error:  # half characters; no home of this user
        raise kind(f"{what} {shown(text)}: is no path: {error}") from None
    if "\0" in text:
        raise kind(f"{what} {text!r}: has a null byte, which no path has")
    return path


def folder_to_write(name: object) -> Path:
    """A folder to write into, with `~` expanded as where it is read; CheckpointError where `name` can be none."""
    return as_path(name, CheckpointError, "the folder to write")


def is_present(path: Path, kind: Kind) -> bool:
    """Whether there is a regular file at `path`; `kind` where there is something else, a link to nothing, say."""
    if os.path.isfile(path):
        return True
    if os.path.lexists(path):
        raise kind(f"{shown(path)}: {_what_it_is(path)}, not a file")
    return False


def _what_it_is(path: Path) -> str:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return "is a link to nothing, or to itself"
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
    return f"is a {kinds.get(stat.S_IFMT(mode), 'device')}"


def open_file(path: Path, kind: Kind, most: int | None = None, hint: str = "") -> BinaryIO:
    """The regular file at `path`, open for reading; `kind`, naming it, for anything else or one of over `most` bytes.

    `hint` is added to the message.
    """
    descriptor = -1
    try:
        # A FIFO without a writer would block, a device might do anything at the first read.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise kind(f"{shown(path)}: {_what_it_is(path)}, not a file{hint}")
        if most is not None and found.st_size > most:
            raise kind(f"{shown(path)}: has {found.st_size:,} bytes, more than the {most:,} that such a file may have")
        opened = os.fdopen(descriptor, "rb")
        descriptor = -1
        return opened
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise kind(f"{shown(path)}: no such file{hint}") from None
        raise kind(f"{shown(path)}: cannot be read: {error.strerror or error}{hint}") from None
    except LigerModelsError:  # which may be a ValueError
        raise
    except ValueError as error:  # null bytes and half characters
        raise kind(f"{shown(path)}: no path: {error}") from None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def read_bytes(path: Path, kind: Kind, most: int, hint: str = "") -> bytes:
    """The content of a file; errors as of `open_file`."""
    with open_file(path, kind, most, hint) as file:
        try:
            content = file.read(most + 1)
        except OSError as error:
            raise kind(f"{shown(path)}: cannot be read: {error.strerror or error}") from None
    if len(content) > most:  # it has grown
        raise kind(f"{shown(path)}: has more than the {most:,} bytes that such a file may have")
    return content


def read_text(path: Path, kind: Kind, most: int = TEXT_BYTES, hint: str = "") -> str:
    """The text of a file, with line ends as `\\n`; errors as of `open_file`, and for text that is no UTF-8."""
    try:
        text = read_bytes(path, kind, most, hint).decode()
    except UnicodeDecodeError as error:
        raise kind(f"{shown(path)}: cannot be read: not UTF-8 text: {error}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json_object(path: Path, kind: Kind, hint: str = "") -> dict[str, Any]:
    """The JSON object in a file; `kind`, naming it, where it is missing, too large, not JSON, or not an object."""
    content = read_bytes(path, kind, JSON_BYTES, hint)
    try:
        found = parse_json(content)
    except ValueError as error:
        raise kind(f"{shown(path)}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise kind(f"{shown(path)}: holds a {type(found).__name__}, not an object")
    return found


def parse_json(content: str | bytes) -> Any:
    """What JSON says. Raises ValueError for what is not JSON in UTF-8, or nested deeper than DEPTH."""
    try:
        found = json.loads(content if isinstance(content, str) else content.decode())
    except RecursionError:
        raise ValueError(f"nested deeper than {DEPTH} levels") from None
    pairs = (("[", "{"), (b"[", b"{"))[isinstance(content, bytes)]
    if sum(content.count(each) for each in pairs) > DEPTH:  # type: ignore
        check_depth(found)
    return found


def check_depth(value: Any) -> None:
    """ValueError for dicts, lists and tuples nested deeper than DEPTH, or in themselves."""
    level = {id(value): value} if isinstance(value, dict | list | tuple) else {}
    for _ in range(DEPTH + 1):
        inner = [each for outer in level.values() for each in (outer.values() if isinstance(outer, dict) else outer)]
        level = {id(each): each for each in inner if isinstance(each, dict | list | tuple)}
        if not level:
            return
    raise ValueError(f"nested deeper than {DEPTH} levels")
