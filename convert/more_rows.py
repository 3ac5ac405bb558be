"""Checkpoints with more tokens: their embeddings and LM heads get rows, file by file and without loading the model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ligermodels.convert.config_json import joined, nested_configs, read_json
from ligermodels.convert.files import INDEX, SINGLE
from ligermodels.convert.safetensors_reader import Checkpoint, Header
from ligermodels.errors import CheckpointError, ConfigError

AT_ONCE = 1 << 24
"""Most elements, or bytes, that are in memory at once."""
PER_LAYER = "vocab_size_per_layer_input"
"""Field of models with an embedding in each layer, which has a vocabulary of its own."""


ZERO = 1e-16
"""Largest value of an embedding that counts as zero."""
MULTIPLE = 64
"""A larger vocabulary is rounded up to this multiple, as in TRL: products of other sizes are slower on GPUs."""


def config_for(config: Path, size: int, multiple: int = MULTIPLE) -> tuple[dict[str, Any], int, int]:
    """The content of config.json for a vocabulary of at least `size` tokens.

    Args:
        config: path of config.json.
        size: number of tokens.
        multiple: a new size is rounded up to a multiple of this number.

    Returns:
        The content, and the old and the new size of the vocabulary.

    Raises:
        ConfigError: embeddings of this model cannot be resized.
    """
    configs = nested_configs(read_json(config))
    sizes = [int(part["vocab_size"]) for part in configs.values() if "vocab_size" in part]
    if not sizes:
        raise ConfigError(f"{config}: vocab_size: there is none, so that no token can be added")
    if size <= sizes[-1]:
        return joined(configs), sizes[-1], sizes[-1]
    if any(PER_LAYER in part for part in configs.values()):
        raise ConfigError(f"{config}: {PER_LAYER}: no token can be added to embeddings of the layers")
    new = -(-size // multiple) * multiple
    more = {key: {**part, "vocab_size": new} if "vocab_size" in part else part for key, part in configs.items()}
    return joined(more), sizes[-1], new


def write_more_rows(folder: Path, target: Path, *, used: int, size: int, vocab_size: int) -> list[str]:
    """Write the weights of a checkpoint with rows for new tokens. Files without such a tensor become links.

    Each new row is the mean of the rows of the old tokens, as in transformers' `resize_token_embeddings`. Rows of the
    checkpoint beyond the old tokens, which pad its vocabulary, are used first.

    Args:
        folder: folder of the checkpoint.
        target: folder to write to.
        used: number of old tokens, counted by the tokenizer. Tokens beyond `vocab_size`, which have no rows in the
            checkpoint, count as new tokens.
        size: number of rows to write to, from row `used` on: the new tokens, and padding of a larger vocabulary.
        vocab_size: number of rows in the checkpoint.

    Returns:
        Names of the tensors with new rows.

    Raises:
        CheckpointError: the weights are missing or damaged, or the embeddings are quantised.
    """
    used = min(used, vocab_size)
    with Checkpoint(folder) as checkpoint:
        names = _names(checkpoint, vocab_size)
        if not names:
            raise CheckpointError(f"{folder}: no embedding with {vocab_size:,} rows, so that no token can be added")
        rows = {name: _mean(checkpoint, name, used) for name in names}
        files: dict[str, dict[str, Header]] = {}
        for name, header in checkpoint.headers.items():
            files.setdefault(header.file, {})[name] = header
        for file, headers in files.items():
            if headers.keys().isdisjoint(names):
                (target / file).symlink_to((folder / file).resolve())
            else:
                _rewrite(folder / file, target / file, headers, rows, used=used, size=size)
    if list(files) != [SINGLE]:
        weight_map = {name: file for file, headers in files.items() for name in headers}
        (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return names


def zero_rows(folder: Path, vocab_size: int, rows: Collection[int]) -> list[int]:
    """Those of `rows` that are there, and zero in all embeddings of a checkpoint: the base model was not trained on
    these tokens.

    Args:
        folder: folder of the checkpoint.
        vocab_size: number of rows of the embeddings.
        rows: token ids.

    Raises:
        CheckpointError: the weights are missing or damaged.
    """
    with Checkpoint(folder) as checkpoint:
        widths = {name: math.prod(checkpoint.headers[name].shape[1:]) for name in _names(checkpoint, vocab_size)}
        largest = {
            row: max(float(checkpoint.read_slice(name, row * n, n).float().abs().max()) for name, n in widths.items())
            for row in (rows if widths else ())
            if row < vocab_size
        }
    return [row for row, value in largest.items() if value <= ZERO]


def _names(checkpoint: Checkpoint, vocab_size: int) -> list[str]:
    """Names of the embeddings, LM heads and biases with a row for each token."""
    return [
        name
        for name, header in checkpoint.headers.items()
        if header.shape[:1] == (vocab_size,) and ("embed" in name or "head" in name or "wte" in name)
    ]


def _mean(checkpoint: Checkpoint, name: str, used: int) -> Tensor:
    """The mean of the first `used` rows of a tensor, in its dtype, without its first dimension."""
    header = checkpoint.headers[name]
    if not (header.dtype.is_floating_point and header.dtype.itemsize > 1):
        raise CheckpointError(f"{checkpoint.folder}: {name!r} is quantised ({header.dtype}): no token can be added")
    width, step = math.prod(header.shape[1:]), max(1, AT_ONCE // math.prod(header.shape[1:]))
    total = torch.zeros(width, dtype=torch.float64, device="cpu")
    for row in range(0, used, step):
        count = min(step, used - row)
        total += checkpoint.read_slice(name, row * width, count * width).view(count, width).double().sum(0)
    return (total / used).to(header.dtype)


def _rewrite(
    source: Path, target: Path, headers: Mapping[str, Header], rows: Mapping[str, Tensor], *, used: int, size: int
) -> None:
    """Copy a safetensors file; tensors in `rows` get these as rows `used` to `size`."""
    with open(source, "rb") as old, open(target, "wb") as new:
        specs = json.loads(old.read(int.from_bytes(old.read(8), "little")))
        order = sorted(headers, key=lambda name: headers[name].start)
        end = 0
        for name in order:
            start, shape = end, list(headers[name].shape)
            if name in rows:
                shape[0] = max(shape[0], size)
            end = start + math.prod(shape) * headers[name].dtype.itemsize
            specs[name] |= {"shape": shape, "data_offsets": [start, end]}
        head = json.dumps({"__metadata__": {"format": "pt"}, **{name: specs[name] for name in order}}).encode()
        content = head + b" " * (-len(head) % 8)
        new.write(len(content).to_bytes(8, "little") + content)
        for name in order:
            header = headers[name]
            if name not in rows:
                _copy(old, new, header.start, header.end)
                continue
            row = rows[name].view(torch.uint8).numpy().tobytes()
            first = header.start + used * len(row)
            _copy(old, new, header.start, first)
            for _ in range(used, size):
                new.write(row)
            _copy(old, new, min(first + (size - used) * len(row), header.end), header.end)


def _copy(old: BinaryIO, new: BinaryIO, start: int, end: int) -> None:
    """Copy the bytes `start` to `end`."""
    while start < end:
        part = os.pread(old.fileno(), min(AT_ONCE, end - start), start)
        if not part:
            raise CheckpointError(f"{old.name}: is shorter than it was; fetch it again")
        new.write(part)
        start += len(part)
