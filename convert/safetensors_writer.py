"""Writing a checkpoint folder, in shards, whole or not at all."""

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
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ligermodels.arguments import check_flag
from ligermodels.convert.digests import METADATA, digest_of, seal
from ligermodels.convert.files import CHECKPOINT, DIGESTS, INDEX
from ligermodels.convert.input_files import folder_to_write
from ligermodels.convert.ranks import Ranks
from ligermodels.convert.saving import written_whole
from ligermodels.errors import CheckpointError, InputError

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}

Lazy = tuple[str, Sequence[int], torch.dtype, Callable[[], Tensor]]
"""Name, shape, dtype, and the function that fetches the tensor."""


def save_checkpoint(
    folder: str | os.PathLike[str],
    tensors: Iterable[Lazy],
    *,
    name: str = "model",
    max_shard_size: int | str = "5GB",
    files: Mapping[str, bytes | str | Path] | None = None,
    overwrite: bool = False,
    replaced: Collection[str] = CHECKPOINT,
    check: Callable[[Path], object] | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Write `model.safetensors`, or shards of at most `max_shard_size` and their index, named as transformers does.

    The metadata of the index has the SHA-256 of each shard, the header of a file by itself has its own: see `digests`.

    Args:
        folder: created with its parents if need be.
        tensors: fetched one shard at a time, so the host holds no more copies than that.
        name: what the files are called instead of "model".
        max_shard_size: bytes, or text such as "5GB" (10^9) or "5GiB" (2^30); a larger tensor has a shard to itself.
        files: name -> content, or the path of a file to copy.
        overwrite: replace a checkpoint in `folder`; files there that are no part of one stay.
        replaced: patterns of the files that are part of one.
        check: called with the folder that holds the files before they become those of `folder`; may raise.
        ranks: the ranks that all call this, of which one writes; by default this one alone.

    Raises:
        CheckpointError: `folder` is a file, is not empty, or cannot be written (a full disk); nothing is left behind.
            Or another rank failed.
        InputError: `max_shard_size` is not a size, or `overwrite` neither True nor False.
    """
    check_flag("overwrite", overwrite)
    folder, ranks = folder_to_write(folder), ranks or Ranks()
    where = os.fspath(folder)
    limit, found, files = parse_size(max_shard_size), list(tensors), files or {}
    by_name = {key: (shape, dtype, read) for key, shape, dtype, read in found}
    if not found or len(by_name) < len(found):
        raise CheckpointError(f"{folder}: {'two tensors have the same name' if found else 'there are no tensors'}")
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: math.prod(tensor[0]) * tensor[1].itemsize,
        filename_pattern=f"{name}{{suffix}}.safetensors",
        max_shard_size=limit,
    )
    shards = list(split.filename_to_tensors) if split.is_sharded else []

    def index(digests: Mapping[str, str]) -> str:
        metadata = {**split.metadata, DIGESTS: digests}
        return (
            json.dumps({"metadata": metadata, "weight_map": split.tensor_to_filename}, indent=2, sort_keys=True) + "\n"
        )

    temporary, digests = Path(), dict[str, Future[str]]()
    with ExitStack() as opened:
        with ranks.step(where):
            if ranks.writes:
                needed = split.metadata["total_size"] + sum(map(_size, files.values()))
                needed += _size(index(dict.fromkeys(shards, "0" * 64))) if shards else 0
                temporary = opened.enter_context(written_whole(folder, needed, overwrite=overwrite, replaced=replaced))
                for file, content in files.items():
                    _write(temporary / file, content)
        hashing = opened.enter_context(ThreadPoolExecutor(1, "digest"))  # while the next shard is fetched
        for file, keys in split.filename_to_tensors.items():
            with ranks.step(where):
                fetched = ranks.fetch({key: by_name[key][2] for key in keys})
                if ranks.writes:
                    _write_shard(temporary / file, fetched, {"format": "pt"} if shards else METADATA)
                    digests[file] = hashing.submit(digest_of if shards else seal, temporary / file)
                del fetched
        with ranks.step(where):
            done = {file: digest.result() for file, digest in digests.items()}
            if shards and ranks.writes:
                _write(temporary / INDEX, index(done))
            if check is not None and ranks.writes:
                check(temporary)
            opened.close()  # The files become those of `folder`.


def parse_size(size: int | str) -> int:
    """Bytes in `size`: a number, or text with a unit; InputError when it is neither, or not above zero."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", str(size).strip().upper())
    count = int(float(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    if isinstance(size, bool) or count < 1:
        raise InputError(f"max_shard_size: {size!r} is not a size; give bytes, or text such as '5GB' or '500MB'")
    return size if isinstance(size, int) else count


def _write_shard(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    places: set[int] = set()
    for name, tensor in tensors.items():
        # The library refuses tensors that share memory, as a projection does that is written under several names.
        if tensor.data_ptr() in places:
            tensors[name] = tensor.clone()
        places.add(tensor.data_ptr())
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    # The library may make the file private to its owner; the folder has the permissions that the user's umask leaves.
    path.chmod(path.parent.stat().st_mode & 0o666)


def _write(path: Path, content: bytes | str | Path) -> None:
    if isinstance(content, Path):
        shutil.copyfile(content, path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def _size(content: bytes | str | Path) -> int:
    if isinstance(content, Path):
        return content.stat().st_size if content.is_file() else 0
    return len(content)
