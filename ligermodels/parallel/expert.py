"""Expert parallelism: spread the experts of a model over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ligermodels.errors import ConfigError
from ligermodels.layers.layer import declared
from ligermodels.layers.sharding import split_evenly


def mixtures(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of each mixture with experts that can be spread over ranks."""
    for name, module in model.named_modules():
        if declared(module).expert_parallel:
            yield name, module


def check_expert_parallel(model: nn.Module, ranks: int) -> None:
    """ConfigError, naming the field, unless the experts of `model` can be divided evenly over so many `ranks`."""
    named = list(mixtures(model))
    if not named:
        raise ConfigError("expert: the model has no mixture of experts that could be spread; leave it out")
    for name, module in named:
        if getattr(module, "compute", None) is not None:
            raise ConfigError(
                f"expert: {name}: experts with quantised weights cannot be spread over ranks; shard the model instead"
            )
        if getattr(getattr(module, "update", None), "shared_outer", False):
            raise ConfigError(
                f"expert: {name}: LoRA that experts share cannot be spread over ranks; give "
                "experts_shared_outer_loras=False, or shard the model instead"
            )
        for parameter, rows in of_experts(module).items():
            try:
                split_evenly("num_experts", len(rows), ranks)
            except ConfigError as error:
                raise ConfigError(f"expert: {name}.{parameter}: {error}") from None


def expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Spread the experts of `model` evenly over the ranks of a mesh, in place.

    Each rank keeps its part of its own values. Other parameters stay whole, so that FSDP2 can shard them over all
    ranks. Mixtures that have been spread before are not changed.

    Args:
        model: the model; under tensor parallelism, after `tensor_parallel`.
        mesh: a mesh with the dimension "expert", and under tensor parallelism with "tensor" as the second one.
    """
    ranks = mesh if mesh.ndim == 1 else mesh["expert"]
    rank, size = ranks.get_local_rank(), ranks.size()
    for _, module in mixtures(model):
        if module._expert_mesh is not None:
            continue
        for name, parameter in of_experts(module).items():
            whole = parameter.detach()
            tensor = whole.placements if isinstance(whole, DTensor) else ()  # of tensor parallelism
            part = (whole.to_local() if isinstance(whole, DTensor) else whole).chunk(size)[rank].clone()
            spread = DTensor.from_local(
                part, mesh, [Shard(0), *tensor], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            owner, _, key = name.rpartition(".")
            module.get_submodule(owner).register_parameter(key, nn.Parameter(spread, parameter.requires_grad))
        module._expert_mesh = ranks


def of_experts(module: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of a mixture, for its parameters with a row per expert."""
    names = type(module).expert_parallel  # type: ignore[attr-defined]
    return {name: parameter for name, parameter in module.named_parameters() if name.partition(".")[0] in names}
