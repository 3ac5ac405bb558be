"""Checkpoints of a run, written atomically in another thread. The newest checkpoints are kept, and the best."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from ligermodels.convert.input_files import read_json_object
from ligermodels.convert.ranks import Ranks
from ligermodels.convert.saving import written_whole
from ligermodels.convert.shards import is_dtensor, sharded_like
from ligermodels.errors import CheckpointError, CheckpointWarning
from ligermodels.layers.sharding import reshard
from ligermodels.parallel.ranks import gloo_group

NAME = re.compile(r"step-(\d+)")
RUN = "run.json"
"""JSON file of all values that are not tensors."""
MANIFEST = "manifest.json"
"""The format, and size and CRC-32 of every other file; written last."""
FORMAT = 2
MODEL = "model."
OPTIMIZER = "optimizer."
"""Prefixes of the names of parameters, and of optimizer states: "optimizer.i." for the parameter with index i."""


class Checkpoints:
    """The checkpoints in `folder`; the newest `keep` checkpoints, and those in `kept`, are not removed.

    Each checkpoint is a folder of torch.distributed.checkpoint with a run.json. A folder with its final name, step-N,
    is complete even after a crash (see `written_whole`). Checksums are verified before a checkpoint is read.

    All ranks of a process group save, load and remove together. Each rank writes and reads its own shards of tensors,
    in a folder that all ranks see; any number of ranks can load a checkpoint.
    """

    _last: ClassVar[Future[None] | None] = None
    """The last checkpoint that any instance began to write."""

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        self._folder, self._keep = Path(folder), keep
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._damaged: set[int] = set()
        self.kept: set[int] = set()
        """Steps of checkpoints that are kept beside the newest ones."""

    def path(self, step: int) -> Path:
        """The folder of the checkpoint of `step`, whether it exists or not."""
        return self._folder / f"step-{step}"

    @property
    def _ranks(self) -> Ranks:
        """All ranks, in another process group: the writing thread must not disturb training's collectives."""
        return Ranks.of_group(gloo_group("checkpoints"))

    def steps(self) -> list[int]:
        """Steps of the checkpoints, ascending."""
        if not os.path.isdir(self._folder):  # also False for a name that no folder can have
            return []
        names = [NAME.fullmatch(path.name) for path in self._folder.iterdir()]
        return sorted(int(name[1]) for name in names if name)

    def newest(self) -> tuple[int, dict[str, Any]] | None:
        """Step and run.json of the newest complete checkpoint; None if the folder has no checkpoint.

        A CheckpointWarning names each newer checkpoint that is damaged; `load` renames these. Raises CheckpointError if
        all checkpoints are damaged, or if the folder holds only files under other names.
        """
        errors: list[str] = []
        for step in reversed(self.steps()):
            path = self.path(step)
            try:
                _verify(path)
                about = _read_json(path / RUN)
                if about.get("step") != step:
                    raise _unusable(path / RUN, f"is the checkpoint of step {about.get('step')}, under another name")
            except CheckpointError as error:
                errors.append(str(error))
                self._damaged.add(step)
                continue
            for message in errors:
                warnings.warn(
                    f"going back to the checkpoint of step {step}: {message}", CheckpointWarning, stacklevel=2
                )
            return step, about
        if errors:
            raise CheckpointError(f"{errors[0]}; no other checkpoint is complete: restore its files, or start over")
        if others := self._others():
            raise CheckpointError(
                f"{self._folder}: holds no checkpoint under its name, step-N, but {', '.join(others[:3])}; rename the "
                "checkpoint to resume from, or start over"
            )
        return None

    def _others(self) -> list[str]:
        """Names of files other than checkpoints and incomplete checkpoints."""
        if not self._folder.is_dir():
            return []
        names = sorted(path.name for path in self._folder.iterdir())
        return [name for name in names if not (NAME.fullmatch(name) or name.startswith("."))]

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, run: Mapping[str, Any]) -> None:
        """Copy trained parameters, optimizer state and random-generator states to the host; write them in a thread.

        Waits for the previous checkpoint, and raises CheckpointError if it could not be written.

        Args:
            step: number of the step.
            model: its parameters that require gradients are saved, and its `trained_buffers`.
            optimizer: its state is saved.
            run: further values for run.json, as JSON types.
        """
        self.wait()
        reshard(model)
        ranks = self._ranks
        if ranks.together and Checkpoints._last is not None:  # the process group is that of other instances too
            futures.wait([Checkpoints._last])
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in _tensors(model, optimizer)}
        tensors |= {name: get() for name, (get, _) in _random_states(ranks).items()}
        about = {**run, "step": step, "parameter_groups": optimizer.state_dict()["param_groups"]}
        text = json.dumps(about, indent=1)
        self._pending = self._writer.submit(self._write, ranks, step, tensors, text, {*self.kept})
        Checkpoints._last = self._pending

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Raises CheckpointError when it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except (OSError, CheckpointException) as error:
                raise CheckpointError(f"{self._folder}: the checkpoint cannot be written: {_reason(error)}") from error

    def is_written(self) -> bool:
        """Whether the last checkpoint is on disk. Waits for nothing; `wait` raises the error of a failed write."""
        pending = self._pending
        return pending is None or (pending.done() and pending.exception() is None)

    def _write(self, ranks: Ranks, step: int, tensors: dict[str, Tensor], about: str, kept: set[int]) -> None:
        target, temporary = self.path(step), Path()
        with ExitStack() as opened:
            with ranks.step(str(target)):
                if ranks.writes:
                    self._remove_leftovers()
                    self._remove(target)
                    size = sum(tensor.nbytes for tensor in tensors.values())
                    temporary = opened.enter_context(written_whole(target, size))
            temporary = ranks.gather(temporary)[0]
            with ranks.step(str(target)):
                if not temporary.is_dir():  # torch would make it here, without the files of the other ranks
                    raise CheckpointError(
                        f"{self._folder}: rank {ranks.rank} does not see the files of rank 0; give all ranks the same "
                        "folder, on a file system that they share"
                    )
            with ranks.step(str(target)), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that there is only one process
                writer = dcp.FileSystemWriter(temporary, sync_files=False)
                dcp.save(tensors, storage_writer=writer, process_group=ranks.groups[0], no_dist=not ranks.together)
            with ranks.step(str(target)):
                files = {path.name: _checksum(path) for path in temporary.glob(f"__{ranks.rank}_*")}
            files = {
                name: checksum for files_of_rank in ranks.gather(files) for name, checksum in files_of_rank.items()
            }
            with ranks.step(str(target)):
                if ranks.writes:
                    (temporary / RUN).write_text(about + "\n", encoding="utf-8")
                    files |= {path.name: _checksum(path) for path in temporary.iterdir() if path.name not in files}
                    manifest = json.dumps({"format": FORMAT, "files": files}, indent=1)
                    (temporary / MANIFEST).write_text(manifest + "\n", encoding="utf-8")
                opened.close()  # the folder gets its final name
                if ranks.writes:
                    self._remove_old(kept)

    def _remove_leftovers(self) -> None:
        """Remove files of processes that were killed. No other live process writes here, see `folder.alone_in`."""
        for path in self._folder.glob(".*.partial"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self._folder.glob(".*.lock"):
            path.unlink(missing_ok=True)

    def _put_damaged_aside(self) -> None:
        """Rename damaged checkpoints: they would count as the newest, and complete checkpoints would be removed."""
        for step in self._damaged:
            path, aside = self.path(step), self._folder / f"damaged-step-{step}"
            shutil.rmtree(aside, ignore_errors=True)
            if path.exists():
                path.rename(aside)
        self._damaged.clear()

    def _remove_old(self, kept: set[int]) -> None:
        for old in set(self.steps()[: -self._keep]) - kept:
            self._remove(self.path(old))

    def _remove(self, target: Path) -> None:
        """Rename a checkpoint, then remove it, so that it never looks complete while files are missing."""
        if target.exists():
            temporary = self._folder / f".{secrets.token_hex(4)}.partial"
            target.rename(temporary)
            shutil.rmtree(temporary, ignore_errors=True)

    def remove(self) -> None:
        """Remove all checkpoints and the folder."""
        self.wait()
        if self._ranks.writes:
            shutil.rmtree(self._folder, ignore_errors=True)

    def parameters(self, step: int, model: nn.Module) -> dict[str, Tensor]:
        """The parameters in a checkpoint by name, on the CPU.

        Raises CheckpointError if it cannot be read or is damaged, or if these are not the parameters of `model` that
        require gradients. The model may be on the meta device.
        """
        path = self.path(step)
        _verify(path)
        return _parameters(path, _read_tensors(path, MODEL), dict(_trained(model)))

    def load(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Restore parameters, optimizer state and random generators, and remove checkpoints beyond `keep`.

        Args:
            step: step of the checkpoint.
            model: the model to load into.
            optimizer: the optimizer of the model to load into.

        Raises:
            CheckpointError: the checkpoint cannot be read, is damaged, or belongs to another model or optimizer.
        """
        path, ranks = self.path(step), self._ranks
        with ranks.step(str(path), ""):
            if ranks.writes:
                _verify(path)
        about = _read_json(path / RUN)
        parameters = dict(_trained(model))
        like = {f"{MODEL}{name}": parameter for name, parameter in parameters.items()}
        optimized = (parameter for group in optimizer.param_groups for parameter in group["params"])
        states = {f"{OPTIMIZER}{index}.": parameter for index, parameter in enumerate(optimized)}
        tensors = _read_tensors(path, like=lambda name: like.get(name, states.get(name[: name.rfind(".") + 1])))
        loaded = _parameters(path, tensors, parameters)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(loaded[name])
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith(OPTIMIZER):
                _, index, key = name.split(".", 2)
                state.setdefault(int(index), {})[key] = tensor
        try:
            optimizer.load_state_dict({"state": state, "param_groups": about["parameter_groups"]})
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path}: is of another optimizer, or of a version of ligermodels that grouped parameters otherwise: "
                f"{error}"
            ) from None
        for name, (_, restore) in _random_states(ranks).items():
            if name in tensors:
                restore(tensors[name])
        with ranks.step(str(path), ""):
            if ranks.writes:
                self._put_damaged_aside()
                self._remove_old(self.kept)  # the process that wrote this checkpoint may have been killed before this


def _random_states(ranks: Ranks) -> dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], None]]]:
    """Name -> functions that get and set the state of a random generator: of the CPU and of all GPUs, or, of several
    ranks, of the rank's own GPU."""
    own = f".rank{ranks.rank}" if ranks.rank else ""
    generators: dict[str, Any] = {f"random.cpu{own}": (torch.get_rng_state, torch.set_rng_state)}
    devices = dict(enumerate(range(torch.cuda.device_count())))
    if ranks.together and devices:
        devices = {0: torch.cuda.current_device()}
    for i, device in devices.items():
        get, restore = (partial(f, device=device) for f in (torch.cuda.get_rng_state, torch.cuda.set_rng_state))
        generators[f"random.cuda.{i}{own}"] = get, restore
    return generators


def _read_tensors(
    path: Path, prefix: str = "", like: Callable[[str], Tensor | None] = lambda name: None
) -> dict[str, Tensor]:
    """The tensors in a checkpoint with names that start with `prefix`.

    `like` maps a name to a tensor or None: if this is a sharded tensor of the same shape, or only its last dimension
    differs (scales of 8-bit states), the result is sharded in the same way; other results are on the CPU.
    """
    try:
        stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        tensors: dict[str, Tensor] = {}
        for name, stored_tensor in stored.items():
            if isinstance(stored_tensor, TensorStorageMetadata) and name.startswith(prefix):
                other, dtype = like(name), stored_tensor.properties.dtype
                size = stored_tensor.size
                if other is not None and is_dtensor(other) and size and other.shape[:-1] == size[:-1]:
                    tensors[name] = sharded_like(other, size, dtype)
                else:
                    tensors[name] = torch.empty(stored_tensor.size, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(tensors, checkpoint_id=path, no_dist=True)  # each rank reads its own shards
    except (Exception, CheckpointException) as error:  # torch raises many types
        raise CheckpointError(f"{path}: cannot be read: {_reason(error)}; remove it to resume from another") from error
    return tensors


def _parameters(path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters among `tensors`, by name. Raises CheckpointError unless names, shapes and dtypes are expected."""
    parameters = {name.removeprefix(MODEL): tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
    stored, own = ({name: (t.dtype, tuple(t.shape)) for name, t in of.items()} for of in (parameters, expected))
    if wrong := sorted(name for name in stored.keys() | own.keys() if stored.get(name) != own.get(name)):
        (name, *others) = wrong
        differs = " and ".join(map(str, (stored.get(name, "missing"), own.get(name, "missing"))))
        raise CheckpointError(
            f"{path}: is of another model, or of another version of ligermodels: {name} is {differs} in the model"
            f"{f'; {len(others)} more differ, such as {others[0]}' if others else ''}"
        )
    return parameters


def _trained(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters that require gradients, and the buffers that training changes."""
    yield from ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    for name, module in model.named_modules():
        for buffer in getattr(module, "trained_buffers", ()):
            yield f"{name}.{buffer}", module.get_buffer(buffer)


def _tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"{MODEL}{name}", p) for name, p in _trained(model))
    for index, state in optimizer.state_dict()["state"].items():
        yield from ((f"{OPTIMIZER}{index}.{key}", torch.as_tensor(value)) for key, value in state.items())


def _reason(error: BaseException) -> str:
    """The message of an error, without the traceback that torch adds to it."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(error) or type(error).__name__


def _verify(path: Path) -> None:
    """Compare the files of the checkpoint at `path` with its manifest. CheckpointError names a file that differs."""
    manifest = _read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path / MANIFEST}: is of format {manifest.get('format')}, this version reads {FORMAT}")
    written = manifest.get("files")
    if not isinstance(written, dict):
        raise _unusable(path / MANIFEST, "names no files")
    for name, known in written.items():
        try:
            checksum = _checksum(path / name)
        except OSError as error:
            raise _unusable(path / name, f"cannot be read: {error.strerror or error}") from None
        if checksum != known:
            raise _unusable(path / name, f"is damaged: it is {checksum}, and was written as {known}")


def _checksum(path: Path) -> dict[str, Any]:
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return {"bytes": size, "crc32": f"{crc:08x}"}


def _read_json(path: Path) -> dict[str, Any]:
    # As large as it was written: it holds the completions that further steps of GRPO use.
    most = path.stat().st_size if path.is_file() else 0
    try:
        return read_json_object(path, CheckpointError, most=most)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; remove {path.parent} to resume from another") from None


def _unusable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: {reason}; remove {path.parent} to resume from another")
