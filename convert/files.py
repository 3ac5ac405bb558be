"""Names of the files of a checkpoint."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Collection
from functools import cache
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


DIGESTS = "sha256"
"""Where the metadata of an index has the digest of each shard, as written by `save_checkpoint`."""


def read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> shard, from the index of `folder`; CheckpointError when that is not an index."""
    path = folder / INDEX
    index = _index(folder).get("weight_map")
    # Names only: an index must not reach outside of its folder.
    if isinstance(index, dict) and index and all(map(_is_shard, index.values())):
        return index
    raise CheckpointError(f"{path}: is not JSON whose 'weight_map' names, for each tensor, a file of the folder")


def read_digests(folder: Path) -> dict[str, str]:
    """Shard -> SHA-256, from the index of `folder`; none where it has none, as those of other writers."""
    metadata = _index(folder).get("metadata")
    digests = metadata.get(DIGESTS) if isinstance(metadata, dict) else None
    if digests is None:
        return {}
    if isinstance(digests, dict) and all(_is_shard(file) and isinstance(d, str) for file, d in digests.items()):
        return dict(digests)
    raise CheckpointError(f"{folder / INDEX}: metadata: {DIGESTS}: must have a digest for each file of the folder")


def _index(folder: Path) -> dict[str, Any]:
    return read_json_object(folder / INDEX, CheckpointError)


def _is_shard(file: Any) -> bool:
    return isinstance(file, str) and file == os.path.basename(file) and file.endswith(".safetensors")


def matching(name: str, patterns: Collection[str]) -> bool:
    """Whether a file's name matches one of the patterns."""
    return _expression(tuple(patterns)).match(name) is not None


@cache
def _expression(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)) or "(?!)")
