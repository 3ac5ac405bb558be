"""The shard of a DTensor that a rank holds, as a part of the whole tensor. Knows no files."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import CheckpointError


def is_dtensor(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor. Does not import torch.distributed.tensor, because that import is slow."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


SHARDS = ("Shard", "_StridedShard")
"""Classes of placements that shard rows: of the whole tensor, or of the shard that inner mesh dimensions leave."""


class Box(NamedTuple):
    """A part of a tensor: in each dimension, `sizes` elements from `starts` on."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """The part of `whole`, a view."""
        for dim, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole


def local_box(tensor: Tensor) -> Box | None:
    """This rank's part of the DTensor `tensor`; None if the rank is not in its mesh.

    Raises:
        CheckpointError: a placement is neither a shard (or a shard of a shard, FSDP2 over tensor parallelism) nor a
            replica.
    """
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(tensor, DTensor)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    starts, sizes = [0] * tensor.ndim, list(tensor.shape)
    splits = list(zip(mesh.shape, coordinate, tensor.placements, strict=True))
    # Inner mesh dimensions divide the shards of outer ones, except _StridedShard, which divides last.
    splits.sort(key=lambda split: type(split[2]).__name__ != "Shard")
    for count, index, placement in splits:
        dim = getattr(placement, "dim", None)
        if dim is not None and type(placement).__name__ in SHARDS:  # as torch.chunk: the last may be shorter or empty
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
    """Copy this rank's part of `whole` into the DTensor `tensor`. If `whole` is mapped from a file, only this part is
    read. CheckpointError for placements other than shards and replicas."""
    if (box := local_box(tensor)) is not None:
        tensor.to_local().copy_(box.of(whole))  # type: ignore[attr-defined]


def own_parts(tensor: Tensor, view: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The parts of a view of a tensor that this rank holds, and the same parts of new values.

    Args:
        tensor: the tensor.
        view: a view of it; of a DTensor a view of a stand-in for the whole tensor, `ranks.stand_in`. Each of its
            dimensions runs along one dimension of the tensor (narrow, unflatten, transpose, select).
        values: a tensor of the shape of `view`, on any device.

    Returns:
        Views of this rank's memory, and views of `values` of the same shapes; for a plain tensor `view` and `values`
        themselves.

    Raises:
        CheckpointError: a placement of the DTensor is neither a shard nor a replica, or its shard is not contiguous.
    """
    if not is_dtensor(tensor):
        return [(view, values)]
    if (box := local_box(tensor)) is None:
        return []
    local: Tensor = tensor.to_local().detach()  # type: ignore[attr-defined]
    if not local.is_contiguous():
        raise CheckpointError(f"its shard has strides {local.stride()} and is not contiguous; load, then shard")
    pairs, shape = [(view, values)], list(tensor.shape)
    for dim, (start, size) in enumerate(zip(box.starts, box.sizes, strict=True)):
        if size != shape[dim]:
            pairs = [part for pair in pairs for part in _narrowed(*pair, shape, dim, start, size)]
            shape[dim] = size
    first = local.storage_offset()
    return [(local.as_strided(x.shape, x.stride(), first + x.storage_offset()), part) for x, part in pairs]


def _narrowed(
    view: Tensor, values: Tensor, shape: Sequence[int], dim: int, start: int, size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts of a view of a contiguous tensor of `shape` within `size` elements of `dim` from `start` on, as
    views of a contiguous tensor of these elements alone; and the same parts of `values`."""
    inner = math.prod(shape[dim + 1 :])
    outer = inner * shape[dim]
    along = [i for i, (n, stride) in enumerate(zip(view.shape, view.stride(), strict=True))
             if n > 1 and inner <= stride < outer]  # fmt: skip
    if len(along) > 1:  # such as heads and their channels
        shortest = min(along, key=lambda i: view.shape[i])
        for pair in zip(view.unbind(shortest), values.unbind(shortest), strict=True):
            yield from _narrowed(*pair, shape, dim, start, size)
        return
    position = view.storage_offset() // inner % shape[dim]
    if along:
        i, step = along[0], view.stride(along[0]) // inner
        low, high = (min(max(0, -(-(end - position) // step)), view.shape[i]) for end in (start, start + size))
        view, values = view.narrow(i, low, high - low), values.narrow(i, low, high - low)
    elif not start <= position < start + size:
        return
    if view.numel():
        block, rest = divmod(int(view.storage_offset()), outer)
        strides = [s // outer * inner * size + s % outer if s >= outer else s for s in view.stride()]
        yield view.as_strided(view.shape, strides, block * inner * size + rest - start * inner), values


def sharded_like(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised DTensor that is sharded as another. If that is sharded along its last dimension, the shards of
    both have the same proportion of it.

    Args:
        tensor: the other DTensor.
        shape: shape of the result; only its last dimension may differ from that of `tensor`.
        dtype: dtype of the result.
    """
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    local = tensor.to_local()
    columns = local.shape[-1] * shape[-1] // tensor.shape[-1] if tensor.shape[-1] else shape[-1]
    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(
        torch.empty((*local.shape[:-1], columns), dtype=dtype, device=local.device),
        tensor.device_mesh, tensor.placements, run_check=False, shape=whole.shape, stride=whole.stride(),
    )  # fmt: skip


def within(view: Tensor, start: int, first: int, last: int) -> Iterator[tuple[Tensor, int]]:
    """The parts of a view that lie within a range of its storage. Adjacent rows are returned as one part.

    Args:
        view: a view of a tensor.
        start: number that the first element of the view gets.
        first: first storage element of the range.
        last: storage element after the range.

    Yields:
        A part, a view, and the number of its first element. Elements of `view` are numbered in the order of indices.
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
    step, row = view.stride(0), view[0].numel()
    extent = _extent(view[0])
    # Rows from `inner` up to `outer` are within the range; their neighbours may be partly within.
    if step:
        inner = min(max(0, -(-(first - low) // step)), len(view))
        outer = max(min(len(view), (last - 1 - extent - low) // step + 1), inner)
        begin, end = max(0, (first - extent - low) // step), min(len(view), (last - 1 - low) // step + 1)
    else:
        inner = outer = begin = 0
        end = len(view)
    for i in range(begin, inner):
        yield from within(view[i], start + i * row, first, last)
    if inner < outer:
        yield view[inner:outer], start + inner * row
    for i in range(max(outer, begin), end):
        yield from within(view[i], start + i * row, first, last)


def _extent(view: Tensor) -> int:
    """Distance between the first and the last element in the storage."""
    return sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
