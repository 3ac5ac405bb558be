"""Checkpoints written by several ranks together, where parameters are DTensors (FSDP2, tensor parallelism)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ligermodels.convert.shards import is_dtensor
from ligermodels.errors import CheckpointError

Result = TypeVar("Result")


def stand_in(tensor: Tensor) -> Tensor:
    """The tensor itself; of a DTensor a meta tensor of the whole's shape."""
    if not is_dtensor(tensor):
        return tensor.detach()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class Gather:
    """Whole tensors of DTensors. The last one is kept: several views of a tensor are usually read one after another."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """The whole of `tensor`; of a DTensor a collective, which all ranks of its mesh call in the same order."""
        if not is_dtensor(tensor):
            return tensor.detach()
        if self._last is None or self._last[0] is not tensor:
            self._last = None  # Frees the last one before the next is gathered.
            self._last = tensor, tensor.detach().full_tensor()  # type: ignore[attr-defined]
        return self._last[1]


class Ranks:
    """The ranks that write a checkpoint: this one alone, or all of the process group if a tensor is a DTensor.

    All ranks fetch the same tensors in the same order; only rank 0 `writes`.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self.together = any(map(is_dtensor, tensors)) and torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if self.together else 0
        self.writes = self.rank == 0
        self.group: Any = None

    @classmethod
    def of_group(cls, group: Any = None) -> Ranks:
        """All ranks of a process group, by default of the one that there is, if any."""
        found = cls()
        found.together = torch.distributed.is_initialized() and torch.distributed.get_world_size(group) > 1
        found.rank, found.group = torch.distributed.get_rank(group) if found.together else 0, group
        found.writes = found.rank == 0
        return found

    def gather(self, value: Result) -> list[Result]:
        """The values of all ranks."""
        if not self.together:
            return [value]
        found: list[Any] = [None] * torch.distributed.get_world_size(self.group)
        torch.distributed.all_gather_object(found, value, group=self.group)
        return found

    def from_first(self, what: str, function: Callable[[], Result]) -> Result:
        """What `function` gives on the first rank, on all; when it fails there, all fail, see `step`."""
        with self.step(what, ""):
            value = function() if self.writes else None
        return self.gather(value)[0]  # type: ignore[return-value]

    def fetch(self, reads: Mapping[str, Callable[[], Tensor]]) -> dict[str, Tensor]:
        """The tensors on the host, contiguous, where this rank `writes`; elsewhere none, but all are read."""
        found: dict[str, Tensor] = {}
        left = iter(reads.items())
        try:
            for name, read in left:
                tensor = read()
                if self.writes:
                    found[name] = tensor.detach().cpu().contiguous()
        except Exception:
            for _, read in left if self.together else ():
                read()  # The other ranks wait for this one in each collective up to the end of the step.
            raise
        return found

    @contextmanager
    def step(self, what: str, outcome: str = "not written, ") -> Iterator[None]:
        """A step that all ranks take: when it fails on one of them, it fails on all.

        A rank on which it failed raises its own error, the others a CheckpointError that has its message. Within the
        step ranks must make the same collective calls up to the failure.
        """
        if not self.together:
            yield
            return
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
        messages = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, message in enumerate(messages):
            if message is not None:
                raise CheckpointError(f"{what}: {outcome}rank {rank} failed: {message}")
