"""Checkpoints of a run: written beside the training, whole or not at all, and the newest kept."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from ligermodels.errors import CheckpointError

NAME = re.compile(r"step-(\d+)")
RUN = "run.json"
"""What is no tensor, in a checkpoint's folder."""
FORMAT = 1


class Checkpoints:
    """The checkpoints in `folder`, each a folder of torch.distributed.checkpoint and run.json; the newest `keep` stay.

    A checkpoint is written under another name, forced to the disk and then renamed: one that has its name is whole,
    whenever the process, or the machine, has stopped.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        self._folder, self._keep = Path(folder), keep
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    def steps(self) -> list[int]:
        """Steps of which there is a checkpoint, rising."""
        if not self._folder.is_dir():
            return []
        names = [NAME.fullmatch(path.name) for path in self._folder.iterdir()]
        return sorted(int(name[1]) for name in names if name)

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, run: Mapping[str, Any]) -> None:
        """Copy the trained parameters, the optimiser's state and the random generators' now, and write them meanwhile.

        Waits for the one before, and raises CheckpointError when that could not be written. `run` is for JSON.
        """
        self.wait()
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in _tensors(model, optimizer)}
        tensors |= _generators()
        about = {**run, "format": FORMAT, "step": step, "parameter_groups": _settings(optimizer)}
        self._pending = self._writer.submit(self._write, step, tensors, json.dumps(about, indent=1))

    def wait(self) -> None:
        """Until the last checkpoint is on the disk. Raises CheckpointError when it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except (OSError, CheckpointException) as error:
                raise CheckpointError(f"{self._folder}: the checkpoint cannot be written: {_reason(error)}") from error

    def _write(self, step: int, tensors: dict[str, Any], about: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._clear()
        temporary = self._folder / f".{secrets.token_hex(4)}.partial"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # That there is one process only.
                dcp.save(tensors, storage_writer=dcp.FileSystemWriter(temporary, sync_files=True))
            (temporary / RUN).write_text(about + "\n", encoding="utf-8")
            _sync(temporary / RUN)
            _sync(temporary)
            target = self._folder / f"step-{step}"
            self._remove(target)
            temporary.rename(target)
            _sync(self._folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for old in self.steps()[: -self._keep]:
            self._remove(self._folder / f"step-{old}")

    def _remove(self, target: Path) -> None:
        """First its name, by which it counts as whole, then the rest."""
        if target.exists():
            doomed = self._folder / f".{secrets.token_hex(4)}.partial"
            target.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _clear(self) -> None:
        """Remove what earlier processes left half-done."""
        for path in self._folder.glob(".*.partial"):
            shutil.rmtree(path, ignore_errors=True)

    def about(self, step: int) -> dict[str, Any]:
        """What `save` was given as `run`, with "step". Raises CheckpointError when the checkpoint cannot be read."""
        path = self._folder / f"step-{step}" / RUN
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: cannot be read: {error}; remove {path.parent} to go on from another"
            ) from None
        if found.get("format") != FORMAT:
            raise CheckpointError(f"{path}: is of format {found.get('format')}, this version reads {FORMAT}")
        return found

    def load(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Set parameters, the optimiser's state and the random generators to those of a checkpoint.

        Raises CheckpointError when it cannot be read or is of another model or optimiser.
        """
        path, about = self._folder / f"step-{step}", self.about(step)
        try:
            stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
            tensors = {
                name: torch.empty(it.size, dtype=it.properties.dtype)
                for name, it in stored.items()
                if isinstance(it, TensorStorageMetadata)
            }
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.load(tensors, checkpoint_id=path)
        except (Exception, CheckpointException) as error:  # The library raises many kinds.
            reason = f"cannot be read: {_reason(error)}; remove it to go on from another"
            raise CheckpointError(f"{path}: {reason}") from error
        parameters = {f"model.{name}": p for name, p in _trained(model)}
        found = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
        if {name: (t.shape, t.dtype) for name, t in found.items()} != {
            name: (p.shape, p.dtype) for name, p in parameters.items()
        }:
            wrong = sorted(found.keys() ^ parameters.keys()) or sorted(found)
            raise CheckpointError(f"{path}: is of another model: {', '.join(wrong[:5])} do not fit")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(found[name])
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, index, key = name.split(".", 2)
                state.setdefault(int(index), {})[key] = tensor
        try:
            optimizer.load_state_dict({"state": state, "param_groups": about["parameter_groups"]})
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{path}: is of another optimiser: {error}") from None
        _set_generators(tensors)


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def _tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"model.{name}", p) for name, p in _trained(model))
    for index, state in optimizer.state_dict()["state"].items():
        yield from ((f"optimizer.{index}.{key}", torch.as_tensor(value)) for key, value in state.items())


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    return groups


def _generators() -> dict[str, Tensor]:
    found = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found |= {f"random.cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return found


def _set_generators(tensors: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(tensors["random.cpu"])
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            if f"random.cuda.{i}" in tensors:
                torch.cuda.set_rng_state(tensors[f"random.cuda.{i}"], i)


def _reason(error: BaseException) -> str:
    """What went wrong, without the traceback that the library makes part of its message."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(error) or type(error).__name__


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
