"""Conversions between plain tensors and parameters that are DTensors, with sums over the ranks of their mesh, forward
or backward. Imported when the first DTensor is seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ligermodels.ops.runtime.collectives import Ranks


def local(parameter: DTensor, *, partial: bool = False) -> Tensor:
    """This rank's part of a DTensor. Its gradient is placed as the parameter is.

    partial: the gradient that each rank computes of a replicated parameter is its part of a sum."""
    if not partial or not all(placement.is_replicate() for placement in parameter.placements):
        return _to_local(parameter, parameter.placements)
    return _to_local(_with_summed_gradient(parameter), [Partial()] * parameter.device_mesh.ndim)


def on_all_ranks(x: Tensor, parameter: DTensor) -> Tensor:
    """x whole, as an operand of each rank's part of the DTensor `parameter`: its gradient is summed over ranks.

    x: a plain tensor that is the same on all ranks, or a DTensor, gathered if need be."""
    everywhere = [Replicate()] * parameter.device_mesh.ndim
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, parameter.device_mesh, everywhere, run_check=False)
    parts = [Partial() if p.is_shard() else Replicate() for p in parameter.placements]
    return _to_local(x.redistribute(placements=everywhere), parts)


def with_gradients_summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """x, the same on all ranks, a plain tensor or a Float8Tensor. Its gradient is summed over the ranks of the mesh."""
    return Ranks.of(mesh).sum_gradients(x)


def mean_over_ranks(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The mean over ranks of plain tensors x, which each rank uses in its own way. Its gradient is summed over
    ranks."""
    return Ranks.of(mesh).all_reduce(x) / mesh.size()


def sum_over_ranks(x: Tensor, parameter: DTensor) -> Tensor:
    """The sum of the plain tensors x that ranks computed with their parts of the DTensor `parameter`; a plain one."""
    parts = [Partial() if p.is_shard() else Replicate() for p in parameter.placements]
    whole = DTensor.from_local(x, parameter.device_mesh, parts, run_check=False).full_tensor()
    return whole


def gather_last(x: Tensor, parameter: DTensor, *, partial: bool = False) -> Tensor:
    """x (..., n), of this rank's rows of the DTensor `parameter`, of all: (..., len(parameter)), a plain tensor.

    partial: each rank uses it in its own way, so that the ranks' gradients are to be summed."""
    shape = torch.Size((*x.shape[:-1], parameter.shape[0]))
    placements = [Shard(x.ndim - 1) if p.is_shard() else Replicate() for p in parameter.placements]
    stride = torch.empty(shape, device="meta").stride()
    mesh = parameter.device_mesh
    parts = DTensor.from_local(x.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)
    if not partial:
        return parts.full_tensor()
    return _to_local(parts.redistribute(placements=[Replicate()] * mesh.ndim), [Partial()] * mesh.ndim)


def _with_summed_gradient(parameter: DTensor) -> DTensor:
    """The DTensor itself. The redistribution brings its gradient to the parameter's placements."""
    return parameter.redistribute(placements=parameter.placements)


def dropout(x: Tensor, p: float, mesh: DeviceMesh, dim: int | None) -> Tensor:
    """Dropout by torch's random numbers of DTensors.

    On GPUs ranks with the same x draw the same numbers, and ranks with parts of x draw different numbers. The gradient
    is this rank's own.

    Args:
        x: a plain tensor.
        p: probability of dropping an element.
        mesh: mesh of the ranks.
        dim: the dimension in which x is this rank's part; None if all ranks have the same x.

    Returns:
        A plain tensor.
    """
    placement = Replicate() if dim is None else Shard(dim)
    dropped = F.dropout(DTensor.from_local(x, mesh, [placement], run_check=False), p)
    return _to_local(cast(DTensor, dropped), [placement])


def is_first_rank(parameter: DTensor) -> bool:
    """Whether this rank is the first of the mesh of a DTensor."""
    return not any(parameter.device_mesh.get_coordinate() or ())


def _to_local(x: DTensor, grad_placements: Sequence[Placement]) -> Tensor:
    local_tensor: Tensor = x.to_local(grad_placements=grad_placements)
    return local_tensor
