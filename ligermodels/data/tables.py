"""Tables (CSV, TSV, Parquet) as lines of JSON: a row is a record, and its columns are fields."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO

from ligermodels.data.compression import optional
from ligermodels.data.records import LINE_BYTES
from ligermodels.errors import InputError


def csv_lines(content: BinaryIO, name: str, *, delimiter: str) -> Iterator[bytes]:
    """The rows of a table of text. The header, and each empty row, gives an empty line, so that numbers of lines are
    numbers of rows as in a spreadsheet.

    Args:
        content: the file, in UTF-8. Its first row has the names of the columns.
        name: the file, for messages.
        delimiter: character between two cells.

    Raises:
        InputError: the file is not UTF-8, a column occurs twice, or a row has more or fewer cells than the header.
    """
    csv.field_size_limit(max(csv.field_size_limit(), LINE_BYTES))  # the default is 128 KiB
    rows = csv.reader(io.TextIOWrapper(content, "utf-8-sig", newline=""), delimiter=delimiter, strict=True)
    number = 1
    try:
        header = next(rows, [])
        if twice := [column for column, count in Counter(header).items() if count > 1]:
            raise InputError(f"{name}: two columns are named {twice[0]!r}; rename one")
        yield b"\n"
        for number, row in enumerate(rows, start=2):
            if row and len(row) != len(header):
                raise InputError(f"{name}: row {number}: has {len(row)} cells, and the header has {len(header)}")
            yield as_line(dict(zip(header, row, strict=True))) if row else b"\n"
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: row {number + 1}: not UTF-8 text: {error.reason}") from None
    except csv.Error as error:
        raise InputError(f"{name}: row {number + 1}: {error}") from None


def parquet_lines(content: BinaryIO, name: str) -> Iterator[bytes]:
    """The rows of a Parquet file. Raises InputError if it cannot be read, or pyarrow is not installed."""
    pyarrow, parquet = optional("pyarrow", name, "Parquet"), optional("pyarrow.parquet", name, "Parquet")
    try:
        file = parquet.ParquetFile(content if content.seekable() else io.BytesIO(content.read()))
        for batch in file.iter_batches(batch_size=1024):
            yield from map(as_line, batch.to_pylist())
    except pyarrow.ArrowException as error:
        raise InputError(f"{name}: cannot be read as Parquet: {error}") from None


def as_line(row: dict[str, Any]) -> bytes:
    """A row as a line of JSON. Bytes are text if they are UTF-8; other values that JSON does not have become objects
    that name their type, which no field of text accepts."""
    return json.dumps(row, ensure_ascii=False, default=_as_json).encode("utf-8", "surrogatepass") + b"\n"


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            pass
    tolist = getattr(value, "tolist", None)  # of an array
    return tolist() if tolist is not None else {"type": type(value).__name__}
