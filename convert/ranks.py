"""Ranks that read or write a checkpoint together, when parameters are DTensors (FSDP2, tensor parallelism)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from ligermodels.convert.shards import is_dtensor
from ligermodels.errors import CheckpointError, InputError

Result = TypeVar("Result")


def stand_in(tensor: Tensor) -> Tensor:
    """`tensor` itself; for a DTensor, a meta tensor with the shape of the whole tensor."""
    if not is_dtensor(tensor):
        return tensor.detach()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class Gather:
    """Gathers DTensors. The last result is kept, because several views of a tensor are usually read in succession.

    Within a `Ranks.step` the ranks agree before each collective call that none of them has failed, so that no rank
    waits in it for a rank that has.
    """

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """The whole tensor. For a DTensor this is a collective: all ranks of its mesh call it in the same order."""
        if not is_dtensor(tensor):
            return tensor.detach()
        if self._last is None or self._last[0] is not tensor:
            self._last = None  # frees the last result before the next tensor is gathered
            # Memory that a rank lacks is an error here, before the other ranks enter the collective call.
            torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            if (step := _STEP.get()) is not None:
                step.agree()
            self._last = tensor, tensor.detach().full_tensor()  # type: ignore[attr-defined]
        return self._last[1]


class Ranks:
    """Ranks that write a checkpoint together: all ranks if one of `tensors` is a DTensor, otherwise this process alone.

    All ranks fetch the same tensors in the same order; only rank 0 has `writes` set.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self.together = any(map(is_dtensor, tensors)) and torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if self.together else 0
        self.writes = self.rank == 0
        self.groups: list[Any] = [None]

    @classmethod
    def that_hold(cls, tensors: Iterable[Tensor]) -> Ranks:
        """The ranks over which `tensors` are spread, by the meshes of the DTensors among them: other ranks need not
        call anything. They fetch, and write nothing together."""
        tensors = [tensor for tensor in tensors if is_dtensor(tensor)]
        ranks, meshes = cls(tensors), dict.fromkeys(tensor.device_mesh for tensor in tensors)  # type: ignore[attr-defined]
        ranks.groups = list(dict.fromkeys(mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)))
        return ranks

    @classmethod
    def of_group(cls, group: Any = None) -> Ranks:
        """All ranks of a process group; by default the default group, or this process alone if there is none."""
        ranks = cls()
        ranks.together = torch.distributed.is_initialized() and torch.distributed.get_world_size(group) > 1
        ranks.rank, ranks.groups = torch.distributed.get_rank(group) if ranks.together else 0, [group]
        ranks.writes = ranks.rank == 0
        return ranks

    def gather(self, value: Result) -> list[Result]:
        """The values of all ranks, in order of rank; of `Ranks.that_hold` in any order, and some of them repeated."""
        values = [value]
        for group in self.groups if self.together else ():
            lists: list[Any] = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(lists, values, group=group)
            values = [each for values in lists for each in values]
        return values

    def from_first(self, what: str, function: Callable[[], Result]) -> Result:
        """Call `function` on rank 0 and return its result on all ranks. `what` names it if it fails: see `step`."""
        with self.step(what, ""):
            value = function() if self.writes else None
        return self.gather(value)[0]  # type: ignore[return-value]

    def fetch(self, reads: Mapping[str, Callable[[], Tensor]]) -> dict[str, Tensor]:
        """Call all functions of `reads` (name -> function), in order; the tensors on the host, contiguous, if this rank
        `writes`, and an empty dict otherwise. Call it within a `step`. Raises InputError for the meta device."""
        tensors: dict[str, Tensor] = {}
        for name, read in reads.items():
            tensor = read()
            if tensor.is_meta:
                raise InputError(f"{name}: is on the meta device, without values: load the model on another to save it")
            if self.writes:
                tensors[name] = tensor.detach().cpu().contiguous()
        return tensors

    @contextmanager
    def step(self, what: str, outcome: str = "not written, ") -> Iterator[None]:
        """Context manager for a step of all ranks: if it fails on one rank, it fails on all.

        A rank that failed raises its own error, and the other ranks a CheckpointError with the same message: at the end
        of the step, or at the next tensor that they gather (`Gather`). Other collective calls all ranks must make up to
        the failure.

        Args:
            what: name for the message, such as the folder.
            outcome: text for the message before the rank that failed.
        """
        if not self.together:
            yield
            return
        step, failure = _Step(self, f"{what}: {outcome}"), None
        token = _STEP.set(step)
        try:
            yield
        except BaseException as error:
            failure = error
        finally:
            _STEP.reset(token)
        if failure is None or not getattr(failure, _KNOWN, False):
            step.agree(failure)
        if failure is not None:
            raise failure


class _Step:
    """A step of all ranks that has not ended.

    Args:
        ranks: the ranks.
        text: text for the message before the rank that failed.
    """

    def __init__(self, ranks: Ranks, text: str) -> None:
        self._ranks, self._text = ranks, text

    def agree(self, failure: BaseException | None = None) -> None:
        """Tell the other ranks whether this rank has failed. If one has, the step, and steps around it, have failed on
        all: raise this rank's own error, or a CheckpointError that names the rank that failed."""
        own = None if failure is None else f"rank {self._ranks.rank} failed: {type(failure).__name__}: {failure}"
        for message in self._ranks.gather(own):
            if message is not None:
                error = failure or CheckpointError(f"{self._text}{message}")
                setattr(error, _KNOWN, True)
                raise error


_KNOWN = "_ligermodels_known_to_all_ranks"
"""Attribute of errors that all ranks have been told of."""

_STEP: ContextVar[_Step | None] = ContextVar("step", default=None)
"""The innermost step of this process."""
