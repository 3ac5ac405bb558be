"""Files of Medusa heads: written and checked in any of the formats, and read in the format that is recognised."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from ligermodels.convert.weight_map import LISTED, LazyTensor, WeightMap, raise_faults
from ligermodels.errors import CheckpointError, short
from ligermodels.models.state_dict import StateDict
from ligermodels.speculative.profiles import PROFILES, HeadsShape, Profile

CONFIG = "config.json"
SUPERFLUOUS = "medusa_heads."
"""Prefix that some conversions leave in names; it is removed, as in vLLM."""
ONE_FILE = 2**63 - 1
"""Maximum shard size for formats with a single file."""


class TorchFile(StateDict):
    """Reader of a file that torch.save has written. It loads tensors only (weights_only), so that no code can run.

    Args:
        path: the file.

    Raises:
        CheckpointError: the file holds other objects than tensors, is damaged, or is not a dict of tensors.
    """

    def __init__(self, path: Path) -> None:
        with open_file(path, CheckpointError):
            pass  # an error for a FIFO, from which torch.load would wait forever
        try:
            # torch can map zip files into memory: tensors are then read when they are used.
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except pickle.UnpicklingError as error:
            problem = "holds more than tensors, or is damaged, and is not loaded"
            raise CheckpointError(f"{path}: {problem}: {_line(error)}") from None
        except Exception as error:  # torch's unpickler raises errors of any class for a damaged file
            raise CheckpointError(f"{path}: cannot be read: {_line(error)}; fetch it again") from error
        if not isinstance(tensors, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
        ):
            raise CheckpointError(f"{path}: is not a dict of tensors by name, as a module's state_dict is")
        for name, tensor in tensors.items():
            if (form := _unreadable(tensor)) is not None:
                raise CheckpointError(f"{path}: {short(name)} is a {form} tensor, not a dense tensor with values")
        super().__init__(tensors)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes of a tensor.

        Args:
            name: name of the tensor.
            start: offset of the first byte.
            buffer: its length is the number of bytes.
        """
        stored = self.headers[name].contiguous().view(-1).view(torch.uint8)[start : start + len(buffer)]
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(stored)


def _unreadable(tensor: Tensor) -> str | None:
    """Name of the storage form of a tensor that cannot be read as plain bytes; None if it can be read."""
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
    """Write heads, completely or not at all, and check the written files against the format.

    Args:
        folder: created if need be.
        profile: the format.
        shape: numbers and sizes of the heads.
        state: native name -> tensor; for a format with the base model in it, the base model's tensors too.
        base_model: the base model's hub id or folder, for formats with it in config.json.
        base: the export of the base model, for a format with the base model in it.
        max_shard_size: largest size of a safetensors file, for a format with the base model in it.
        overwrite: replace a checkpoint or heads in `folder`.

    Raises:
        CheckpointError: the folder is in use or cannot be written, or the written files do not match the format.
        InputError: the format needs `base_model`.
    """
    weights, config = profile.weight_map(shape), profile.filled(shape, base_model)
    whole = None
    if base is not None:
        whole = base.with_heads(
            weights, lambda fields: {**fields, **config}, config, lambda name: name.startswith(profile.prefix)
        )
        weights = whole.whole_map
    tensors, ranks = weights.export(state), Ranks(state.values())
    others = whole.source.extra if whole is not None and whole.source is not None else ()
    planned = {tensor.name: tensor.shape for tensor in tensors}

    def check(written: Path) -> None:
        with _opened(written, profile.file) as reader:
            sizes = {name: tuple(header.shape) for name, header in reader.headers.items() if name not in others}
        if faults := profile.faults(shape, sizes, read_json(written / CONFIG), base_model, planned):
            raise CheckpointError(f"{folder}: not written: it would not be in the {profile.name} format: {faults[0]}")

    if whole is not None:
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
        # torch.save writes the whole storage of a tensor, so that a view of a larger storage is copied.
        is_whole = {name: x.untyped_storage().nbytes() == x.nbytes for name, x in fetched.items()}
        state = {name: x if is_whole[name] else x.clone() for name, x in fetched.items()}
        # A tensor under several names is written once.
        needed = sum({tensor.data_ptr(): tensor.nbytes for tensor in state.values()}.values())
        with written_whole(folder, needed, overwrite=overwrite) as temporary:
            (temporary / CONFIG).write_text(as_json(config), encoding="utf-8")
            try:
                torch.save(state, temporary / file)
            except RuntimeError as error:  # raised by torch's writer for a full disk
                raise OSError(_line(error)) from error
            check(temporary)


# -- reading -----------------------------------------------------------------------------------------------------------


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


def _line(error: Exception) -> str:
    text = re.sub(r"\x1b\[\d*m", "", str(error))  # torch's messages have terminal codes for bold type
    return (text.splitlines() or [type(error).__name__])[0]
