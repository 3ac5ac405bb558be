"""Files of data by the names that users give: files, folders, globs and datasets of the hub, each of a known kind."""

from __future__ import annotations

import glob
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ligermodels.convert.input_files import as_path, open_file, shown
from ligermodels.data import hub_dataset
from ligermodels.data.compression import COMPRESSIONS, damage_named, decompressed
from ligermodels.data.converted import converted
from ligermodels.data.json_files import BOM, csv_lines, items_of, parquet_lines
from ligermodels.errors import InputError

JSON = (".jsonl", ".ndjson", ".json")
"""Suffixes, in any case, of files with JSON: one object per line, or an array of objects."""

TEXT = (".txt", ".text", ".md", ".markdown", ".rst")
"""Suffixes of plain texts. A file without a suffix is a text too, if it is given by its own name."""

CODE = (
    ".py", ".c", ".h", ".cc", ".cpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh", ".sql", ".html", ".css",
    ".tex",
)  # fmt: skip
"""Suffixes of sources of programs: texts, if they are given by their own name or by a glob. In folders of data they are
scripts about the data."""

Lines = Callable[[BinaryIO, str], Iterator[bytes]]
"""Function from an open file, and its name for messages, to lines of JSON."""

TABLES: dict[str, Lines] = {
    ".csv": partial(csv_lines, delimiter=","),
    ".tsv": partial(csv_lines, delimiter="\t"),
    ".parquet": parquet_lines,
}
"""Suffix of a table -> function that writes its rows as lines of JSON."""

KNOWN = f"{', '.join((*JSON, *TABLES, *TEXT))}, each also with {', '.join(COMPRESSIONS)} after it"

ADVICE = {
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), "is an archive: unpack it, and give the folder"),
    **dict.fromkeys((".xls", ".xlsx", ".ods"), "is a spreadsheet: save it as .csv"),
    ".arrow": "is an Arrow file: write it with `to_parquet` of the package datasets",
}
"""Suffix of a file that is not read -> problem and advice."""

ABOUT_DATA = (
    "readme", "license", "licence", "notice", "changelog", "dataset_info", "dataset_infos", "dataset_dict", "state",
)  # fmt: skip
"""Names, without suffix, of files about a dataset. Those in a folder are not data."""


STARTS_AS_JSON = re.compile(rb'\s*(?:\[\s*)?\{\s*"(?:[^"\\]|\\.)*"\s*:')
"""The start of an object with a field, or of an array of objects."""

LISTED = 10
"""Most names of files in a message."""


@dataclass(frozen=True)
class DataFile:
    """A file of records or text.

    name: name for messages.
    original: the file that was named; a dataset of the hub has none beside `path`.
    path: the file to read: lines of JSON, or text in UTF-8. It is `original`, or a conversion of it.
    has_lines: whether it has lines of JSON; if not, it is one text.
    unit: "row" or "item", if the lines of `path` are rows of a table or items of an array; "" for lines of the file.
    source: position of the name, in the list of names, that the file comes from.
    """

    name: str
    original: Path
    path: Path
    has_lines: bool
    unit: str = ""
    source: int = 0

    def place(self, line: int) -> str:
        """FILE:LINE, or "FILE: row N", of line number `line` of `path`, from 1."""
        return f"{self.name}: {self.unit} {line}" if self.unit else f"{self.name}:{line}"


Say = Callable[[str], object]
"""Called with messages about conversions and downloads, before they start."""


def data_files(names: Iterable[str | os.PathLike[str]], say: Say = lambda message: None) -> list[DataFile]:
    """The files of data with these names.

    Compressed files, JSON arrays, tables and datasets of the hub are converted once, into a cache (see `converted`).

    Args:
        names: files, folders, globs such as "data/*.jsonl", and datasets of the hub such as "hf:owner/name:train". A
            folder stands for all files of known kinds in it and its folders, in order of their paths.
        say: called with a message before a file is converted or a dataset is downloaded.

    Raises:
        InputError: a file cannot be read, or is of no known kind; the message names the known kinds.
        HubError: a dataset of the hub cannot be found or reached.

    Examples:
        >>> [(file.name, file.has_lines) for file in data_files(["*.jsonl", "book.txt"])]
        [('chats.jsonl', True), ('book.txt', False)]
    """
    if isinstance(names, str | os.PathLike):
        raise InputError(f"data: must be a list of names of files, got {names!r}; give [{names!r}]")
    files: list[DataFile] = []
    for source, name in enumerate(names):
        if isinstance(name, str) and name.startswith(hub_dataset.PREFIX):
            path = hub_dataset.lines_of(name, say)
            files.append(DataFile(name, path, path, has_lines=True, unit="row", source=source))
        else:
            paths = _paths(as_path(name, InputError, "the name of a data file"), say)
            files += [_data_file(path, source, say) for path in paths]
    return files


def absolute_name(name: str) -> str:
    """The name of data with its absolute path, for `data_files` in another folder; datasets of the hub keep theirs."""
    if name.startswith(hub_dataset.PREFIX):
        return name
    path = Path(name).expanduser()
    is_pattern = glob.has_magic(name) and not os.path.lexists(path)
    # The current folder is no part of the pattern.
    return str(Path(glob.escape(os.getcwd())) / path if is_pattern else path.absolute())


def _paths(path: Path, say: Say) -> list[Path]:
    """The files that a path names: itself, the files of a folder, or the matches of a glob."""
    if os.path.isdir(path):  # a name that is too long is no folder, and not an error yet
        return _files_in(path, say)
    if os.path.lexists(path) or not glob.has_magic(str(path)):
        return [path]
    if not (matches := sorted(glob.glob(str(path), recursive=True))):
        raise InputError(f"{shown(path)}: no file matches the pattern")
    return [file for match in map(Path, matches) for file in (_files_in(match, say) if match.is_dir() else [match])]


def _files_in(folder: Path, say: Say) -> list[Path]:
    """The files of known kinds in a folder and its folders, in order of their paths; hidden ones are left out."""
    found = sorted(path for path in _paths_in(folder) if path.is_file())
    known = [path for path in found if _is_known(path)]
    if not known:
        advice = (f"; {path.relative_to(folder)} {ADVICE[path.suffix]}" for path in found if path.suffix in ADVICE)
        raise InputError(f"{shown(folder)}: has no file of a known kind, which are {KNOWN}{next(advice, '')}")
    say(f"{shown(folder)}: read as data: {_listed(known, folder)}")
    if others := [path for path in found if not _is_known(path)]:
        warnings.warn(f"{shown(folder)}: not read as data: {_listed(others, folder)}", stacklevel=2)
    return known


def _paths_in(folder: Path) -> Iterator[Path]:
    """The files in a folder and its folders, without hidden ones. Links to folders are followed; of several paths to a
    folder the first one counts. Warns of folders that cannot be read."""

    def warn(error: OSError) -> None:
        warnings.warn(f"{shown(error.filename)}: not read as data: {error.strerror or error}", stacklevel=2)

    seen = set[str]()
    for path, folders, names in os.walk(folder, onerror=warn, followlinks=True):
        real = os.path.realpath(path)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        if real not in seen:
            yield from (Path(path, name) for name in names if not name.startswith("."))
        seen.add(real)


def _listed(paths: Sequence[Path], folder: Path) -> str:
    """The first names of files in a folder."""
    more = f" and {len(paths) - LISTED} more" if len(paths) > LISTED else ""
    return ", ".join(str(path.relative_to(folder)) for path in paths[:LISTED]) + more


def _is_known(path: Path) -> bool:
    """Whether a file in a folder is data, by its name."""
    return _suffixes(path)[0] in (*JSON, *TABLES, *TEXT) and path.name.split(".")[0].lower() not in ABOUT_DATA


def _suffixes(path: Path) -> tuple[str, str]:
    """The suffix of the content, and of the compression ("" for none), in lower case."""
    last = path.suffix.lower()
    return (path.with_suffix("").suffix.lower(), last) if last in COMPRESSIONS else (last, "")


def _data_file(path: Path, source: int, say: Say) -> DataFile:
    suffix, compression = _suffixes(path)
    name = shown(path)
    if suffix not in (*JSON, *TABLES, *TEXT, *CODE, ""):
        advice = ADVICE.get(suffix, f"has the suffix {suffix!r}, which is of no known kind")
        raise InputError(f"{name}: {advice}. Known kinds are {KNOWN}; give a plain text the suffix .txt")
    convert, unit = TABLES.get(suffix), "row" if suffix in TABLES else ""
    if convert is None:
        with open_file(path, InputError) as content, damage_named(name):
            plain = decompressed(content, compression, name)
            if suffix in JSON:
                convert = items_of(plain, name)
                unit = "item" if convert else ""
            else:
                _require_text(plain, name)
    has_lines = suffix in (*JSON, *TABLES)
    if convert is None and not compression:
        return DataFile(name, path, path, has_lines, unit, source)

    def parts(content: BinaryIO) -> Iterator[bytes]:
        with damage_named(name):
            plain = decompressed(content, compression, name)
            yield from convert(plain, name) if convert else iter(partial(plain.read, 1 << 20), b"")

    return DataFile(name, path, converted(path, parts, say), has_lines, unit, source)


def _require_text(content: BinaryIO, name: str) -> None:
    """Raise InputError for records of JSON in a file that has the name of a text: they would be trained on as text."""
    if STARTS_AS_JSON.match(content.read(1 << 16).removeprefix(BOM)):
        raise InputError(f"{name}: starts with JSON, and is named as a text; give it the suffix .jsonl or .json")
