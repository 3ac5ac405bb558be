"""Checkpoints written by several ranks together, where parameters are DTensors (FSDP2, tensor parallelism)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ligermodels.errors import CheckpointError


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Does not import torch.distributed.tensor, which takes long."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


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


@torch.no_grad()
def fill_shard(tensor: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of `whole`, on the CPU, into the DTensor `tensor`; CheckpointError for unusual placements.

    Of a `whole` that is mapped from a file only that part is read.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    assert isinstance(tensor, DTensor)
    local, mesh, part = tensor.to_local(), tensor.device_mesh, whole
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return  # This rank is not in the mesh.
    for count, index, placement in zip(mesh.shape, coordinate, tensor.placements, strict=True):
        if type(placement) is Shard:  # As torch.chunk: the last chunks may be shorter, or empty.
            size = part.shape[placement.dim]
            length = -(-size // count)
            start = min(index * length, size)
            part = part.narrow(placement.dim, start, min(length, size - start))
        elif type(placement) is not Replicate:
            raise CheckpointError(f"cannot be loaded into a DTensor with placement {placement}; load, then shard")
    if part.shape != local.shape:
        raise CheckpointError(f"its shard is {list(local.shape)} instead of {list(part.shape)}; load, then shard")
    local.copy_(part)


class Ranks:
    """The ranks that write a checkpoint: this one alone, or all of the process group if a tensor is a DTensor.

    All ranks fetch the same tensors in the same order; only rank 0 `writes`.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self.together = any(map(is_dtensor, tensors)) and torch.distributed.is_initialized()
        self.writes = not self.together or torch.distributed.get_rank() == 0

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
    def step(self, what: str) -> Iterator[None]:
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
        messages: list[str | None] = [None] * torch.distributed.get_world_size()
        own = None if failure is None else f"{type(failure).__name__}: {failure}"
        torch.distributed.all_gather_object(messages, own)
        if failure is not None:
            raise failure
        for rank, message in enumerate(messages):
            if message is not None:
                raise CheckpointError(f"{what}: not written, rank {rank} failed: {message}")
