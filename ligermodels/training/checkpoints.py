"""Checkpoints of a run: written atomically in another thread; the newest are kept."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from ligermodels.convert.config_json import read_json
from ligermodels.convert.ranks import Ranks
from ligermodels.convert.saving import written_whole
from ligermodels.convert.shards import is_dtensor
from ligermodels.errors import CheckpointError, CheckpointWarning, ConfigError
from ligermodels.layers.sharding import reshard

NAME = re.compile(r"step-(\d+)")
RUN = "run.json"
"""The file of everything that is not a tensor."""
MANIFEST = "manifest.json"
"""The format, and size and CRC-32 of every other file; written last."""
FORMAT = 2
MODEL = "model."
OPTIMIZER = "optimizer."
"""Prefixes of the names of parameters, and of the optimizer's state of parameter i: "optimizer.i."."""


class Checkpoints:
    """The checkpoints in `folder`, each a folder of torch.distributed.checkpoint and run.json; the newest `keep` stay.

    One with its final name is complete even after a crash: see `written_whole`. Checksums are verified before reading.

    Of a process group all ranks save, load and remove together. Each writes and reads its own shards of tensors, in a
    folder that all of them see; so a checkpoint can be loaded by any number of ranks.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        self._folder, self._keep = Path(folder), keep
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._group: Ranks | None = None
        self._damaged: set[int] = set()

    @property
    def _ranks(self) -> Ranks:
        """Of a group of their own: the thread that writes must not meet the calls of training."""
        if self._group is None:
            several = dist.is_initialized() and dist.get_world_size() > 1
            self._group = Ranks.of_group(dist.new_group(backend="gloo")) if several else Ranks()
        return self._group

    def steps(self) -> list[int]:
        """Steps of the checkpoints, ascending."""
        if not os.path.isdir(self._folder):  # False, too, of a name that no folder can have
            return []
        names = [NAME.fullmatch(path.name) for path in self._folder.iterdir()]
        return sorted(int(name[1]) for name in names if name)

    def newest(self) -> tuple[int, dict[str, Any]] | None:
        """Step and `about` of the newest checkpoint that is whole, None where there is none at all.

        A CheckpointWarning says why newer ones are not; `load` puts those aside. Raises CheckpointError when none is
        whole, or what is in the folder has lost its name.
        """
        wrong: list[str] = []
        for step in reversed(self.steps()):
            path = self._folder / f"step-{step}"
            try:
                _verify(path)
                about = _read_json(path / RUN)
                if about.get("step") != step:
                    raise _unusable(path / RUN, f"is the checkpoint of step {about.get('step')}, under another name")
            except CheckpointError as error:
                wrong.append(str(error))
                self._damaged.add(step)
                continue
            for each in wrong:
                warnings.warn(f"going back to the checkpoint of step {step}: {each}", CheckpointWarning, stacklevel=2)
            return step, about
        if wrong:
            raise CheckpointError(f"{wrong[0]}; no other is whole, so start over, or put back what was there")
        if others := self._others():
            raise CheckpointError(
                f"{self._folder}: holds no checkpoint by its name, step-N, but {', '.join(others[:3])}; give what is "
                "to be resumed its name back, or start over"
            )
        return None

    def _others(self) -> list[str]:
        """Names of what is no checkpoint, nor left over from writing one."""
        if not self._folder.is_dir():
            return []
        names = sorted(path.name for path in self._folder.iterdir())
        return [name for name in names if not (NAME.fullmatch(name) or name.startswith("."))]

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, run: Mapping[str, Any]) -> None:
        """Copy trained parameters, optimizer state and random-generator states to the host; write them in a thread.

        Waits for the previous checkpoint, and raises CheckpointError when it could not be written. `run` is for JSON.
        """
        self.wait()
        reshard(model)
        ranks = self._ranks
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in _tensors(model, optimizer)}
        tensors |= {name: get() for name, (get, _) in _random_states(ranks).items()}
        about = {**run, "step": step, "parameter_groups": optimizer.state_dict()["param_groups"]}
        self._pending = self._writer.submit(self._write, ranks, step, tensors, json.dumps(about, indent=1))

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Raises CheckpointError when it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except (OSError, CheckpointException) as error:
                raise CheckpointError(f"{self._folder}: the checkpoint cannot be written: {_reason(error)}") from error

    def _write(self, ranks: Ranks, step: int, tensors: dict[str, Tensor], about: str) -> None:
        target, temporary = self._folder / f"step-{step}", Path()
        with ExitStack() as opened:
            with ranks.step(str(target)):
                if ranks.writes:
                    self._remove_leftovers()
                    self._remove(target)
                    size = sum(tensor.nbytes for tensor in tensors.values())
                    temporary = opened.enter_context(written_whole(target, size))
            temporary = ranks.gather(temporary)[0]
            with ranks.step(str(target)):
                if not temporary.is_dir():  # it would be made here, and lack what the others write
                    raise CheckpointError(
                        f"{self._folder}: rank {ranks.rank} does not see what rank 0 writes there; give all ranks the "
                        "same folder, on a file system that they share"
                    )
            with ranks.step(str(target)), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # its note that there is only one process
                writer = dcp.FileSystemWriter(temporary, sync_files=False)
                dcp.save(tensors, storage_writer=writer, process_group=ranks.group, no_dist=not ranks.together)
            with ranks.step(str(target)):
                files = {path.name: _checksum(path) for path in temporary.glob(f"__{ranks.rank}_*")}
            files = {name: checksum for each in ranks.gather(files) for name, checksum in each.items()}
            with ranks.step(str(target)):
                if ranks.writes:
                    (temporary / RUN).write_text(about + "\n", encoding="utf-8")
                    files |= {path.name: _checksum(path) for path in temporary.iterdir() if path.name not in files}
                    manifest = json.dumps({"format": FORMAT, "files": files}, indent=1)
                    (temporary / MANIFEST).write_text(manifest + "\n", encoding="utf-8")
                opened.close()  # The folder gets its name.
                if ranks.writes:
                    self._remove_old()

    def _remove_leftovers(self) -> None:
        """Those of processes that were killed: only one that is alive has a run's folder, see `folder.alone_in`."""
        for path in self._folder.glob(".*.partial"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self._folder.glob(".*.lock"):
            path.unlink(missing_ok=True)

    def _put_damaged_aside(self) -> None:
        """Else they would be taken for the newest ones, and others be removed instead."""
        for step in self._damaged:
            path, aside = self._folder / f"step-{step}", self._folder / f"damaged-step-{step}"
            shutil.rmtree(aside, ignore_errors=True)
            if path.exists():
                path.rename(aside)
        self._damaged.clear()

    def _remove_old(self) -> None:
        for old in self.steps()[: -self._keep]:
            self._remove(self._folder / f"step-{old}")

    def _remove(self, target: Path) -> None:
        """Rename it first, so that it never looks complete while it is deleted."""
        if target.exists():
            temporary = self._folder / f".{secrets.token_hex(4)}.partial"
            target.rename(temporary)
            shutil.rmtree(temporary, ignore_errors=True)

    def remove(self) -> None:
        """Remove all checkpoints and the folder."""
        self.wait()
        if self._ranks.writes:
            shutil.rmtree(self._folder, ignore_errors=True)

    def about(self, step: int) -> dict[str, Any]:
        """`run` as given to `save`, with "step". Raises CheckpointError when the checkpoint cannot be read."""
        path = self._folder / f"step-{step}"
        _verify(path, [RUN])
        return _read_json(path / RUN)

    def parameters(self, step: int, model: nn.Module) -> dict[str, Tensor]:
        """The parameters of a checkpoint by name, on the CPU: those that require gradients in `model`, which may be on
        the meta device. Errors as of `load`."""
        path = self._folder / f"step-{step}"
        _verify(path)
        return _parameters(path, _read_tensors(path, MODEL), dict(_trained(model)))

    def load(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Restore parameters, optimizer and random generators, and remove checkpoints beyond `keep`.

        Raises CheckpointError when it cannot be read, is damaged, or is of another model or optimizer.
        """
        path, ranks = self._folder / f"step-{step}", self._ranks
        with ranks.step(str(path), ""):
            if ranks.writes:
                _verify(path)
        about = _read_json(path / RUN)
        parameters = dict(_trained(model))
        like = {f"{MODEL}{name}": parameter for name, parameter in parameters.items()}
        optimized = (parameter for group in optimizer.param_groups for parameter in group["params"])
        states = {f"{OPTIMIZER}{index}.": parameter for index, parameter in enumerate(optimized)}
        tensors = _read_tensors(path, like=lambda name: like.get(name, states.get(name[: name.rfind(".") + 1])))
        found = _parameters(path, tensors, parameters)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(found[name])
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith(OPTIMIZER):
                _, index, key = name.split(".", 2)
                state.setdefault(int(index), {})[key] = tensor
        try:
            optimizer.load_state_dict({"state": state, "param_groups": about["parameter_groups"]})
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{path}: is of another optimizer: {error}") from None
        for name, (_, restore) in _random_states(ranks).items():
            if name in tensors:
                restore(tensors[name])
        with ranks.step(str(path), ""):
            if ranks.writes:
                self._put_damaged_aside()
                self._remove_old()  # the process that wrote this one may have been killed before it did so


def _random_states(ranks: Ranks) -> dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], None]]]:
    """Name -> functions that get and set the state of each random generator of this rank: of its own GPU where there
    are several ranks, else of all."""
    own = f".rank{ranks.rank}" if ranks.rank else ""
    found: dict[str, Any] = {f"random.cpu{own}": (torch.get_rng_state, torch.set_rng_state)}
    devices = dict(enumerate(range(torch.cuda.device_count())))
    if ranks.together and devices:
        devices = {0: torch.cuda.current_device()}
    for i, device in devices.items():
        get, restore = (partial(each, device=device) for each in (torch.cuda.get_rng_state, torch.cuda.set_rng_state))
        found[f"random.cuda.{i}{own}"] = get, restore
    return found


def _read_tensors(
    path: Path, prefix: str = "", like: Callable[[str], Tensor | None] = lambda name: None
) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names start with `prefix`: those for whose names `like` gives a sharded tensor
    of the same shape are sharded as that is, the others are on the CPU."""
    try:
        stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        tensors: dict[str, Tensor] = {}
        for name, it in stored.items():
            if isinstance(it, TensorStorageMetadata) and name.startswith(prefix):
                other, dtype = like(name), it.properties.dtype
                if other is not None and is_dtensor(other) and other.shape == it.size:
                    tensors[name] = torch.empty_like(other, dtype=dtype, requires_grad=False)
                else:
                    tensors[name] = torch.empty(it.size, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(tensors, checkpoint_id=path, no_dist=True)  # each rank finds its own part
    except (Exception, CheckpointException) as error:  # The library raises many kinds.
        raise CheckpointError(f"{path}: cannot be read: {_reason(error)}; remove it to resume from another") from error
    return tensors


def _parameters(path: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Those of `tensors` that are parameters, by name; CheckpointError unless they are like `wanted`."""
    found = {name.removeprefix(MODEL): tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
    if {name: (t.shape, t.dtype) for name, t in found.items()} != {
        name: (p.shape, p.dtype) for name, p in wanted.items()
    }:
        wrong = sorted(found.keys() ^ wanted.keys()) or sorted(found)
        raise CheckpointError(f"{path}: is of another model: {', '.join(wrong[:5])} do not fit")
    return found


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def _tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"{MODEL}{name}", p) for name, p in _trained(model))
    for index, state in optimizer.state_dict()["state"].items():
        yield from ((f"{OPTIMIZER}{index}.{key}", torch.as_tensor(value)) for key, value in state.items())


def _reason(error: BaseException) -> str:
    """The message without the traceback that the library puts into it."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(error) or type(error).__name__


def _verify(path: Path, names: Iterable[str] | None = None) -> None:
    """Verify files of the checkpoint at `path`, by default all, by its manifest; CheckpointError names the file."""
    manifest = _read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path / MANIFEST}: is of format {manifest.get('format')}, this version reads {FORMAT}")
    written = manifest.get("files")
    if not isinstance(written, dict):
        raise _unusable(path / MANIFEST, "names no files")
    for name in written if names is None else names:
        try:
            found = _checksum(path / name)
        except OSError as error:
            raise _unusable(path / name, f"cannot be read: {error.strerror or error}") from None
        if found != written.get(name):
            raise _unusable(path / name, f"is damaged: it is {found}, and was written as {written.get(name)}")


def _checksum(path: Path) -> dict[str, Any]:
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return {"bytes": size, "crc32": f"{crc:08x}"}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except ConfigError as error:
        raise CheckpointError(f"{error}; remove {path.parent} to resume from another") from None


def _unusable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: {reason}; remove {path.parent} to resume from another")
