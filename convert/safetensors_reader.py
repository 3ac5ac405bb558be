"""Reading a checkpoint folder: headers at once, tensors one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ligermodels.convert.files import INDEX, SINGLE, read_index
from ligermodels.errors import CheckpointError

# The names of the format, https://github.com/huggingface/safetensors; torch may be too old to have some of the dtypes.
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
    """What is known of a tensor before it is read; `file` is the name of the file in the folder that holds it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str


class Checkpoint:
    """The safetensors of a folder: `model.safetensors`, else the shards that `model.safetensors.index.json` names.

    A context manager: leaving it closes the files. `headers` maps tensor name to `Header`.

    Raises CheckpointError, naming the file, when weights are missing, truncated, damaged or contradict the index.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.headers: dict[str, Header] = {}
        self._files: dict[str, Any] = {}
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: no such folder")
        # As in transformers: a single file wins over an index beside it.
        single = (self.folder / SINGLE).is_file()
        if not single and not (self.folder / INDEX).is_file():
            raise CheckpointError(_no_weights(self.folder))
        index = {} if single else read_index(self.folder)
        files = [SINGLE] if single else sorted(set(index.values()))
        if missing := [file for file in files if not (self.folder / file).is_file()]:
            raise CheckpointError(
                f"{self.folder}: {len(missing)} of {len(files)} shards are missing: {missing[0]} first; fetch them"
            )
        for file in files:
            self._open(file)
        for name, file in index.items():
            if name not in self.headers or self.headers[name].file != file:
                raise CheckpointError(
                    f"{self.folder / INDEX}: says that {file} holds {name!r}, which it does not; fetch both again"
                )

    def _open(self, file: str) -> None:
        path = self.folder / file
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path}: is empty; fetch it again")
        with _explained(path):
            self._files[file] = opened = safe_open(path, framework="pt")
            specs = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, it is not a mapping
        for name, spec in specs.items():
            if name in self.headers:
                raise CheckpointError(f"{path}: holds {name!r}, but so does {self.headers[name].file}; remove one")
            if (dtype := DTYPES.get(spec.get_dtype())) is None:
                raise CheckpointError(f"{path}: {name!r} has dtype {spec.get_dtype()}, which this torch does not have")
            self.headers[name] = Header(dtype, tuple(spec.get_shape()), file)

    def read(self, name: str) -> Tensor:
        """Tensor `name`, on the CPU, as stored."""
        if name not in self.headers:
            raise CheckpointError(f"{self.folder}: holds no tensor {name!r}")
        file = self.headers[name].file
        with _explained(self.folder / file):
            tensor: Tensor = self._files[file].get_tensor(name)
        return tensor

    def close(self) -> None:
        """Close the files; tensors that were read stay valid."""
        self._files.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}; if truncated or damaged, fetch it again") from error
