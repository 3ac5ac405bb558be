"""From the name of a checkpoint to a local folder, fetching from the Hugging Face hub only what is needed."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ligermodels.convert.files import ADAPTER, ADAPTER_CONFIG, COMPANIONS, INDEX, PROCESSORS, SINGLE, read_index
from ligermodels.convert.input_files import as_path, shown
from ligermodels.convert.journal import settle
from ligermodels.convert.patience import patient
from ligermodels.errors import CheckpointError, HubError

# The first class that an error is of tells what to say; some are subclasses of later ones.
REASONS: tuple[tuple[type[Exception], str], ...] = (
    (GatedRepoError, "is gated: accept its terms at {url}, then pass a token or run `hf auth login`"),
    (RepositoryNotFoundError, "no such local folder, nor such a repository on the hub; a private one needs a token"),
    (RevisionNotFoundError, "has no revision {revision!r}"),
    (DisabledRepoError, "is disabled on the hub"),
    (HFValidationError, "neither a local folder nor a repo id, which is owner/name"),
    (
        OfflineModeIsEnabled,
        "neither a local folder nor in the cache, and the hub is not used (local_files_only or HF_HUB_OFFLINE)",
    ),
    (LocalEntryNotFoundError, "neither a local folder nor in the cache, and {endpoint} cannot be reached: {cause}"),
    (EntryNotFoundError, "lacks a file: {error}"),
    (Exception, "{action} failed, run again to retry: {kind}: {error}"),
)


def resolve(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    weights: bool = True,
) -> Path:
    """The folder of a checkpoint: a local one as it is, or a snapshot of a hub repository in huggingface_hub's cache.

    Fetches config, tokenizer, chat template and the safetensors that transformers would load, if the cache lacks them.

    Args:
        name_or_path: a local folder, or else a hub repo id such as "meta-llama/Llama-3.1-8B".
        revision: branch, tag or commit; "main" by default.
        token: of the hub; by default the one that `hf auth login` or HF_TOKEN set.
        cache_dir: by default huggingface_hub's, which HF_HOME moves.
        local_files_only: look only into the cache, as with HF_HUB_OFFLINE=1.
        weights: False leaves the weights out.

    Raises:
        CheckpointError: a local folder that does not exist, or a repository's index that is none.
        HubError: the repository, revision or files do not exist, are not open to this user, or cannot be fetched; or
            the hub stalls (see `patience`).
    """
    if (folder := _local_folder(name_or_path)) is not None:
        return folder
    name = os.fspath(name_or_path)
    options: dict[str, Any] = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
    with explained(name, revision, local_files_only=local_files_only):
        return _fetch(name, revision, weights, options)


def resolve_adapter(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Path:
    """The folder of an adapter in PEFT's format; arguments and errors as of `resolve`. A repository's config and
    safetensors are fetched, and nothing else."""
    if (folder := _local_folder(name_or_path)) is not None:
        return folder
    name = os.fspath(name_or_path)
    options: dict[str, Any] = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
    with explained(name, revision, local_files_only=local_files_only):
        folder = Path(hf_hub_download(name, ADAPTER_CONFIG, revision=revision, **options)).parent
        hf_hub_download(name, ADAPTER, revision=folder.name, **options)
    return folder


def _local_folder(name_or_path: str | os.PathLike[str]) -> Path | None:
    """The local folder of this name, None where it can only be a repo id; CheckpointError where it is neither."""
    path = as_path(name_or_path, CheckpointError, "the name of the checkpoint")
    name = os.fspath(name_or_path)
    if os.path.isdir(path):
        settle(path)
        return path
    there = os.path.lexists(path)
    if isinstance(name_or_path, os.PathLike) or name.startswith((".", "/", "~")) or there:
        raise CheckpointError(f"{shown(name)}: {'is not a' if there else 'no such'} folder")
    return None


@contextmanager
def explained(
    name: str, revision: str | None, *, local_files_only: bool = False, action: str = "download"
) -> Iterator[None]:
    """Turn what huggingface_hub raises about the repository `name` into a HubError that says what to do."""
    try:
        with patient(shown(name)) if action == "download" else nullcontext():
            yield
    except (CheckpointError, HubError):
        raise
    # The library lets errors of its transports (httpx, Xet) through, which have no base class in common.
    except Exception as error:
        raise HubError(f"{shown(name)}: {_reason(name, revision, error, local_files_only, action)}") from error


def _fetch(name: str, revision: str | None, weights: bool, options: dict[str, Any]) -> Path:
    folder = snapshot(name, revision, (*COMPANIONS, *PROCESSORS), options)
    commit = folder.name  # From here on, so that files of two commits never mix.
    _require(name, commit, "config.json", options)
    if weights:
        snapshot(name, commit, (SINGLE, INDEX), options)
        # As in transformers: a single file wins over an index.
        sharded = not (folder / SINGLE).is_file() and (folder / INDEX).is_file()
        files = sorted(set(read_index(folder).values())) if sharded else [SINGLE]
        if sharded:
            snapshot(name, commit, files, options)
        for file in files:
            _require(name, commit, file, options)
    return folder


def snapshot(name: str, revision: str | None, files: Iterable[str], options: dict[str, Any]) -> Path:
    """Fetch those of `files` that the repository has; without a hub, find the snapshot that the cache has."""
    try:
        patterns = [glob.escape(file) for file in files]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, **options))
    except LocalEntryNotFoundError:
        # A snapshot without optional files counts as incomplete; it may do all the same.
        found = try_to_load_from_cache(name, "config.json", cache_dir=options.get("cache_dir"), revision=revision)
        if not isinstance(found, str):
            raise
        return Path(found).parent


def _require(name: str, commit: str, file: str, options: dict[str, Any]) -> None:
    """Make sure of a file that a snapshot should hold by now: if it does not, this finds out why."""
    try:
        hf_hub_download(name, file, revision=commit, **options)
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError as error:
        other = f" and no {INDEX}: it has no safetensors weights" if file == SINGLE else ""
        raise HubError(f"{name}: the repository has no {file}{other}") from error


def _reason(name: str, revision: str | None, error: Exception, local_files_only: bool, action: str) -> str:
    offline = local_files_only or constants.HF_HUB_OFFLINE
    kind = OfflineModeIsEnabled if offline and isinstance(error, LocalEntryNotFoundError) else type(error)
    return next(text for each, text in REASONS if issubclass(kind, each)).format(
        action=action,
        url=f"{constants.ENDPOINT}/{name}",
        endpoint=constants.ENDPOINT,
        revision=revision or constants.DEFAULT_REVISION,
        kind=type(error).__name__,
        error=_line(error),
        cause=_line(error.__cause__ or error),
    )


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
