"""Which part of a whole tensor a rank has of a DTensor. Knows no files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import CheckpointError


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Does not import torch.distributed.tensor, which takes long."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


SHARDS = ("Shard", "_StridedShard")
"""Placements that are rows of the whole: of all of it, and of what an inner dimension of the mesh has left."""


class Box(NamedTuple):
    """A part of a tensor: in each dimension `sizes` elements from `starts` on."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """The part, a view."""
        for dim, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole


def local_box(tensor: Tensor) -> Box | None:
    """This rank's part of the DTensor `tensor`; None where the rank is not in its mesh.

    Raises CheckpointError for placements other than shards, also those of a shard (FSDP2 of tensor parallelism), and
    replicas.
    """
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(tensor, DTensor)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    starts, sizes = [0] * tensor.ndim, list(tensor.shape)
    each = list(zip(mesh.shape, coordinate, tensor.placements, strict=True))
    # Of the dimensions of a mesh the inner ones divide what the outer ones left, but for those that say otherwise.
    each.sort(key=lambda one: type(one[2]).__name__ != "Shard")
    for count, index, placement in each:
        dim = getattr(placement, "dim", None)
        if dim is not None and type(placement).__name__ in SHARDS:  # As torch.chunk: the last may be shorter, or empty.
            length = -(-sizes[dim] // count)
            start = min(index * length, sizes[dim])
            starts[dim] += start
            sizes[dim] = min(length, sizes[dim] - start)
        elif type(placement) is not Replicate:
            raise CheckpointError(f"cannot be loaded into a DTensor with placement {placement}; load, then shard")
    if tuple(sizes) != tuple(tensor.to_local().shape):
        raise CheckpointError(f"its shard is {list(tensor.to_local().shape)} instead of {sizes}; load, then shard")
    return Box(tuple(starts), tuple(sizes))


@torch.no_grad()
def fill_shard(tensor: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of `whole` into the DTensor `tensor`; errors as of `local_box`.

    Of a `whole` that is mapped from a file only that part is read.
    """
    if (box := local_box(tensor)) is not None:
        tensor.to_local().copy_(box.of(whole))  # type: ignore[attr-defined]


def within(view: Tensor, start: int, first: int, last: int) -> Iterator[tuple[Tensor, int]]:
    """The parts of `view` whose elements all lie in its storage from element `first` up to `last`, and for each the
    number of its first element: `start`, plus its place among those of `view`, in the order of indices.

    A part is found at once where rows of the view follow one another in the storage, as those of a shard do.
    """
    if not view.numel() or first >= last:
        return
    low = view.storage_offset()
    high = low + _extent(view)
    if high < first or low >= last:
        return
    if first <= low and high < last:
        yield view, start
        return
    if not view.ndim:
        return
    step, each = view.stride(0), view[0].numel()
    extent = _extent(view[0])
    # Rows from `inner` up to `outer` lie within; those beside them may in part.
    if step:
        inner = min(max(0, -(-(first - low) // step)), len(view))
        outer = max(min(len(view), (last - 1 - extent - low) // step + 1), inner)
        begin, end = max(0, (first - extent - low) // step), min(len(view), (last - 1 - low) // step + 1)
    else:
        inner = outer = begin = 0
        end = len(view)
    for i in range(begin, inner):
        yield from within(view[i], start + i * each, first, last)
    if inner < outer:
        yield view[inner:outer], start + inner * each
    for i in range(max(outer, begin), end):
        yield from within(view[i], start + i * each, first, last)


def _extent(view: Tensor) -> int:
    """The distance in the storage of the last element from the first."""
    return sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
