"""Read a checkpoint folder: all headers first, then tensors one by one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ligermodels.convert.files import INDEX, SINGLE, read_index
from ligermodels.convert.input_files import is_present, shown
from ligermodels.convert.reading import reading
from ligermodels.errors import CheckpointError

# Names of the format, https://github.com/huggingface/safetensors. Older versions of torch lack some of the dtypes.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype)
    for name, dtype in {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2": "float8_e5m2",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        "C64": "complex64",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
    }.items()
    if hasattr(torch, dtype)
}


class Header(NamedTuple):
    """A tensor in a file: its dtype and shape, and the byte of `file` where it starts."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    start: int

    @property
    def end(self) -> int:
        """Byte of the file where the tensor ends."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize


class Checkpoint:
    """The safetensors files of a folder. A context manager that closes the files at the end.

    All files are of one save, also if the folder is written meanwhile. `headers` maps each tensor name to its `Header`.

    Args:
        folder: folder of a checkpoint.
        single: file to read if it exists; otherwise the shards in `model.safetensors.index.json` are read.

    Raises:
        CheckpointError: files are missing, truncated, damaged, or contradict the index; the message names the file.
    """

    def __init__(self, folder: str | os.PathLike[str], *, single: str = SINGLE) -> None:
        self.folder = Path(folder)
        self.headers: dict[str, Header] = {}
        # Each open file, and its mapped bytes; the mapping is private, so that writing to it changes no file.
        self._files: dict[str, tuple[FileIO, torch.UntypedStorage]] = {}
        with reading(self.folder, lambda opened: self._open_all(single, opened)) as opened:
            self._open_files = opened.pop_all()

    def _open_all(self, single: str, opened: ExitStack) -> ExitStack:
        """Open the files until the stack is closed, and fill `headers`."""
        self.headers, self._files = {}, {}
        if not os.path.isdir(self.folder):
            raise CheckpointError(f"{shown(self.folder)}: no such folder")
        # A single file takes precedence over an index, as in transformers.
        alone = is_present(self.folder / single, CheckpointError)
        if not alone and not is_present(self.folder / INDEX, CheckpointError):
            raise CheckpointError(_no_weights(self.folder))
        index = {} if alone else read_index(self.folder)
        files = [single] if alone else sorted(set(index.values()))
        if missing := [file for file in files if not is_present(self.folder / file, CheckpointError)]:
            raise CheckpointError(
                f"{self.folder}: {len(missing)} of {len(files)} shards are missing: {missing[0]} first; fetch them"
            )
        for file in files:
            self._open(file, opened)
        for name, file in index.items():
            if name not in self.headers or self.headers[name].file != file:
                raise CheckpointError(
                    f"{self.folder / INDEX}: says that {file} holds {name!r}, but it does not; fetch both again"
                )
        return opened

    def _open(self, file: str, stack: ExitStack) -> None:
        path = self.folder / file
        with _explained(path):
            with safe_open(path, framework="pt"):
                pass  # raises if the file is damaged or too short, so the code below can trust its header
            opened = stack.enter_context(FileIO(path))
            size = os.fstat(opened.fileno()).st_size
            mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8, device="cpu")
            self._files[file] = opened, mapped.untyped_storage()
            length = int.from_bytes(opened.read(8), "little")
            specs = json.loads(os.pread(opened.fileno(), length, 8))
        specs.pop("__metadata__", None)
        for name, spec in sorted(specs.items()):
            if name in self.headers:
                raise CheckpointError(f"{path}: holds {name!r}, but so does {self.headers[name].file}; remove one")
            if (dtype := DTYPES.get(spec["dtype"])) is None:
                raise CheckpointError(f"{path}: {name!r} has dtype {spec['dtype']}, which this torch does not have")
            self.headers[name] = Header(dtype, tuple(spec["shape"]), file, 8 + length + spec["data_offsets"][0])

    def read(self, name: str) -> Tensor:
        """Tensor `name` on the CPU, as stored. It is mapped from its file, so bytes are read when they are used."""
        shape = self._header(name).shape
        return self.read_slice(name, 0, math.prod(shape)).view(shape)

    def read_slice(self, name: str, start: int, count: int) -> Tensor:
        """Elements `start` to `start + count` of tensor `name`, flat, mapped from its file. CheckpointError if it does
        not have them."""
        header = self._header(name)
        size = header.dtype.itemsize
        if start < 0 or header.start + (start + count) * size > header.end:
            raise CheckpointError(
                f"{self.folder / header.file}: {name!r} does not have {count} elements from {start} on"
            )
        stored = self._bytes(header.file, header.start + start * size, header.start + (start + count) * size)
        if header.start % size:
            stored = stored.clone()  # the format does not align tensors, and processors may need aligned elements
        return stored.view(header.dtype)

    def read_together(self, names: Sequence[str]) -> Tensor | None:
        """The bytes of tensors that are adjacent in one file, mapped from it; None if they are not adjacent."""
        headers = [self._header(name) for name in names]
        places = [(header.file, header.start) for header in headers]
        if places[1:] != [(header.file, header.end) for header in headers[:-1]]:
            return None
        return self._bytes(headers[0].file, headers[0].start, headers[-1].end)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes of tensor `name` from byte `start` on. Several threads may call this at once."""
        header = self._header(name)
        path, at = self.folder / header.file, header.start + start
        if start < 0 or at + len(buffer) > header.end:
            raise CheckpointError(f"{path}: {name!r} does not have {len(buffer)} bytes from {start} on")
        file, _ = self._file(header.file)
        with _explained(path):
            while buffer:
                if not (count := os.preadv(file.fileno(), [buffer], at)):
                    raise CheckpointError(f"{path}: is shorter than it was; fetch it again")
                buffer, at = buffer[count:], at + count

    def _header(self, name: str) -> Header:
        if name not in self.headers:
            raise CheckpointError(f"{self.folder}: holds no tensor {name!r}")
        return self.headers[name]

    def _file(self, name: str) -> tuple[FileIO, torch.UntypedStorage]:
        if name not in self._files:
            raise CheckpointError(f"{self.folder / name}: was closed")
        return self._files[name]

    def _bytes(self, file: str, start: int, end: int) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(self._file(file)[1][start:end])

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid."""
        self._files.clear()
        self._open_files.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _no_weights(folder: Path) -> str:
    message = f"{folder}: no {SINGLE} and no {INDEX}"
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        message += (
            f", only {pickles[0]}; pickles are not loaded. Convert them with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    return message


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}; if truncated or damaged, fetch it again") from error
