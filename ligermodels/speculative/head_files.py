"""What the files of draft heads of all kinds share: a config.json beside one file of tensors, and copies of the base
model's tensors in it."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.convert.export_spec import ExportSpec, as_json
from ligermodels.convert.files import SINGLE
from ligermodels.convert.input_files import as_path, open_file
from ligermodels.convert.ranks import Ranks
from ligermodels.convert.safetensors_writer import save_checkpoint
from ligermodels.convert.saving import written_whole
from ligermodels.convert.weight_map import LazyTensor
from ligermodels.errors import CheckpointError, InputError, short
from ligermodels.layers.initialization import allocate, persistent_tensors, skip_init
from ligermodels.layers.quantized import weight_codes
from ligermodels.layers.sharding import gathered
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.state_dict import StateDict
from ligermodels.models.untie import HEAD

CONFIG = "config.json"
ROWS = 4096
"""Rows of a tensor that are compared at a time."""


def allocated(module: Callable[[], nn.Module], dtype: torch.dtype, device: torch.device) -> Any:
    """A new module, whose parameters have no values yet, in a dtype and on a device."""
    with torch.device("meta"), skip_init():
        made = module()
    allocate(made, dtype, device)
    return made


def check_base_model(base_model: str | None, profile: str, *, names_base: bool) -> None:
    """InputError for a `base_model` that is given to the format `profile`, if that names no base model."""
    if base_model is not None and not names_base:
        raise InputError(f"base_model: profile {profile!r} does not name the base model; leave it out")


def name_of_base(base_model: str | None, spec: ExportSpec | None) -> str | None:
    """The base model's name for config.json of its heads, which may be opened from another folder: a hub id, or a
    folder as an absolute path. Default: the checkpoint in the base model's `spec`, or None."""
    if base_model is None:
        return None if spec is None else spec.base_name
    path = as_path(base_model, InputError, "base_model")
    return os.path.abspath(path) if os.path.isdir(path) else os.fspath(base_model)


def head_state(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The tensors of checkpoints of a head, detached, by native name: `prefix`, a dot, and the name in the module."""
    return {f"{prefix}.{name}": tensor.detach() for name, tensor in persistent_tensors(module).items()}


def copies(base: CausalLM, native: str = HEAD) -> Callable[[Tensor], bool]:
    """Whether a stored tensor is a tensor of the base model: equal bit for bit in its dtype and quantisation.

    Args:
        base: the base model.
        native: native name of its tensor.

    Returns:
        stored tensor -> the answer; always False for an LM head with a bias, or with another weight than its own.
    """
    if native == HEAD:
        codes, names = weight_codes(base.head), base.head.state_dict().keys()
        if codes is not None and base.head.bias is None:
            return partial(codes.is_of, dtype=base.dtype)
        if names != {"weight"}:
            return lambda stored: False
        return partial(_same_bits, weight=gathered(base.head.state_dict()["weight"]))
    return partial(_same_bits, weight=gathered(persistent_tensors(base)[native].detach()))


def _same_bits(stored: Tensor, weight: Tensor) -> bool:
    return stored.shape == weight.shape and all(
        torch.equal(_bits(rows.to(weight)), _bits(own))
        for rows, own in zip(stored.split(ROWS), weight.split(ROWS), strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def save_alone(
    base: CausalLM,
    folder: Path,
    tensors: Sequence[LazyTensor],
    config: Mapping[str, Any],
    ranks: Ranks,
    *,
    file: str = SINGLE,
    overwrite: bool = False,
) -> None:
    """Write config.json and one file of tensors, completely or not at all.

    Args:
        base: the base model of the heads.
        folder: created if need be.
        tensors: the tensors.
        config: the fields of config.json.
        ranks: ranks that all call this; one of them writes.
        file: name of the file; safetensors, or by torch.save if it ends otherwise.
        overwrite: replace a checkpoint in the folder.

    Raises:
        CheckpointError: the folder is in use or cannot be written.
        InputError: the folder holds the base model, which would be replaced.
    """
    source = None if base.export_spec is None else base.export_spec.source
    if source is not None and folder.exists() and source.folder.exists() and folder.samefile(source.folder):
        raise InputError(f"{folder}: holds the base model, which the heads alone would replace; give another folder")
    name, text = file.removesuffix(".safetensors"), as_json(dict(config))
    if name == file:
        _save_torch(folder, file, tensors, text, overwrite, ranks)
        return
    options: dict[str, Any] = {"max_shard_size": 2**63 - 1, "overwrite": overwrite, "ranks": ranks}
    save_checkpoint(folder, tensors, name=name, files={CONFIG: text}, **options)


def _save_torch(
    folder: Path, file: str, tensors: Sequence[LazyTensor], config: str, overwrite: bool, ranks: Ranks
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
            (temporary / CONFIG).write_text(config, encoding="utf-8")
            try:
                torch.save(state, temporary / file)
            except RuntimeError as error:  # raised by torch's writer for a full disk
                raise OSError(_line(error)) from error


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


def _line(error: Exception) -> str:
    text = re.sub(r"\x1b\[\d*m", "", str(error))  # torch's messages have terminal codes for bold type
    return (text.splitlines() or [type(error).__name__])[0]
