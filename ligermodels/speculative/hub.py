"""Medusa heads on the Hugging Face hub: from a repository's name to a local folder."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import snapshot_download

from ligermodels.convert import hub
from ligermodels.convert.files import INDEX
from ligermodels.convert.patience import patient
from ligermodels.errors import HubError
from ligermodels.speculative.profiles import PROFILES

FILES = [*dict.fromkeys(profile.file for profile in PROFILES.values())]
"""Names of files that hold heads."""


def heads_folder(name_or_path: str | os.PathLike[str]) -> Path:
    """The folder of Medusa heads: a local one as it is, or a snapshot of a hub repository in huggingface_hub's cache.

    Of a repository its config and the files that may hold heads are fetched, a .pt too, for that is how most heads are
    published; nothing but tensors is read of it later. What the cache has is not fetched again.

    Raises CheckpointError and HubError as `hub.resolve`, and HubError for a repository without heads.
    """
    folder, name = hub.resolve(name_or_path, weights=False), os.fspath(name_or_path)
    if folder == Path(name).expanduser():
        return folder
    commit = folder.name
    try:
        with patient(name):
            snapshot_download(name, revision=commit, allow_patterns=[*FILES, INDEX])
    except Exception as error:  # Of many classes: those of the library and those of its transports.
        if not any((folder / file).exists() for file in (*FILES, INDEX)):
            why = " ".join(str(error).split())[:300]
            raise HubError(f"{name}: its heads cannot be fetched, run again to retry: {why}") from error
    if any((folder / file).is_file() for file in FILES):
        return folder
    if (folder / INDEX).is_file():  # A whole checkpoint in shards.
        return hub.resolve(name, revision=commit)
    raise HubError(f"{name}: no Medusa heads in the repository, nor in the cache: none of {', '.join((*FILES, INDEX))}")
