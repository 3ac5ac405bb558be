"""Names of the files of a checkpoint."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path

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
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        # Names only: an index must not reach outside of its folder.
        if index and all(file == os.path.basename(file) and file.endswith(".safetensors") for file in index.values()):
            return dict(index)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass
    raise CheckpointError(f"{path}: is not JSON whose 'weight_map' names, for each tensor, a file of the folder")


def matching(name: str, patterns: Collection[str]) -> bool:
    """Whether a file's name matches one of the patterns."""
    return _expression(tuple(patterns)).match(name) is not None


@cache
def _expression(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)) or "(?!)")
