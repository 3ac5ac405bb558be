"""Files of Medusa heads, read in the format that is recognised."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ligermodels.convert.config_json import read_json
from ligermodels.convert.files import INDEX, SINGLE
from ligermodels.convert.input_files import is_present, shown
from ligermodels.convert.loading import FileReader
from ligermodels.convert.reading import reading
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.weight_map import LISTED, WeightMap, raise_faults
from ligermodels.errors import CheckpointError
from ligermodels.speculative.head_files import CONFIG, TorchFile
from ligermodels.speculative.profiles import PROFILES, HeadsShape, Profile

SUPERFLUOUS = "medusa_heads."
"""Prefix that some conversions leave in names; it is removed, as in vLLM."""


class Heads(NamedTuple):
    """Heads in a folder.

    profile: their format.
    num_heads: number of heads.
    num_layers: ResBlocks in each head.
    biases: whether the ResBlocks have biases.
    reader: the tensors.
    """

    profile: Profile
    num_heads: int
    num_layers: int
    biases: bool
    reader: FileReader

    def weight_map(self, shape: HeadsShape, *, lm_heads: bool = True) -> WeightMap:
        """Mapping from native names to names in the file; without `lm_heads`, stored lm_heads are ignored."""
        return self.profile.weight_map(shape, biases=self.biases, lm_heads=lm_heads)


class NoHeadsError(CheckpointError):
    """A folder holds no Medusa heads in any format."""


@contextmanager
def open_heads(folder: Path) -> Iterator[Heads]:
    """Open the heads in a folder, in any of the formats.

    The format is recognised by the names of the tensors, and by config.json if two formats have the same names. The
    numbers of heads and ResBlocks come from the tensors, since published configs are often wrong.

    Raises CheckpointError if there are no heads in a known format, or files are damaged.
    """
    with reading(folder, partial(_recognise, folder)) as heads:
        yield heads


def _recognise(folder: Path, opened: ExitStack) -> Heads:
    if not os.path.isdir(folder):
        raise CheckpointError(f"{shown(folder)}: no such folder")
    config = read_json(folder / CONFIG) if is_present(folder / CONFIG, CheckpointError) else {}
    for file in dict.fromkeys(profile.file for profile in PROFILES.values()):
        files = (file, INDEX) if file == SINGLE else (file,)
        if not any(is_present(folder / name, CheckpointError) for name in files):
            continue
        reader = opened.enter_context(_opened(folder, file))
        names = list(reader.headers)
        counts = {
            name: count
            for name, profile in PROFILES.items()
            if profile.file == file and (count := profile.count(names)) is not None
        }
        if not counts:
            continue
        if "token_map" in names:
            raise CheckpointError(
                f"{folder}: the heads have a truncated vocabulary (token_map), which is not implemented; "
                "give heads with logits of every token"
            )
        gaps = {name: PROFILES[name].missing(count, reader.headers) for name, count in counts.items()}
        if all(gaps.values()):  # before tensors of that many heads are made
            first = next(iter(gaps.values()))
            raise_faults(str(folder), {f"{'or more ' * (len(first) == LISTED)}missing from the checkpoint": first})
        nearest = min(counts, key=lambda name: PROFILES[name].distance(counts[name], names, config))
        profile = PROFILES[nearest]
        return Heads(profile, *counts[nearest], profile.has_biases(names), reader)
    examples = dict.fromkeys(repr(p.linear.format(head=0, layer=0, part="weight")) for p in PROFILES.values())
    raise NoHeadsError(f"{folder}: no Medusa heads: no tensor is named like one of {', '.join(examples)}")


@contextmanager
def _opened(folder: Path, file: str) -> Iterator[FileReader]:
    """Open a file of tensors, or its shards, with SUPERFLUOUS removed from the names."""
    with ExitStack() as opened:
        pickled = file.endswith(".pt")
        reader = TorchFile(folder / file) if pickled else opened.enter_context(Checkpoint(folder, single=file))
        stored = {name.replace(SUPERFLUOUS, ""): name for name in reader.headers}
        if twice := set(reader.headers) - set(stored.values()):
            raise CheckpointError(
                f"tensors are stored both with {SUPERFLUOUS!r} and without: {', '.join(sorted(twice))}"
            )
        reader.headers = {name: reader.headers[old] for name, old in stored.items()}  # type: ignore[assignment]
        yield reader
