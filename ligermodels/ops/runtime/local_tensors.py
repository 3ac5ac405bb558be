"""Plain tensors for computations with parameters that are DTensors. Imported when the first DTensor is seen."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate


def local(parameter: DTensor, *, partial: bool = False) -> Tensor:
    """This rank's shard of a DTensor. The gradient gets the placements of the parameter.

    partial: each rank computes a summand of the gradient of a replicated parameter. Default: False, all ranks compute
    the same gradient."""
    if not partial or not any(placement.is_replicate() for placement in parameter.placements):
        return _to_local(parameter, parameter.placements)
    summands = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
    return _to_local(_with_summed_gradient(parameter), summands)


def on_all_ranks(x: Tensor, parameter: DTensor) -> Tensor:
    """The whole x, which each rank multiplies by its shard of `parameter`. The gradient is summed over ranks.

    x: a plain tensor that is the same on all ranks, or a DTensor, gathered if need be."""
    everywhere = [Replicate()] * parameter.device_mesh.ndim
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, parameter.device_mesh, everywhere, run_check=False)
    parts = [Partial() if p.is_shard() else Replicate() for p in parameter.placements]
    return _to_local(x.redistribute(placements=everywhere), parts)


def _with_summed_gradient(parameter: DTensor) -> DTensor:
    """The DTensor itself. The redistribution brings its gradient to the parameter's placements."""
    return parameter.redistribute(placements=parameter.placements)


def _to_local(x: DTensor, grad_placements: Sequence[Placement]) -> Tensor:
    local_tensor: Tensor = x.to_local(grad_placements=grad_placements)
    return local_tensor
