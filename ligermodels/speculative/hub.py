"""Fetching heads from the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from ligermodels.convert import hub
from ligermodels.convert.config_json import read_json
from ligermodels.convert.files import INDEX
from ligermodels.convert.patience import patient
from ligermodels.errors import HubError
from ligermodels.speculative.profiles import PROFILES

FILES = [*dict.fromkeys(profile.file for profile in PROFILES.values())]
"""Names of files that hold heads."""


def config_of_heads(heads: str | os.PathLike[str]) -> dict[str, Any]:
    """config.json in a folder or hub repository of heads; empty if there is none. No weights are fetched."""
    path = hub.resolve(heads, weights=False) / "config.json"
    return read_json(path) if path.is_file() else {}


def heads_folder(name_or_path: str | os.PathLike[str]) -> Path:
    """The local folder of Medusa heads; a hub repository is fetched into huggingface_hub's cache.

    Only config.json and the files that may hold heads are fetched, if they are not in the cache. Among them is a .pt
    file, since most heads are published in this form; it is read with `weights_only`.

    Args:
        name_or_path: a local folder, or a hub id.

    Returns:
        The folder.

    Raises:
        CheckpointError: the local folder does not exist.
        HubError: the files cannot be fetched, or the repository has no heads.
    """
    folder, name = hub.resolve(name_or_path, weights=False), os.fspath(name_or_path)
    if folder == Path(name).expanduser():
        return folder
    commit = folder.name
    try:
        with patient(name):
            snapshot_download(name, revision=commit, allow_patterns=[*FILES, INDEX])
    except Exception as error:  # huggingface_hub and its HTTP libraries raise errors of many classes
        if not any((folder / file).exists() for file in (*FILES, INDEX)):
            reason = " ".join(str(error).split())[:300]
            raise HubError(f"{name}: the heads cannot be fetched, run again to retry: {reason}") from error
    if any((folder / file).is_file() for file in FILES):
        return folder
    if (folder / INDEX).is_file():  # a model's checkpoint in shards
        return hub.resolve(name, revision=commit)
    raise HubError(f"{name}: has no Medusa heads, in the repository or the cache: none of {', '.join((*FILES, INDEX))}")
