"""Write a checkpoint folder, in shards, completely or not at all."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ligermodels.arguments import check_flag
from ligermodels.convert.digests import METADATA, ZEROS, digest_of, seal
from ligermodels.convert.files import CHECKPOINT, DIGESTS, INDEX
from ligermodels.convert.input_files import folder_to_write
from ligermodels.convert.json_values import is_int
from ligermodels.convert.ranks import Ranks
from ligermodels.convert.saving import written_whole
from ligermodels.errors import CheckpointError, InputError, short

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}

Lazy = tuple[str, Sequence[int], torch.dtype, Callable[[], Tensor]]
"""Name, shape and dtype of a tensor, and the function that fetches it."""


def save_checkpoint(
    folder: str | os.PathLike[str],
    tensors: Iterable[Lazy],
    *,
    name: str = "model",
    max_shard_size: int | str = "5GB",
    files: Mapping[str, bytes | str | Path] | None = None,
    overwrite: bool = False,
    replaced: Collection[str] = CHECKPOINT,
    ranks: Ranks | None = None,
) -> None:
    """Write `model.safetensors`, or shards of at most `max_shard_size` and their index, named as in transformers.

    Index and header have the SHA-256 of the files: see `digests`.

    Args:
        folder: folder to write; it is created with its parents if it does not exist.
        tensors: the tensors. One shard at a time is fetched, so the host holds at most one shard.
        name: file name before ".safetensors", instead of "model".
        max_shard_size: bytes, or text such as "5GB" (10^9) or "5GiB" (2^30). A larger tensor gets a shard of its own.
        files: name -> content of further files, or the path of a file to copy. A name may have one folder.
        overwrite: replace a checkpoint in `folder`. Files there that match none of `replaced` stay.
        replaced: patterns of the names of a checkpoint's files.
        ranks: ranks that all call this; one of them writes. Default: this process alone.

    Raises:
        CheckpointError: `folder` is a file, is not empty, or cannot be written (a full disk), or another rank failed.
            Nothing is left behind.
        InputError: `max_shard_size` is not a size, or `overwrite` is neither True nor False.
    """
    check_flag("overwrite", overwrite)
    folder, ranks, files = folder_to_write(folder), ranks or Ranks(), files or {}
    where, limit = os.fspath(folder), parse_size(max_shard_size)
    by_name = _by_name(where, list(tensors))
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: math.prod(tensor[1]) * tensor[2].itemsize,
        filename_pattern=f"{name}{{suffix}}.safetensors",
        max_shard_size=limit,
    )
    temporary, digests = Path(), dict[str, Future[str]]()
    with ExitStack() as opened:
        with ranks.step(where):
            if ranks.writes:
                needed = split.metadata["total_size"] + sum(map(_size, [_index(split), *files.values()]))
                temporary = opened.enter_context(written_whole(folder, needed, overwrite=overwrite, replaced=replaced))
                for file, content in files.items():
                    _write(temporary / file, content)
        hashing = opened.enter_context(ThreadPoolExecutor(1, "digest"))  # while the next shard is fetched
        for file, keys in split.filename_to_tensors.items():
            with ranks.step(where):
                fetched = ranks.fetch({key: by_name[key][3] for key in keys})
                if ranks.writes:
                    _write_shard(temporary / file, fetched, {"format": "pt"} if split.is_sharded else METADATA)
                    digests[file] = hashing.submit(digest_of if split.is_sharded else seal, temporary / file)
                del fetched
        with ranks.step(where):
            if ranks.writes:
                done = {file: digest.result() for file, digest in digests.items()}
                if split.is_sharded:
                    _write(temporary / INDEX, _index(split, done))
            opened.close()  # moves the files into `folder`


def _by_name(where: str, tensors: Sequence[Lazy]) -> dict[str, Lazy]:
    by_name = {tensor[0]: tensor for tensor in tensors}
    if not tensors or len(by_name) < len(tensors):
        raise CheckpointError(f"{where}: {'two tensors have the same name' if tensors else 'there are no tensors'}")
    return by_name


def _index(split: StateDictSplit, digests: Mapping[str, str] | None = None) -> str:
    """The text of the index of a sharded checkpoint, "" for a single file; by default with zeros as digests."""
    if not split.is_sharded:
        return ""
    digests = dict.fromkeys(split.filename_to_tensors, ZEROS) if digests is None else digests
    index = {"metadata": {**split.metadata, DIGESTS: digests}, "weight_map": split.tensor_to_filename}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def parse_size(size: int | str, field: str = "max_shard_size") -> int:
    """Bytes of `size`, a number or text with a unit. InputError for the `field` if it is neither, or below 1."""
    count = size if is_int(size) else 0
    if isinstance(size, str):
        match = re.fullmatch(r"(\d{1,99}(?:\.\d{1,99})?)\s*([KMGT]?I?)B?", size.strip().upper())
        count = int(float(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    if count < 1:
        raise InputError(f"{field}: {short(size)} is not a size; give bytes, or text such as '5GB' or '500MB'")
    return count


def _write_shard(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    pointers: set[int] = set()
    for name, tensor in tensors.items():
        # The library refuses tensors that share memory, such as a projection that is written under several names.
        if tensor.data_ptr() in pointers:
            tensors[name] = tensor.clone()
        pointers.add(tensor.data_ptr())
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    # The library may make the file readable by its owner only; the folder has the permissions of the user's umask.
    path.chmod(path.parent.stat().st_mode & 0o666)


def _write(path: Path, content: bytes | str | Path) -> None:
    if not path.parent.exists():
        path.parent.mkdir()
    if isinstance(content, Path):
        shutil.copyfile(content, path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def _size(content: bytes | str | Path) -> int:
    if isinstance(content, Path):
        return content.stat().st_size if content.is_file() else 0
    return len(content)
