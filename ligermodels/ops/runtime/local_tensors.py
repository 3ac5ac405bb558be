"""Between plain tensors and parameters that are DTensors: what modules compute with on each rank of a mesh, and sums
over its ranks, in either direction. Imported when the first DTensor is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


def local(parameter: Tensor, *, partial: bool = False) -> Tensor:
    """This rank's part of a DTensor. Its gradient is placed as the parameter is.

    partial: the gradient that each rank computes of a replicated parameter is its part of a sum."""
    assert isinstance(parameter, DTensor)
    if not partial or not all(placement.is_replicate() for placement in parameter.placements):
        return _to_local(parameter, parameter.placements)
    return _to_local(with_summed_gradient(parameter), [Partial()] * parameter.device_mesh.ndim)


def on_all_ranks(x: Tensor, parameter: Tensor) -> Tensor:
    """x whole, as an operand of each rank's part of the DTensor `parameter`: its gradient is the sum of all ranks'.

    x: a plain tensor that is the same on all ranks, or a DTensor, which is gathered if need be."""
    assert isinstance(parameter, DTensor)
    everywhere = [Replicate()] * parameter.device_mesh.ndim
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, parameter.device_mesh, everywhere, run_check=False)
    parts = [Partial() if isinstance(p, Shard) else Replicate() for p in parameter.placements]
    return _to_local(x.redistribute(placements=everywhere), parts)


def with_gradients_summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """x, the same on all ranks, a plain tensor or a Float8Tensor. Its gradient is the sum of those of all ranks."""
    found: Tensor = _SumGradients.apply(x, mesh)
    return found


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        return x.detach()

    @staticmethod
    def backward(ctx, dx):
        total = all_reduce(dx.contiguous(), "sum", ctx.mesh)
        return total.wait() if isinstance(total, AsyncCollectiveTensor) else total, None


def with_own_gradient(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """The plain tensor x, the same on all ranks, as a DTensor. The gradient of x is this rank's part of a sum."""
    return cast(DTensor, _OwnGradient.apply(x, mesh))


class _OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        assert isinstance(dy, DTensor)
        if all(placement.is_partial() for placement in dy.placements):
            return dy.to_local(), None
        return dy.full_tensor() * float(is_first_rank(dy)), None


def sum_over_ranks(x: Tensor, parameter: Tensor) -> Tensor:
    """The sum of the plain tensors x that ranks computed with their parts of the DTensor `parameter`; a plain one."""
    assert isinstance(parameter, DTensor)
    parts = [Partial() if isinstance(p, Shard) else Replicate() for p in parameter.placements]
    whole = DTensor.from_local(x, parameter.device_mesh, parts, run_check=False).full_tensor()
    return whole


def gather_last(x: Tensor, parameter: Tensor, *, partial: bool = False) -> Tensor:
    """x (..., n), of this rank's rows of the DTensor `parameter`, of all: (..., len(parameter)), a plain tensor.

    partial: each rank uses it in its own way, so that the ranks' gradients are to be summed."""
    assert isinstance(parameter, DTensor)
    shape = torch.Size((*x.shape[:-1], parameter.shape[0]))
    placements = [Shard(x.ndim - 1) if isinstance(p, Shard) else Replicate() for p in parameter.placements]
    stride = torch.empty(shape, device="meta").stride()
    mesh = parameter.device_mesh
    parts = DTensor.from_local(x.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)
    if not partial:
        return parts.full_tensor()
    return _to_local(parts.redistribute(placements=[Replicate()] * mesh.ndim), [Partial()] * mesh.ndim)


def with_summed_gradient(parameter: Tensor) -> DTensor:
    """The DTensor itself; its gradient passes the redistribution, which brings it to the parameter's placements."""
    assert isinstance(parameter, DTensor)
    return parameter.redistribute(placements=parameter.placements)


def of_local_tensors(function: Callable[[Sequence[Tensor]], Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """`function` of the values of replicated DTensors, the same on all ranks, as a replicated DTensor."""
    whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in parameters]
    mesh = next(x.device_mesh for x in parameters if isinstance(x, DTensor))
    return DTensor.from_local(function(whole), mesh, [Replicate()] * mesh.ndim, run_check=False)


def is_first_rank(parameter: Tensor) -> bool:
    """Whether this rank is the first of the mesh of a DTensor."""
    assert isinstance(parameter, DTensor)
    return not any(parameter.device_mesh.get_coordinate() or ())


def _to_local(x: DTensor, grad_placements: Sequence[Placement]) -> Tensor:
    found: Tensor = x.to_local(grad_placements=grad_placements)
    return found
