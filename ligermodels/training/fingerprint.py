"""What files hold, told from pieces of them: the same under any name and in any folder, and read in moments."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ligermodels.convert.safetensors_reader import Checkpoint

PIECE, PIECES = 1 << 16, 64
"""Bytes of a piece, and pieces of a file: its head, its tail, others evenly between. Smaller files are read whole."""
OF_TENSOR = 1 << 12
"""Bytes that are read in the middle of each tensor."""
DECISIVE = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a checkpoint that decide, beside the weights, how text becomes tokens and what is computed of them."""

Fingerprint = dict[str, Any]
"""Of a file: its `name`, for messages, its `bytes`, how many, and a `digest` of what was read of them."""


def of_file(path: Path) -> Fingerprint:
    """Of any file. Raises OSError when it cannot be read."""
    size = path.stat().st_size
    places = (max(i * PIECE, (size - PIECE) * i // (PIECES - 1)) for i in range(PIECES))
    return _digest(path, size, ((place, PIECE) for place in places))


def of_checkpoint(folder: Path) -> list[Fingerprint]:
    """Of the files of a Hugging Face checkpoint; of its safetensors, their headers and the middle of each tensor.

    Raises CheckpointError when the weights are missing or damaged.
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
    found = [of_file(folder / name) for name in DECISIVE if (folder / name).is_file()]
    return found + [_digest(path := folder / file, path.stat().st_size, pieces[file]) for file in sorted(pieces)]


def _digest(path: Path, size: int, pieces: Iterable[tuple[int, int]]) -> Fingerprint:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for start, length in pieces:
            digest.update(os.pread(file.fileno(), length, start))
    return {"name": path.name, "bytes": size, "digest": digest.hexdigest()[:32]}
