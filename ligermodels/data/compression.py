"""Compressed files, by their suffix."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from ligermodels.errors import InputError


def optional(package: str, name: str, purpose: str) -> Any:
    """The module `package`, which is not installed with ligermodels.

    Args:
        package: name of the module, such as "pyarrow.parquet".
        name: the file or dataset, for the message.
        purpose: what the package reads, for the message.

    Raises:
        InputError: the package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        root = package.split(".")[0]
        raise InputError(f"{name}: {purpose} needs the package {root}: pip install 'ligermodels[data]'") from None


def _zst(content: BinaryIO, name: str) -> BinaryIO:
    pyarrow = optional("pyarrow", name, "a .zst file")
    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(content, "r"), "zstd"), 1 << 20)


COMPRESSIONS: dict[str, Callable[[BinaryIO, str], Any]] = {
    ".gz": lambda content, _: gzip.GzipFile(fileobj=content),
    ".bz2": lambda content, _: bz2.BZ2File(content),
    ".xz": lambda content, _: lzma.LZMAFile(content),  # noqa: SIM115 - `content` is closed by its owner
    ".zst": _zst,
}
"""Suffix -> function from a compressed file, and its name for messages, to its content."""


def decompressed(content: BinaryIO, compression: str, name: str) -> BinaryIO:
    """The content of a file.

    Args:
        content: the open file.
        compression: a suffix in COMPRESSIONS; "" for none.
        name: the file, for messages.

    Raises:
        InputError: the package for this compression is not installed.
    """
    plain: BinaryIO = COMPRESSIONS[compression](content, name) if compression else content
    return plain


@contextmanager
def damage_named(name: str) -> Iterator[None]:
    """Context manager that turns errors of a damaged compressed file into an InputError that names the file."""
    try:
        yield
    except InputError:
        raise
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise InputError(f"{name}: is damaged, or is not what its suffix says: {error}") from None
