"""Names of the files of a checkpoint, and folders that are written whole or not at all."""

from __future__ import annotations

import fnmatch
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ligermodels.convert.input_files import read_json_object
from ligermodels.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHTS = (SINGLE, "model-*-of-*.safetensors", INDEX, "medusa_lm_head.safetensors", "medusa_lm_head.pt")

COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Further files of a checkpoint: configs and the tokenizer."""

PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "spk_dict.pt")
"""Further files of a model that takes or gives more than text. The voices of `spk_dict.pt` are copied, never opened."""

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

CHECKPOINT = (*WEIGHTS, *COMPANIONS, *PROCESSORS)
"""Patterns of all the files of a checkpoint."""


def read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> shard, from the index of `folder`; CheckpointError when that is not an index."""
    path = folder / INDEX
    index = read_json_object(path, CheckpointError).get("weight_map")
    # Names only: an index must not reach outside of its folder.
    if isinstance(index, dict) and index and all(map(_is_shard, index.values())):
        return index
    raise CheckpointError(f"{path}: is not JSON whose 'weight_map' names, for each tensor, a file of the folder")


def _is_shard(file: Any) -> bool:
    return isinstance(file, str) and file == os.path.basename(file) and file.endswith(".safetensors")


@contextmanager
def written_whole(
    folder: Path, needed: int, *, overwrite: bool = False, replaced: Collection[str] = CHECKPOINT
) -> Iterator[Path]:
    """A temporary folder to fill with about `needed` bytes of files, which become those of `folder` on leaving.

    On any exception it is removed and `folder` is as before. `overwrite` replaces a checkpoint in `folder` (weights,
    configs, tokenizer: what the patterns `replaced` match); other files stay.

    Raises CheckpointError when `folder` is a file, holds something without `overwrite`, or cannot be written.
    """
    folder = folder.resolve()  # Of a link, what it points to is replaced.
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; give a folder")
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: is not empty; give another folder, or overwrite=True to replace a checkpoint")
    # In the folder if it is there: it may be a mount, and its parent may be read-only.
    parent = folder if folder.is_dir() else folder.parent
    new_parents = [path for path in (parent, *parent.parents) if not path.exists()]
    temporary = parent / f".{folder.name}.{secrets.token_hex(4)}.partial"
    try:
        temporary.mkdir(parents=True)
        if shutil.disk_usage(temporary).free < needed:
            raise OSError("the disk is too full")
        yield temporary
        for path in temporary.iterdir():
            _sync(path)
        with suppress(OSError):  # Not every file system can do this to a folder.
            _sync(temporary)
        if parent == folder:
            _replace(folder, temporary, replaced)
        else:
            temporary.rename(folder)  # Fails if someone else has filled it meanwhile.
        with suppress(OSError):
            _sync(parent)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be written: {error}; it needs {needed:,} bytes{_free(parent)}; nothing was written"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for path in new_parents:
            with suppress(OSError):  # Not empty: all went well, or another uses it.
                path.rmdir()


def _replace(folder: Path, temporary: Path, patterns: Collection[str]) -> None:
    new = {path.name for path in temporary.iterdir()}
    if folders := [name for name in new if (folder / name).is_dir()]:
        raise OSError(f"{folders[0]} is a folder there")
    old = [path for path in folder.iterdir() if any(fnmatch.fnmatch(path.name, p) for p in patterns)]
    for name in new:
        (temporary / name).replace(folder / name)
    for path in old:
        if path.name not in new:
            path.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free(path: Path) -> str:
    try:
        return f", {shutil.disk_usage(path).free:,} are free"
    except OSError:
        return ""
