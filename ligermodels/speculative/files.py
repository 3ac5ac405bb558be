"""Medusa heads in files: written whole and checked in any of the formats, and found again whatever their format."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.convert.config_json import read_json
from ligermodels.convert.export_spec import ExportSpec, as_json
from ligermodels.convert.files import INDEX, SINGLE
from ligermodels.convert.input_files import is_present, open_file, shown
from ligermodels.convert.loading import FileReader
from ligermodels.convert.ranks import Ranks
from ligermodels.convert.reading import reading
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.safetensors_writer import save_checkpoint
from ligermodels.convert.saving import written_whole
from ligermodels.convert.weight_map import LazyTensor, WeightMap
from ligermodels.errors import CheckpointError, short
from ligermodels.models.state_dict import StateDict
from ligermodels.speculative.profiles import PROFILES, HeadsShape, Profile

CONFIG = "config.json"
SUPERFLUOUS = "medusa_heads."
"""A part of names that some conversions leave in; as in vLLM it is removed."""
ONE_FILE = 2**63 - 1
"""Loaders of heads look for one file."""


class TorchFile(StateDict):
    """The tensors of a file that torch.save has written, as a reader of checkpoints.

    Nothing but tensors is read of it (weights_only), so that it cannot run code. Raises CheckpointError for a file that
    holds anything else, is damaged, or is no dict of tensors.
    """

    def __init__(self, path: Path) -> None:
        with open_file(path, CheckpointError):
            pass  # torch would wait for a FIFO.
        try:
            # Mapped where its kind of file can be: tensors are then read as they are used.
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except pickle.UnpicklingError as error:
            what = "holds more than tensors, or is damaged, and is not loaded"
            raise CheckpointError(f"{path}: {what}: {_line(error)}") from None
        except Exception as error:  # Of a damaged pickle torch's unpickler raises anything.
            raise CheckpointError(f"{path}: cannot be read: {_line(error)}; fetch it again") from error
        if not isinstance(found, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in found.items()
        ):
            raise CheckpointError(f"{path}: is not a dict of tensors by name, as a module's state_dict is")
        for name, tensor in found.items():
            if (kind := _unreadable(tensor)) is not None:
                raise CheckpointError(f"{path}: {short(name)} is a {kind} tensor, not a plain one with values")
        super().__init__(found)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of tensor `name` from its byte `start` on."""
        stored = self.headers[name].contiguous().view(-1).view(torch.uint8)[start : start + len(buffer)]
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(stored)


def _unreadable(tensor: Tensor) -> str | None:
    """What keeps a tensor from being read as plain bytes, if anything."""
    if tensor.layout is not torch.strided:
        return "sparse"
    if tensor.is_quantized:
        return "quantized"
    return "meta" if tensor.is_meta else None


# -- writing -----------------------------------------------------------------------------------------------------------


def save_heads(
    folder: Path,
    profile: Profile,
    shape: HeadsShape,
    state: Mapping[str, Tensor],
    *,
    base_model: str | None = None,
    base: ExportSpec | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
) -> None:
    """Write heads, whole or not at all, and read back whether all is as the format's loader needs it.

    Args:
        folder: created if need be.
        state: native name -> tensor; of a whole checkpoint, the base model's too.
        base_model: the base model's name, for formats whose config has it.
        base: how the base model is written, for a format that holds it.
        max_shard_size: of such a format; others are one file.
        overwrite: replace a checkpoint or heads in `folder`.

    Raises:
        CheckpointError: the folder is in use or cannot be written, or what was written is not right.
        InputError: the format needs the base model's name.
    """
    weights, config = profile.weight_map(shape), profile.filled(shape, base_model)
    if base is not None:
        weights = replace(base.weight_map, mappings=[*base.weight_map.mappings, *weights.mappings])
    tensors, ranks = weights.export(state), Ranks(state.values())
    planned = {tensor.name: tensor.shape for tensor in tensors}

    def check(written: Path) -> None:
        with _opened(written, profile.file) as reader:
            sizes = {name: tuple(header.shape) for name, header in reader.headers.items()}
        if faults := profile.faults(shape, sizes, read_json(written / CONFIG), base_model, planned):
            raise CheckpointError(f"{folder}: not written: it would not be in the {profile.name} format: {faults[0]}")

    if base is not None:
        whole = replace(base, hf_config={**base.hf_config, **config}, weight_map=weights)
        whole.save(folder, state, max_shard_size=max_shard_size, overwrite=overwrite, check=check)
    elif profile.file.endswith(".safetensors"):
        save_checkpoint(
            folder,
            tensors,
            name=profile.file.removesuffix(".safetensors"),
            max_shard_size=ONE_FILE,
            files={CONFIG: as_json(config)},
            overwrite=overwrite,
            check=check,
            ranks=ranks,
        )
    else:
        _save_torch(folder, profile.file, tensors, config, overwrite, check, ranks)


def _save_torch(
    folder: Path,
    file: str,
    tensors: Sequence[LazyTensor],
    config: Mapping[str, Any],
    overwrite: bool,
    check: Callable[[Path], None],
    ranks: Ranks,
) -> None:
    with ranks.step(str(folder)):
        fetched = ranks.fetch({tensor.name: tensor.read for tensor in tensors})
        if not ranks.writes:
            return
        # All of a tensor's memory would be written: each is to be alone in it.
        alone = {name: x.untyped_storage().nbytes() == x.nbytes for name, x in fetched.items()}
        found = {name: x if alone[name] else x.clone() for name, x in fetched.items()}
        # A tensor under several names is written once.
        needed = sum({tensor.data_ptr(): tensor.nbytes for tensor in found.values()}.values())
        with written_whole(folder, needed, overwrite=overwrite) as temporary:
            (temporary / CONFIG).write_text(as_json(config), encoding="utf-8")
            try:
                torch.save(found, temporary / file)
            except RuntimeError as error:  # torch's own writer, of a full disk.
                raise OSError(_line(error)) from error
            check(temporary)


# -- reading -----------------------------------------------------------------------------------------------------------


class Heads(NamedTuple):
    """Heads found in a folder: their format, how many there are, how deep they are, and whether they have biases."""

    profile: Profile
    num_heads: int
    num_layers: int
    biases: bool
    reader: FileReader

    def weight_map(self, shape: HeadsShape, *, lm_heads: bool = True) -> WeightMap:
        """Native names to those in the file; without `lm_heads`, those are passed over."""
        return self.profile.weight_map(shape, biases=self.biases, lm_heads=lm_heads)


class NoHeadsError(CheckpointError):
    """A folder holds no Medusa heads in any format."""


@contextmanager
def open_heads(folder: Path) -> Iterator[Heads]:
    """Heads in `folder`, in whichever of the formats: recognised by its tensors, and by config.json where those are
    the same in two formats. Numbers come from the tensors: configs in the wild are wrong about them.

    Raises CheckpointError when there are no heads, in no format known, or files are damaged.
    """
    with reading(folder, partial(_found, folder)) as found:
        yield found


def _found(folder: Path, opened: ExitStack) -> Heads:
    if not os.path.isdir(folder):
        raise CheckpointError(f"{shown(folder)}: no such folder")
    config = read_json(folder / CONFIG) if is_present(folder / CONFIG, CheckpointError) else {}
    for file in dict.fromkeys(profile.file for profile in PROFILES.values()):
        there = (is_present(folder / each, CheckpointError) for each in ((file, INDEX) if file == SINGLE else (file,)))
        if not any(there):
            continue
        reader = opened.enter_context(_opened(folder, file))
        names = list(reader.headers)
        found = {
            name: counts
            for name, profile in PROFILES.items()
            if profile.file == file and (counts := profile.count(names)) is not None
        }
        if not found:
            continue
        if "token_map" in names:
            raise CheckpointError(
                f"{folder}: its heads have a truncated vocabulary (token_map), which is not implemented; "
                "heads here need logits of every token"
            )
        nearest = min(found, key=lambda name: PROFILES[name].distance(found[name], names, config))
        profile = PROFILES[nearest]
        return Heads(profile, *found[nearest], profile.has_biases(names), reader)
    examples = dict.fromkeys(repr(p.linear.format(head=0, layer=0, part="weight")) for p in PROFILES.values())
    raise NoHeadsError(f"{folder}: no Medusa heads: no tensor is named like one of {', '.join(examples)}")


@contextmanager
def _opened(folder: Path, file: str) -> Iterator[FileReader]:
    """The tensors of the file, or shards, without SUPERFLUOUS in their names."""
    with ExitStack() as opened:
        pickled = file.endswith(".pt")
        reader = TorchFile(folder / file) if pickled else opened.enter_context(Checkpoint(folder, single=file))
        stored = {name.replace(SUPERFLUOUS, ""): name for name in reader.headers}
        if twice := set(reader.headers) - set(stored.values()):
            raise CheckpointError(
                f"tensors that are there with {SUPERFLUOUS!r} and without: {', '.join(sorted(twice))}"
            )
        reader.headers = {name: reader.headers[old] for name, old in stored.items()}  # type: ignore[assignment]
        yield reader


def _line(error: Exception) -> str:
    text = re.sub(r"\x1b\[\d*m", "", str(error))  # torch writes in bold type
    return (text.splitlines() or [type(error).__name__])[0]
