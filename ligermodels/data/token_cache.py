"""Tokens of documents on disk, for later runs with the same data, and for the other processes of a run.

A folder holds the tokens of one corpus with one tokenizer and chat template; its name is a digest of all that the
tokens depend on. Each process that adds documents appends to two files of its own: NAME.tokens with the tokens, then
NAME.index with a record per document. A document counts once its record is complete, so a process may be killed at any
time. Readers map the files into memory and check a document's checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from ligermodels.convert.locks import Locked, locked
from ligermodels.data.converted import cache_room
from ligermodels.data.encoding import Encoded, Form

FORMAT = 1
"""Version of the files."""

RECORD = np.dtype(
    [("document", "<i8"), ("start", "<i8"), ("bytes", "<i4"), ("tokens", "<i4"), ("flags", "<u4"), ("crc", "<u4")]
)
"""An entry of NAME.index: index of the document; start and number of its bytes in NAME.tokens; number of its tokens;
flags; CRC-32 of its bytes, which are the ids, the mask of trained tokens (a bit each), and the other fields as JSON."""

WIDE, MASKED, MORE = 1, 2, 4
"""Flags: ids of four bytes, not two; with a mask; with other fields. The form is above them."""
FORMS = get_args(Form)


def cache_folder() -> Path:
    """The folder of the caches of tokens."""
    return cache_room("tokens")


class TokenCache:
    """Encoded documents in a folder, by index. Any number of processes may read and add at the same time.

    Args:
        key: all that the tokens depend on, as JSON types.
        count: number of documents.
        say: called with a message if the cache cannot be written.

    Raises:
        OSError: the folder cannot be created or read.
    """

    def __init__(self, key: Mapping[str, Any], count: int, say: Callable[[str], object]) -> None:
        text = json.dumps({"format": FORMAT, **key}, indent=1, sort_keys=True)
        self.folder = cache_folder() / hashlib.sha256(text.encode()).hexdigest()[:24]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock, self._say = threading.RLock(), say
        self._place = np.full((count, 2), -1, np.int32)
        """File and entry of each document; -1 if it is not in the cache."""
        self._files: list[_File] = []
        self._writer: _Writer | None = None
        self._is_writable = True
        with suppress(OSError):  # for people who look into the folder
            (self.folder / "key.json").write_text(text)
        self.refresh()

    def __contains__(self, index: int) -> bool:
        return bool(self._place[index, 0] >= 0)

    @property
    def num_documents(self) -> int:
        """Number of documents in the cache."""
        return int((self._place[:, 0] >= 0).sum())

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return _size(self.folder.glob("*"))

    def refresh(self) -> None:
        """Find the documents that have been added since the last call, by any process."""
        with self._lock:
            known = {file.path for file in self._files}
            for path in sorted(self.folder.glob("*.index")):
                if path not in known:
                    self._files.append(_File(path))
            for number, file in enumerate(self._files):
                first, documents = file.new_documents()
                fits = (documents >= 0) & (documents < len(self._place))
                entries = np.arange(first, first + len(documents))[fits]
                self._place[documents[fits]] = np.stack([np.full_like(entries, number), entries], 1)

    def get(self, index: int) -> Encoded | None:
        """A document; None if it is not in the cache, or damaged."""
        with self._lock:
            file, entry = self._place[index].tolist()
            if file < 0:
                return None
            record, content = self._files[file].read(entry)
        if len(content) != record["bytes"] or zlib.crc32(content) != record["crc"]:
            self._place[index] = -1
            return None
        return _decoded(content, int(record["tokens"]), int(record["flags"]))

    def add(self, indices: Sequence[int], documents: Sequence[Encoded]) -> None:
        """Add documents. If the disk is full, or the folder may not be written, a message says so, and they are not
        kept."""
        with self._lock:
            if not self._is_writable:
                return
            try:
                self._writer = self._writer or _Writer(self.folder)
                self._writer.add(indices, documents)
            except OSError as error:
                self._is_writable = False
                self._say(f"{self.folder}: {error.strerror or error}: tokens are not cached from now on")
            self.refresh()

    @contextmanager
    def claim(self, indices: Sequence[int], *, wait: float) -> Iterator[None]:
        """Context manager for the one process that tokenises these documents.

        Args:
            indices: the documents.
            wait: seconds to wait for a process that tokenises them now.

        Raises:
            Locked: another process, or another thread of this process, still tokenises them.
        """
        name = hashlib.sha256(np.asarray(indices, np.int64).tobytes()).hexdigest()[:24]
        try:
            lock = locked(self.folder / f".{name}.lock", wait=wait)
            lock.__enter__()
        except Locked:
            raise
        except OSError:  # The folder is read-only: nothing is shared.
            yield
            return
        try:
            yield
        finally:
            lock.__exit__(None, None, None)

    def close(self) -> None:
        """Close the files; a message has the size of the cache if this process has added documents."""
        with self._lock:
            self._is_writable = False
            if self._writer is not None:
                self._writer.close()
                self._writer = None
                size, total = (f"{bytes / 2**20:,.1f} MiB" for bytes in (self.size, _size(cache_folder().glob("*/*"))))
                self._say(
                    f"token cache: {self.num_documents:,} documents are in {self.folder}, {size}; {total} in all of "
                    f"{cache_folder()}, which you may empty"
                )


class _File:
    """Files of a process, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.path, self._tokens = path, path.with_suffix(".tokens")
        self._records: NDArray[Any] = np.empty(0, RECORD)
        self._content: NDArray[np.uint8] = np.empty(0, np.uint8)

    def new_documents(self) -> tuple[int, NDArray[np.int64]]:
        """Number of the first new entry, and the documents of the new entries, in order."""
        first = len(self._records)
        try:
            count = self.path.stat().st_size // RECORD.itemsize
            size = self._tokens.stat().st_size
        except OSError:  # removed by a user
            return first, np.empty(0, np.int64)
        if count <= first:
            return first, np.empty(0, np.int64)
        records = np.memmap(self.path, RECORD, "r", shape=(count,))
        ends = records["start"][first:] + records["bytes"][first:]
        complete = first + int(np.argmax(ends > size)) if (ends > size).any() else count
        if size > len(self._content):
            self._content = np.memmap(self._tokens, np.uint8, "r", shape=(size,))
        self._records = records[:complete]
        return first, np.asarray(self._records["document"][first:])

    def read(self, entry: int) -> tuple[Any, bytes]:
        """The record of an entry, and its bytes."""
        record = self._records[entry]
        return record, self._content[record["start"] : record["start"] + record["bytes"]].tobytes()


class _Writer:
    """Appends documents to two new files."""

    def __init__(self, folder: Path) -> None:
        name, flags = uuid.uuid4().hex[:16], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._tokens = os.open(folder / f"{name}.tokens", flags, 0o666)
        self._index = os.open(folder / f"{name}.index", flags, 0o666)
        self._size = 0

    def add(self, indices: Sequence[int], documents: Sequence[Encoded]) -> None:
        """Append documents. Raises OSError if they cannot be written; none of them is then in the index."""
        contents, records = list[bytes](), np.empty(len(documents), RECORD)
        start = self._size
        for row, (index, document) in enumerate(zip(indices, documents, strict=True)):
            content, flags = _encoded(document)
            records[row] = (index, start, len(content), len(document.ids), flags, zlib.crc32(content))
            contents.append(content)
            start += len(content)
        _write(self._tokens, b"".join(contents))
        _write(self._index, records.tobytes())
        self._size = start

    def close(self) -> None:
        os.close(self._tokens)
        os.close(self._index)


def _size(paths: Iterable[Path]) -> int:
    """Bytes of the files that exist."""
    total = 0
    for path in paths:
        with suppress(OSError):  # removed by another process
            total += path.stat().st_size
    return total


def _write(file: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]


def _encoded(document: Encoded) -> tuple[bytes, int]:
    """The bytes of a document, and its flags."""
    is_wide = bool(len(document.ids)) and int(document.ids.max()) >= 1 << 16
    more = [document.problem, document.is_empty, document.unused, document.warnings]
    parts = [
        document.ids.astype("<i4" if is_wide else "<u2").tobytes(),
        b"" if document.trained is None else np.packbits(document.trained).tobytes(),
        json.dumps(more).encode() if any(more) else b"",
    ]
    flags = WIDE * is_wide | MASKED * (document.trained is not None) | MORE * any(more)
    return b"".join(parts), flags | FORMS.index(document.form) << 3


def _decoded(content: bytes, count: int, flags: int) -> Encoded:
    """The document with these bytes."""
    size = count * (4 if flags & WIDE else 2)
    ids = np.frombuffer(content, "<i4" if flags & WIDE else "<u2", count).astype(np.int32)
    form: Form = FORMS[flags >> 3]
    trained = None
    if flags & MASKED:
        bits = np.frombuffer(content, np.uint8, -(-count // 8), size)
        trained, size = np.unpackbits(bits, count=count).astype(bool), size + len(bits)
    if not flags & MORE:
        return Encoded(ids, trained, form)
    problem, is_empty, unused, warnings = json.loads(content[size:])
    return Encoded(ids, trained, form, problem, is_empty, tuple(unused), tuple(warnings))
