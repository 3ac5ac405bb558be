"""Models whose parameters are sharded over ranks, by FSDP2 or tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist
from torch import Tensor, nn

Result = TypeVar("Result")


class ModuleLike(Protocol):
    """What these functions need of a module; every nn.Module is one."""

    def modules(self) -> Iterator[nn.Module]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def eval(self) -> Any: ...


def reshard(module: ModuleLike) -> None:
    """Give back the parameters that FSDP2 gathered for a forward pass without a backward pass.

    It keeps those of the root until then, and meanwhile `module.parameters()` are the gathered ones.
    """
    for each in module.modules():
        if callable(shard := getattr(each, "reshard", None)):
            shard()


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, of a DTensor by a collective call of all ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def is_sharded(module: ModuleLike) -> bool:
    """Whether a parameter is a DTensor."""
    return any(hasattr(parameter, "device_mesh") for parameter in module.parameters())


def call_gathered(module: nn.Module, function: Callable[..., Result], *args: Any, **options: Any) -> Result:
    """`function(*args, **options)`; if FSDP2 shards `module`, its parameters are gathered for the call, as they are for
    its `forward`."""
    if not callable(getattr(module, "unshard", None)):
        return function(*args, **options)
    if "_call" not in vars(module):
        from torch.distributed.fsdp import register_fsdp_forward_method  # a large import

        vars(module)["_call"] = lambda function, *args, **options: function(*args, **options)
        register_fsdp_forward_method(module, "_call")
    return cast(Callable[..., Result], module._call)(function, *args, **options)


def end_of_decoding(model: ModuleLike) -> Callable[[Tensor], Tensor]:
    """A function of `done`, bool (B,): whether all sequences are; of a sharded model, those of all ranks.

    Until then every rank has to take part in each forward pass.
    """

    def all_ranks(done: Tensor) -> Tensor:
        flag = done.all().int()
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return flag.bool()

    return all_ranks if is_sharded(model) and dist.is_initialized() else Tensor.all
