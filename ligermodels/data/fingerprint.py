"""Fingerprints of files by samples of their content: fast, and independent of file names and folders."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from ligermodels.convert.files import chat_templates
from ligermodels.convert.input_files import is_present, open_file
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.errors import CheckpointError, LigerModelsError

PIECE, PIECES = 1 << 16, 64
"""Size and number of the samples of a file, evenly spaced from start to end. Smaller files are read in full."""
OF_TENSOR = 1 << 12
"""Bytes read from the middle of each tensor."""
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a checkpoint that determine the tokens of a text or chat."""

Fingerprint = dict[str, Any]
"""A file's `name` for messages, its size in `bytes`, and a `digest` of its samples."""


def of_file(path: Path, error: type[LigerModelsError] = CheckpointError) -> Fingerprint:
    """Fingerprint of a file. Raises `error` if the file cannot be read."""
    with open_file(path, error) as file:
        size = os.fstat(file.fileno()).st_size
        starts = (max(i * PIECE, (size - PIECE) * i // (PIECES - 1)) for i in range(PIECES))
        return _digest(path, file, size, ((start, PIECE) for start in starts))


def of_checkpoint(config: Path, tokenizer: Path, weights: Path | None) -> list[Fingerprint]:
    """Fingerprints of the files of a checkpoint.

    Args:
        config: path of config.json.
        tokenizer: folder of the tokenizer files.
        weights: folder of the safetensors files; None leaves them out.

    Returns:
        Fingerprints of config.json, the tokenizer's files that exist, chat templates included, and the weights.

    Raises:
        CheckpointError: the weights are missing or damaged, or another file cannot be read.
    """
    names = (*TOKENIZER, *chat_templates(tokenizer))
    files = [config, *(tokenizer / name for name in names if is_present(tokenizer / name, CheckpointError))]
    return [of_file(file) for file in files] + (of_weights(weights) if weights else [])


def of_weights(folder: Path) -> list[Fingerprint]:
    """Fingerprints of safetensors files, from their headers and the middle bytes of each tensor.

    Raises CheckpointError if the weights are missing or damaged.
    """
    with Checkpoint(folder) as checkpoint:
        headers = sorted(checkpoint.headers.values(), key=lambda header: (header.file, header.start))
    pieces: dict[str, list[tuple[int, int]]] = {}
    for header in headers:
        if header.file not in pieces:
            pieces[header.file] = [(0, header.start)]
        middle = (header.start + header.end - OF_TENSOR) // 2
        start = max(header.start, middle)
        pieces[header.file].append((start, min(OF_TENSOR, header.end - start)))
    fingerprints = []
    for name in sorted(pieces):
        with open_file(folder / name, CheckpointError) as file:
            fingerprints.append(_digest(folder / name, file, os.fstat(file.fileno()).st_size, pieces[name]))
    return fingerprints


def _digest(path: Path, file: BinaryIO, size: int, pieces: Iterable[tuple[int, int]]) -> Fingerprint:
    digest = hashlib.sha256()
    for start, length in pieces:
        digest.update(os.pread(file.fileno(), length, start))
    return {"name": path.name, "bytes": size, "digest": digest.hexdigest()[:32]}
