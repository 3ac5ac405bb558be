"""Files of Medusa heads: read in the format that is recognised, compared with the base model, and their tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from ligermodels.convert.config_json import read_json
from ligermodels.convert.files import INDEX, SINGLE
from ligermodels.convert.input_files import is_present, shown
from ligermodels.convert.loading import FileReader
from ligermodels.convert.reading import reading
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.weight_map import LISTED, WeightMap, raise_faults
from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.layers.initialization import persistent_tensors
from ligermodels.layers.linear_parts import check_exportable
from ligermodels.layers.sharding import reshard
from ligermodels.models.causal_lm import CausalLM
from ligermodels.speculative.head_files import CONFIG, TorchFile, copies, head_state
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


def tensors_to_export(base: CausalLM, heads: nn.ModuleList, shape: HeadsShape, profile: Profile) -> dict[str, Tensor]:
    """The tensors of an export, by native name.

    Args:
        base: the base model.
        heads: its heads, each a `MedusaHead`.
        shape: numbers and sizes of the heads.
        profile: the format.

    Returns:
        The tensors of the heads; an lm_head for each projection of the format; and the base model's tensors, if the
        format holds the base model.

    Raises:
        InputError: the format cannot hold these heads.
        ConfigError: the format holds the base model, which has no config.json or no longer matches it.
    """
    reshard(base)
    reshard(heads)
    state = head_state(heads, "heads")
    if profile.lm_heads != "each" and any(".lm_head." in name for name in state):
        raise InputError(
            f"profile {profile.name!r} has one lm_head for all heads, but each of these heads has its own; profiles "
            f"with separate lm_heads: {', '.join(p.name for p in PROFILES.values() if p.lm_heads == 'each')}"
        )
    if profile.max_layers is not None and shape.num_layers > profile.max_layers:
        raise InputError(
            f"profile {profile.name!r} takes {profile.max_layers} ResBlock per head, but these heads have "
            f"{shape.num_layers}; choose another profile"
        )
    lm_head = base.head.state_dict()
    if "bias" in lm_head:
        raise InputError(f"profile {profile.name!r} cannot hold the bias of the lm_head")
    if not any(".lm_head." in name for name in state):
        for i in range(profile.projections(shape)):
            check_exportable(base.head)
            if lm_head.keys() != {"weight"}:
                raise InputError(
                    f"profile {profile.name!r} repeats the base's lm_head, but base.head is a "
                    f"{type(base.head).__name__} of {', '.join(lm_head)}: put an LMHead in its place"
                )
            state[f"heads.{i}.lm_head.weight"] = lm_head["weight"]
    if profile.prefix:
        if base.export_spec is None:
            raise ConfigError(f"profile {profile.name!r} holds the base model too, but base has no export_spec")
        base.checked_export_spec()
        state = {**{name: tensor.detach() for name, tensor in persistent_tensors(base).items()}, **state}
    return state


def repeats_lm_head(base: CausalLM, folder: Path, stored: Heads) -> bool:
    """Whether every stored lm_head equals the base's lm_head bit for bit, in the base's dtype and quantisation.

    The lm_heads are compared one after another, a few rows at a time, until one differs.

    Args:
        base: the base model.
        folder: the folder of the heads, for messages.
        stored: the heads in the folder.

    Returns:
        The answer; True if no lm_head is stored. On the meta device, without values, False for an lm_head per head.

    Raises:
        CheckpointError: the format has a single lm_head for all heads, and the stored one is missing or differs.
    """
    if base.device.type == "meta":
        return stored.profile.lm_heads != "each"
    shape = HeadsShape(stored.num_heads, stored.num_layers, base.config.hidden_size, base.config.vocab_size)
    is_base = copies(base)
    for name in stored.profile.lm_head_names(shape):
        if name in stored.reader.headers and is_base(stored.reader.read(name)):
            continue
        if stored.profile.lm_heads == "one":
            raise CheckpointError(
                f"{folder}: no {name} that is the base model's lm_head [{shape.vocab_size}, {shape.hidden_size}]: the "
                "heads are incomplete, or were trained on another base model; give the base model of these heads"
            )
        return False
    return True
