"""Files beside the weights of a checkpoint: generation_config.json, the tokenizer's and the processors' files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ligermodels.convert.config_json import read_json
from ligermodels.convert.files import COMPANIONS, PROCESSORS
from ligermodels.convert.input_files import is_present
from ligermodels.errors import CheckpointError


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
        files = _present(folder, COMPANIONS)
        files.pop("config.json", None)
        generation = files.pop("generation_config.json", None)
        return cls(None if generation is None else read_json(generation), files, _present(folder, PROCESSORS))


def _present(folder: Path, names: Collection[str]) -> dict[str, Path]:
    return {name: folder / name for name in names if is_present(folder / name, CheckpointError)}
