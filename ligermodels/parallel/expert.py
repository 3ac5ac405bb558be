"""Expert parallelism of a model: which rank has which experts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ligermodels.errors import ConfigError
from ligermodels.layers.layer import declared
from ligermodels.layers.sharding import split_evenly


def mixtures(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose experts can be spread over ranks, by name."""
    for name, module in model.named_modules():
        if declared(module).expert_parallel:
            yield name, module


def check_expert_parallel(model: nn.Module, ranks: int) -> None:
    """Raises ConfigError, naming the field, unless the experts of a model can be spread over so many ranks."""
    found = list(mixtures(model))
    if not found:
        raise ConfigError("expert: the model has no mixture of experts that could be spread; leave it out")
    for name, module in found:
        for parameter, rows in of_experts(module).items():
            try:
                split_evenly("num_experts", len(rows), ranks)
            except ConfigError as error:
                raise ConfigError(f"expert: {name}.{parameter}: {error}") from None


def expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Spread the experts of a model over the ranks of `mesh`, of one dimension, in place: each has as many.

    Of values the first rank's are taken. What else the model has stays whole, for FSDP2 over all ranks; what has been
    spread already stays as it is.
    """
    for _, module in mixtures(model):
        if module._expert_mesh is not None:
            continue
        for name, parameter in of_experts(module).items():
            spread = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(spread, parameter.requires_grad))
        module._expert_mesh = mesh


def of_experts(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a mixture with a row for each expert."""
    found = {name: getattr(module, name) for name in type(module).expert_parallel}  # type: ignore[attr-defined]
    return {name: parameter for name, parameter in found.items() if parameter is not None}
