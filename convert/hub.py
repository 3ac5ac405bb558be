"""Find the local folder of a checkpoint, and download only the needed files from the Hugging Face hub."""

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

from ligermodels.convert.files import (
    ADAPTER,
    ADAPTER_CONFIG,
    CODE_CONFIGS,
    COMPANIONS,
    HOLDS_ADAPTER,
    INDEX,
    NAMED_TEMPLATES,
    PROCESSORS,
    SINGLE,
    code_of,
    read_index,
)
from ligermodels.convert.input_files import as_path, shown
from ligermodels.convert.journal import settle
from ligermodels.convert.patience import patient
from ligermodels.errors import CheckpointError, HubError

# The first class that matches an error decides; some classes are subclasses of later ones.
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
    """The folder of a checkpoint: a local folder, or a snapshot of a hub repository in huggingface_hub's cache.

    If the cache lacks them, config, tokenizer, chat template and the safetensors that transformers would load are
    downloaded. Pickles are never downloaded.

    Args:
        name_or_path: local folder, or hub repo id such as "meta-llama/Llama-3.1-8B".
        revision: branch, tag or commit; "main" by default.
        token: hub token. Default: the token that `hf auth login` or HF_TOKEN set.
        cache_dir: folder for downloads. Default: huggingface_hub's cache (HF_HOME sets its place).
        local_files_only: use only the cache, and do not connect to the hub; HF_HUB_OFFLINE=1 has the same effect.
        weights: whether to download the weights.

    Raises:
        CheckpointError: the local folder does not exist, or the repository's index is damaged.
        HubError: the repository, revision or files do not exist, are not open to this user, or cannot be downloaded; or
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
    """The folder of an adapter in PEFT's format. Only its config and safetensors are downloaded.

    Args:
        name_or_path: local folder or hub repo id.
        revision: branch, tag or commit; "main" by default.
        token: hub token. Default: the token that `hf auth login` or HF_TOKEN set.
        cache_dir: folder for downloads. Default: huggingface_hub's cache.
        local_files_only: use only the cache, and do not connect to the hub.

    Raises:
        CheckpointError: the local folder does not exist.
        HubError: the repository, revision or files do not exist, are not open to this user, or cannot be downloaded.
    """
    if (folder := _local_folder(name_or_path)) is not None:
        return folder
    name = os.fspath(name_or_path)
    options: dict[str, Any] = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
    with explained(name, revision, local_files_only=local_files_only):
        folder = snapshot(name, revision, (ADAPTER_CONFIG, ADAPTER), options)
        for file in (ADAPTER_CONFIG, ADAPTER):
            _require(name, folder.name, file, options)
    return folder


def _local_folder(name_or_path: str | os.PathLike[str]) -> Path | None:
    """The local folder, or None if the name is a repo id; CheckpointError if it can be neither."""
    path = as_path(name_or_path, CheckpointError, "the name of the checkpoint")
    name = os.fspath(name_or_path)
    if os.path.isdir(path):
        settle(path)
        return path
    exists = os.path.lexists(path)
    if isinstance(name_or_path, os.PathLike) or name.startswith((".", "/", "~")) or exists:
        raise CheckpointError(f"{shown(name)}: {'is not a' if exists else 'no such'} folder")
    return None


@contextmanager
def explained(
    name: str, revision: str | None, *, local_files_only: bool = False, action: str = "download"
) -> Iterator[None]:
    """Context manager that turns errors of huggingface_hub into a HubError that says what to do.

    Args:
        name: the repository.
        revision: the revision that is asked for.
        local_files_only: whether only the cache is used.
        action: "download" or "upload", for the message. Downloads also get a time limit: see `patience`.
    """
    try:
        with patient(shown(name)) if action == "download" else nullcontext():
            yield
    except (CheckpointError, HubError):
        raise
    # Errors of the library's transports (httpx, Xet) have no common base class.
    except Exception as error:
        raise HubError(f"{shown(name)}: {_reason(name, revision, error, local_files_only, action)}") from error


def _fetch(name: str, revision: str | None, weights: bool, options: dict[str, Any]) -> Path:
    files = (*COMPANIONS, *PROCESSORS, ADAPTER_CONFIG)  # the last for messages about an adapter
    folder = snapshot(name, revision, files, options, patterns=[NAMED_TEMPLATES])
    commit = folder.name  # used from here on, so that all files are of one commit
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        raise HubError(f"{name}: {HOLDS_ADAPTER}")
    _require(name, commit, "config.json", options)
    asked = set[str]()
    while more := set(code_of(folder, CODE_CONFIGS)) - asked:  # a module may import further ones
        snapshot(name, commit, more, options)
        asked |= more
    if weights:
        snapshot(name, commit, (SINGLE, INDEX), options)
        # As in transformers: a single file wins over an index.
        sharded = not (folder / SINGLE).is_file() and (folder / INDEX).is_file()
        weight_files = sorted(set(read_index(folder).values())) if sharded else [SINGLE]
        if sharded:
            snapshot(name, commit, weight_files, options)
        for file in weight_files:
            _require(name, commit, file, options)
    return folder


def snapshot(
    name: str, revision: str | None, files: Iterable[str], options: dict[str, Any], *, patterns: Iterable[str] = ()
) -> Path:
    """The folder of a snapshot with all `files` that exist in the repository; offline, the cached snapshot.

    Call it before `hf_hub_download`: if the hub cannot be reached, huggingface_hub tries this request once, and repeats
    a request of `hf_hub_download` for 23 seconds.

    Args:
        name: the repository.
        revision: branch, tag or commit; None for "main".
        files: names of files.
        options: further arguments of `huggingface_hub.snapshot_download`.
        patterns: patterns of the names of further files.
    """
    try:
        allowed = [*map(glob.escape, files), *patterns]
        return Path(snapshot_download(name, revision=revision, allow_patterns=allowed, **options))
    except LocalEntryNotFoundError:
        # A snapshot without optional files counts as incomplete, but may have all files that are needed.
        for file in ("config.json", ADAPTER_CONFIG):
            config = try_to_load_from_cache(name, file, cache_dir=options.get("cache_dir"), revision=revision)
            if isinstance(config, str):
                return Path(config).parent
        raise


def _require(name: str, commit: str, file: str, options: dict[str, Any]) -> None:
    """Check that a snapshot has `file`; if not, raise the error that says why."""
    try:
        hf_hub_download(name, file, revision=commit, **options)
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError as error:
        other = f" and no {INDEX}: it has no safetensors weights" if file == SINGLE else ""
        raise HubError(f"{name}: the repository has no {file}{other}") from error


def _reason(name: str, revision: str | None, error: Exception, local_files_only: bool, action: str) -> str:
    offline = local_files_only or constants.HF_HUB_OFFLINE
    error_class = OfflineModeIsEnabled if offline and isinstance(error, LocalEntryNotFoundError) else type(error)
    return next(text for known, text in REASONS if issubclass(error_class, known)).format(
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
