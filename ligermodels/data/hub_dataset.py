"""Datasets of the Hugging Face hub, by names such as hf:owner/name:train. They are read by the package `datasets`."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import HfApi

from ligermodels.convert.hub import explained
from ligermodels.data.compression import optional
from ligermodels.data.converted import cached, newest, write_parts
from ligermodels.data.json_files import arrow_lines
from ligermodels.errors import HubError, InputError

PREFIX = "hf:"
"""A name of data that starts with it is a dataset of the hub, never a file."""
FORM = "hf:owner/name[/config][:split], with [:N] after the split for its first N rows"

_NAME = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<config>[\w.,+-]+))?(?::(?P<split>[\w.+-]+)(?:\[:(?P<rows>\d+)\])?)?"
)


class HubDataset(NamedTuple):
    """A split of a dataset.

    repo: owner/name.
    config: name of the configuration; None for the only one, or the default.
    split: name of the split.
    rows: number of rows at its start; None for all.
    """

    repo: str
    config: str | None
    split: str
    rows: int | None

    @classmethod
    def named(cls, name: str) -> HubDataset:
        """The dataset with a name of the form FORM. Raises InputError for another form."""
        if (match := _NAME.fullmatch(name.removeprefix(PREFIX))) is None:
            raise InputError(f"{name}: is no name of a dataset; it must be {FORM}")
        rows = match["rows"]
        return cls(match["repo"], match["config"], match["split"] or "train", None if rows is None else int(rows))

    def lines(self, name: str, commit: str | None = None) -> Iterator[bytes]:
        """The rows as lines of JSON, streamed: only the rows that are taken are downloaded.

        Args:
            name: the dataset, for messages.
            commit: commit of the repository; None for the newest.

        Raises:
            InputError: the package datasets is not installed, cannot read the dataset (its message names the
                configurations and splits that there are), or would read a folder of the same name.
        """
        datasets = optional("datasets", name, "a dataset of the hub")
        if os.path.isdir(self.repo):
            raise InputError(
                f"{name}: the package datasets would read the folder {self.repo} here in place of the hub; give "
                f"./{self.repo} for the folder, or start in another folder for the hub"
            )
        try:
            options = {"split": self.split, "streaming": True, "revision": commit}
            rows = datasets.load_dataset(self.repo, self.config, **options)
            rows = rows if self.rows is None else rows.take(self.rows)
            # As Arrow: pictures stay bytes, JSON stays text, and features need not be known (CSV, text, JSON arrays).
            # A batch is one row, since rows of several files may differ in their types, which a table cannot.
            yield from arrow_lines(rows.with_format("arrow").iter(batch_size=1), name)
        except InputError:
            raise
        except Exception as error:  # the package has no common class of errors
            raise InputError(f"{name}: the package datasets cannot read it: {' '.join(str(error).split())}") from None


def lines_of(name: str, say: Callable[[str], object] = lambda message: None) -> Path:
    """The rows of a dataset as lines of JSON, in a file in the cache.

    The rows are downloaded once for each commit of the dataset. If the hub cannot be reached, the newest rows in the
    cache are used.

    Args:
        name: the name, of the form FORM.
        say: called with a message before the rows are downloaded, and if the hub cannot be reached.

    Raises:
        InputError: the name has another form, or the dataset cannot be read.
        HubError: there is no such dataset, or it cannot be reached and is not in the cache.
    """
    dataset = HubDataset.named(name)
    # With a digest: "hf:a/b/c" and "hf:a/b:c" are two datasets.
    file = re.sub(r"[^\w.+-]", "-", f"{name}-{hashlib.sha256(name.encode()).hexdigest()[:12]}")
    try:
        with explained(f"datasets/{dataset.repo}", None):  # its path on the hub
            commit = HfApi().dataset_info(dataset.repo, timeout=20).sha
    except HubError as error:
        if (path := newest("datasets", file)) is None:
            raise
        say(f"{name}: the rows in {path} are used: {error}")
        return path

    def write(target: Path) -> None:
        say(f"{name}: downloading it once, to {target.parent}")
        write_parts(target, dataset.lines(name, commit))

    return cached("datasets", f"{name} {commit}", file, write)
