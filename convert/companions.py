"""Files beside the weights of a checkpoint: generation_config.json, the tokenizer's and the processors' files."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ligermodels.convert.files import CHAT_TEMPLATES, PROCESSORS, TOKENIZER
from ligermodels.convert.input_files import is_present, read_json_object
from ligermodels.errors import CheckpointError, ConfigError


class Companions(NamedTuple):
    """Files beside the weights of a checkpoint.

    Args:
        generation_config: content of generation_config.json, or None without one.
        tokenizer: name -> path of the tokenizer's files.
        processors: name -> path of files for images, video and sound.
    """

    generation_config: dict[str, Any] | None = None
    tokenizer: Mapping[str, Path] = {}
    processors: Mapping[str, Path] = {}

    @classmethod
    def of(cls, folder: Path) -> Companions:
        """The companions in `folder`; ConfigError if its generation_config.json holds no JSON object."""
        generation = folder / "generation_config.json"
        config = read_json_object(generation, ConfigError) if is_present(generation, CheckpointError) else None
        return cls(config, tokenizer_files(folder), _present(folder, PROCESSORS))


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """Name -> path of the files of the tokenizer in `folder`, chat templates included."""
    return _present(folder, (*TOKENIZER, *chat_templates(folder)))


def chat_templates(folder: Path) -> list[str]:
    """Names of the files of named chat templates in `folder`: "additional_chat_templates/tool_use.jinja" ..."""
    templates = folder / CHAT_TEMPLATES
    # Unlike `glob`, `isdir` raises nothing for names that are too long.
    found = templates.glob("*.jinja") if os.path.isdir(templates) else ()
    return sorted(f"{CHAT_TEMPLATES}/{path.name}" for path in found)


def _present(folder: Path, names: Collection[str]) -> dict[str, Path]:
    return {name: folder / name for name in names if is_present(folder / name, CheckpointError)}
