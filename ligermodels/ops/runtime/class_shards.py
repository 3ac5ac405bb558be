"""DTensors that are sharded over ranks in their dimension of classes. Imported when the first DTensor is seen."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ligermodels.errors import InputError
from ligermodels.ops.runtime.local_tensors import on_all_ranks


class ClassShard(NamedTuple):
    """The classes of this rank.

    Args:
        first: this rank's first class.
        size: number of this rank's classes.
        most: the largest number of classes of a rank.
        num_classes: number of classes of all ranks.
        group: the process group of the ranks.
    """

    first: int
    size: int
    most: int
    num_classes: int
    group: dist.ProcessGroup

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce x over the ranks, in place."""
        dist.all_reduce(x, op, self.group)
        return x

    def targets(self, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Express targets in this rank's classes.

        Args:
            target: long, any shape.
            ignore_index: the value of ignored targets.

        Returns:
            Three tensors of the target's shape: this rank's class, or 0 for a class of another rank, or -1 where
            ignored; bool, True where the target is not ignored; and bool, True where it is a class of this rank.
        """
        valid = target != ignore_index
        inside = valid & (target >= self.first) & (target < self.first + self.size)
        return torch.where(inside, target - self.first, valid.long() - 1), valid, inside


def shard_of_classes(op: str, name: str, x: Tensor, dim: int) -> tuple[Tensor, ClassShard]:
    """This rank's part of a DTensor that is sharded in its dimension of classes.

    Args:
        op: name of the op, for errors.
        name: name of its argument, for errors.
        x: the DTensor, sharded in `dim` over one dimension of its mesh.
        dim: the dimension of classes.

    Returns:
        The local tensor, and its classes.

    Raises:
        InputError: other placements, or a rank without a class.
    """
    dim = dim % x.ndim
    if not isinstance(x, DTensor) or any(type(p) not in (Replicate, Shard) for p in x.placements):
        raise InputError(_refusal(op, name, x, dim))
    sharded = [i for i, placement in enumerate(x.placements) if isinstance(placement, Shard)]
    if len(sharded) != 1 or not x.placements[sharded[0]].is_shard(dim):
        raise InputError(_refusal(op, name, x, dim))
    mesh, ranks = x.device_mesh, x.device_mesh.shape[sharded[0]]
    num_classes = x.shape[dim]
    most = -(-num_classes // ranks)  # as torch.chunk: the last shards may be smaller
    first = most * mesh.get_local_rank(sharded[0])
    if most * (ranks - 1) >= num_classes:
        raise InputError(f"{op}: {name} has {num_classes} classes, too few for each of {ranks} ranks to have some")
    local = x.to_local()
    return local, ClassShard(first, local.shape[dim], most, num_classes, mesh.get_group(sharded[0]))


def shard_of_head(
    op: str, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, ClassShard]:
    """This rank's shard of a head with a DTensor as its weight.

    Args:
        op: name of the op, for errors.
        hidden: (..., H), hidden states.
        weight: (V, H), a DTensor sharded in its first dimension.
        bias: (V,), sharded like the weight, or None.

    Returns:
        The hidden states, with a gradient that is summed over ranks; the local weight and bias; and their classes.

    Raises:
        InputError: other placements.
    """
    own, shard = shard_of_classes(op, "weight", weight, 0)
    own_bias = None
    if bias is not None:
        if getattr(bias, "placements", None) != getattr(weight, "placements", None):
            raise InputError(f"{op}: bias must be a DTensor on the mesh of weight, and sharded as it is")
        own_bias = shard_of_classes(op, "bias", bias, 0)[0]
    return on_all_ranks(hidden, cast(DTensor, weight)), own, own_bias, shard


def _refusal(op: str, name: str, x: Tensor, dim: int) -> str:
    return (
        f"{op} takes no DTensors but those whose classes are sharded over one dimension of a mesh: {name} must be "
        f"plain or Shard({dim}), got {getattr(x, 'placements', 'a plain tensor')}; pass local tensors (x.to_local()), "
        "or gather first (x.full_tensor())"
    )
