"""Files of records as lines of JSON: arrays of objects, objects with an array in a field, tables."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from json import JSONDecodeError, JSONDecoder
from typing import Any, BinaryIO

from ligermodels.convert.input_files import JSON_BYTES, parse_json
from ligermodels.data.cells import value_of
from ligermodels.data.compression import optional
from ligermodels.data.lines import LINE_BYTES
from ligermodels.data.record_fields import is_record
from ligermodels.errors import InputError

BOM = b"\xef\xbb\xbf"
BLANK = " \t\r\n"
PART = 1 << 20
"""Characters of an array that are read at once."""


def items_of(content: BinaryIO, name: str) -> Callable[[BinaryIO, str], Iterator[bytes]] | None:
    """The function that writes the items of a JSON file as lines; None if the file has an object per line. Messages
    call the file `name`.

    Raises:
        InputError: an object around the records has several lists of objects.
    """
    first = content.readline(JSON_BYTES).removeprefix(BOM)
    while first and not first.strip():
        first = content.readline(JSON_BYTES)
    if first.lstrip().startswith(b"["):
        return array_lines
    if not first.lstrip().startswith(b"{"):
        return None
    whole = _whole(first, content)
    return None if whole is None or _wrapped(whole, name) is None else wrapped_lines


def _whole(first: bytes, content: BinaryIO) -> dict[str, Any] | None:
    """The object that is the whole file; None for lines with an object each, and for a file that is no JSON."""
    with suppress(ValueError):
        value = parse_json(first)
        return None if is_record(value) or content.read(JSON_BYTES).strip() else value
    with suppress(ValueError):
        value = parse_json(first + content.read(JSON_BYTES))
        return value if isinstance(value, dict) else None
    return None


def _wrapped(whole: dict[str, Any], name: str) -> list[Any] | None:
    """The records in an object, which is the whole file; None if there are none."""
    if is_record(whole):
        return [whole]
    lists = {
        key: items
        for key, items in whole.items()
        if isinstance(items, list) and items and all(isinstance(item, dict) for item in items)
    }
    if len(lists) > 1:
        raise InputError(f"{name}: has several lists of records ({', '.join(lists)}); write one of them to a file")
    return next(iter(lists.values()), None)


def wrapped_lines(content: BinaryIO, name: str) -> Iterator[bytes]:
    """The records in an object around them, such as {"data": [...]}, as lines. Raises InputError for a field twice."""
    try:
        whole = parse_json(content.read().removeprefix(BOM), unique=True)
    except ValueError as error:
        raise InputError(f"{name}: not JSON ({error})") from None
    for item in _wrapped(whole, name) or []:
        yield json.dumps(item, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def array_lines(content: BinaryIO, name: str) -> Iterator[bytes]:
    """The items of a JSON array as lines. Memory holds one item. Messages call the file `name`.

    Raises:
        InputError: the file is not JSON in UTF-8, or an item is longer than `LINE_BYTES`; the message names the line.
    """
    reader = _Reader(content, name)
    reader.take("[")
    while reader.next != "]":
        if reader.count:
            reader.take(",")
        yield reader.value().translate({ord("\r"): " ", ord("\n"): " "}).encode() + b"\n"
    reader.take("]")
    if reader.next:
        raise InputError(f"{name}:{reader.line}: has more than the array that it starts with")


class _Reader:
    """Reads values of JSON, one at a time, from a file."""

    def __init__(self, content: BinaryIO, name: str) -> None:
        self._file, self._name = io.TextIOWrapper(content, "utf-8-sig"), name
        self._text, self._start, self._ended = "", 0, False
        self.line, self.count = 1, 0

    def _read(self) -> None:
        try:
            more = self._file.read(PART)
        except UnicodeDecodeError as error:
            raise InputError(f"{self._name}: not UTF-8 text after line {self.line}: {error.reason}") from None
        self._text, self._start, self._ended = self._text[self._start :] + more, 0, not more

    def _skip(self, end: int) -> None:
        self.line += self._text.count("\n", self._start, end)
        self._start = end

    @property
    def next(self) -> str:
        """The next character that is not blank; "" at the end."""
        while True:
            end = self._start
            while end < len(self._text) and self._text[end] in BLANK:
                end += 1
            self._skip(end)
            if end < len(self._text) or self._ended:
                return self._text[end : end + 1]
            self._read()

    def take(self, character: str) -> None:
        """Go past `character`. Raises InputError for another one."""
        if (found := self.next) != character:
            what = repr(found) if found else "the end of the file"
            raise InputError(f"{self._name}:{self.line}: expected {character!r} of a JSON array, found {what}")
        self._skip(self._start + 1)

    def value(self) -> str:
        """The text of the next value."""
        decoder, problem = JSONDecoder(), "it is too long"
        while True:
            self.next  # noqa: B018 - goes to the start of the value
            try:
                _, end = decoder.raw_decode(self._text, self._start)
                if self._ended or self._text[end : end + 1] in tuple(f"{BLANK},]"):  # a number may go on
                    text = self._text[self._start : end]
                    self._skip(end)
                    self.count += 1
                    return text
            except (JSONDecodeError, RecursionError) as error:
                problem = str(error)
            if self._ended or len(self._text) - self._start > LINE_BYTES:
                raise InputError(f"{self._name}:{self.line}: item {self.count + 1}: not JSON ({problem})")
            self._read()


def csv_lines(content: BinaryIO, name: str, *, delimiter: str) -> Iterator[bytes]:
    """The rows of a table of text. The header, and each empty row, gives an empty line, so that numbers of lines are
    numbers of rows as in a spreadsheet.

    Args:
        content: the file, in UTF-8. Its first row has the names of the columns.
        name: the file, for messages.
        delimiter: character between two cells.

    Raises:
        InputError: the file is not UTF-8, a column occurs twice, cells have another delimiter, or a row has more or
            fewer cells than the header.
    """
    csv.field_size_limit(max(csv.field_size_limit(), LINE_BYTES))  # the default is 128 KiB
    rows = csv.reader(io.TextIOWrapper(content, "utf-8-sig", newline=""), delimiter=delimiter, strict=True)
    number = 0
    try:
        header = next(rows, [])
        number = 1
        _check_columns(header, name)
        other = next((each for each in ",;\t" if each != delimiter and len(header) == 1 and each in header[0]), None)
        if other is not None:
            raise InputError(f"{name}: cells seem to be separated by {other!r}; separate them by {delimiter!r}")
        yield b"\n"
        for number, row in enumerate(rows, start=2):
            if row and len(row) != len(header):
                raise InputError(f"{name}: row {number}: has {len(row)} cells, and the header has {len(header)}")
            yield as_line(_cells(header, row)) if row else b"\n"
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8 text after row {number}: {error.reason}") from None
    except csv.Error as error:
        raise InputError(f"{name}: row {number + 1}: {error}") from None
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{name}: row {number}: {error}") from None


def _check_columns(names: Sequence[str], name: str) -> None:
    """Raise InputError if two columns of the table `name` have the same name: one of them would be lost."""
    if twice := [column for column, count in Counter(names).items() if count > 1]:
        raise InputError(f"{name}: two columns are named {twice[0]!r}; rename one")


def _cells(header: list[str], row: list[str]) -> dict[str, Any]:
    """The values of a row by the names of the columns. Raises ValueError for a cell that cannot be read."""
    return {column: value_of(column, cell) for column, cell in zip(header, row, strict=True)}


def parquet_lines(content: BinaryIO, name: str) -> Iterator[bytes]:
    """The rows of a Parquet file. Raises InputError if it cannot be read, a column occurs twice, or pyarrow is not
    installed."""
    pyarrow, parquet = optional("pyarrow", name, "Parquet"), optional("pyarrow.parquet", name, "Parquet")
    try:
        file = parquet.ParquetFile(content if content.seekable() else io.BytesIO(content.read()))
        _check_columns(file.schema_arrow.names, name)
        yield from arrow_lines(file.iter_batches(batch_size=1024), name)
    except pyarrow.ArrowException as error:
        raise InputError(f"{name}: cannot be read as Parquet: {error}") from None


def arrow_lines(tables: Iterable[Any], name: str) -> Iterator[bytes]:
    """The rows of Arrow tables, or record batches, as lines of JSON.

    Objects lose their null values: Arrow gives all objects of a column the same keys, so that an argument of one tool
    call is null in all other calls, and the template would write it. JSON texts (the extension type arrow.json, as
    `datasets` stores turns that do not all have the same keys) are decoded, and keep theirs. Turns in strings are read
    as in a table of text, which the Arrow table may come from.

    Args:
        tables: parts of one table, in order; each has its own schema.
        name: the table, for messages.

    Raises:
        InputError: a value of type arrow.json is no JSON, or has a field twice; or turns in a string cannot be read.
    """
    rows = ((row, decoders) for table in tables for decoders in [_decoders(table.schema)] for row in table.to_pylist())
    for number, (nullable, decoders) in enumerate(rows, start=1):
        row = _without_nulls(nullable)
        for column, value in row.items():
            is_json = column in decoders
            try:
                if is_json or isinstance(value, str):
                    row[column] = decoders[column](value) if is_json else value_of(column, value)
            except ValueError as error:
                problem = f"{column!r} has invalid JSON: {error}" if is_json else str(error)
                raise InputError(f"{name}: row {number}: {problem}") from None
        yield as_line(row)


def _decoders(schema: Any) -> dict[str, Callable[[Any], Any]]:
    """Name -> function that decodes the JSON texts in a value of a column, for the columns of a schema with some."""
    return {field.name: decoder for field in schema if (decoder := _json_decoder(field.type)) is not None}


def _json_decoder(kind: Any) -> Callable[[Any], Any] | None:
    """The function that decodes the JSON texts in a value of an Arrow type; None if the type has none."""
    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda value: parse_json(value, unique=True) if isinstance(value, str) else value
    fields = [kind.field(number) for number in range(kind.num_fields)]
    decoders = _decoders(fields)

    def decode(value: Any) -> Any:
        match value:
            case dict():  # a struct
                return {key: decoders[key](item) if key in decoders else item for key, item in value.items()}
            case tuple():  # the key and the value of an entry of a map
                return tuple(
                    decoders[field.name](item) if field.name in decoders else item
                    for field, item in zip(fields, value, strict=True)
                )
            case list():
                (decoder,) = decoders.values()
                return [decoder(item) for item in value]
            case _:
                return value

    return decode if decoders else None


def as_line(row: dict[str, Any]) -> bytes:
    """A row as a line of JSON. Bytes are text if they are UTF-8; other values that JSON does not have become objects
    that name their type, which no field of text accepts."""
    return json.dumps(row, ensure_ascii=False, default=_as_json).encode("utf-8", "surrogatepass") + b"\n"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            pass
    tolist = getattr(value, "tolist", None)  # of an array
    return tolist() if tolist is not None else {"type": type(value).__name__}
