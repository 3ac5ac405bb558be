"""Models whose parameters are sharded over ranks, by FSDP2 or tensor parallelism.

Under tensor parallelism every parameter is a DTensor, and modules compute with plain tensors: hidden states, the same
on all ranks or a part of the tokens on each (`layers.token_parts`), and this rank's channels of whatever lies between a
projection by columns and one by rows. A class of modules that can do so has a `tensor_parallel`, a mapping that says
how its parameters, and the linear layers within it, are distributed (`TensorSharding`); what else is within it has one
of its own. Its forward takes its own parameters by `local`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import token_parts
from ligermodels.ops.runtime.library import PLAIN_OR_NONE

TensorSharding = int | Literal["replicated", "columns", "gathered_columns", "columns_to_all", "rows"]
"""A parameter is sharded in this dimension, or replicated. Of a linear layer "columns" shards the output channels and
"rows" the input channels, whose products are summed over ranks; "replicated" does neither. "gathered_columns" is
"columns" for an input that is a result of `used_in_parts`, and "columns_to_all" is "columns" whose outputs all ranks
are given, to use some of them: see `own_part_of_each`."""

Result = TypeVar("Result")


class ModuleLike(Protocol):
    """What these functions need of a module; every nn.Module is one."""

    def modules(self) -> Iterator[nn.Module]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def eval(self) -> Any: ...


def local(module: nn.Module, parameter: Any, *, partial: bool = False) -> Any:
    """What `module` computes with of its own `parameter`: itself, or under tensor parallelism this rank's part.

    partial: the parameter is replicated, but used for this rank's channels alone, so that the ranks' gradients are to
    be summed; so they are where it is used for a part of the tokens."""
    if type(parameter) in PLAIN_OR_NONE or not is_tensor_parallel(module):
        return parameter
    return _local_tensors().local(parameter, partial=partial or token_parts.current() is not None)


def on_all_ranks(module: nn.Module, x: Tensor, parameter: Tensor) -> Tensor:
    """x as an operand of what `local` gives of a sharded `parameter`: all tokens. Its gradient is summed over ranks."""
    if not is_tensor_parallel(module):
        return x
    if (parts := token_parts.current()) is not None:
        return parts.gather(x)
    if x.is_meta:  # where no ranks are
        return x
    return cast(Tensor, _local_tensors().on_all_ranks(x, parameter))


def used_in_parts(module: nn.Module, x: Tensor) -> Tensor:
    """x of all tokens, which each rank uses for its part of `module`: its gradient is summed over ranks."""
    if not is_tensor_parallel(module):
        return x
    if (parts := token_parts.current()) is not None:
        return parts.gather(x)
    if x.is_meta:  # where no ranks are
        return x
    return cast(Tensor, _local_tensors().with_gradients_summed(x, module._tensor_mesh))


def sum_over_ranks(module: nn.Module, x: Tensor, parameter: Tensor) -> Tensor:
    """The sum of x, computed with what `local` gives of a sharded `parameter`, over ranks: of this rank's tokens."""
    if not is_tensor_parallel(module):
        return x
    if (parts := token_parts.current()) is not None:
        return parts.sum(x)
    if x.is_meta:  # where no ranks are
        return x
    return cast(Tensor, _local_tensors().sum_over_ranks(x, parameter))


def mean_over_ranks(module: nn.Module, x: Tensor) -> Tensor:
    """The mean over ranks of x, of all tokens and this rank's channels, which each uses for its part of `module`: its
    gradient is summed over ranks."""
    if not is_tensor_parallel(module) or x.is_meta:
        return x
    return cast(Tensor, _local_tensors().mean_over_ranks(x, module._tensor_mesh))


def of_all_tokens(module: nn.Module, x: Tensor) -> Tensor:
    """x of all tokens, for what all ranks compute alike."""
    parts = token_parts.current() if is_tensor_parallel(module) else None
    return x if parts is None else parts.whole(x)


def gather_last(module: nn.Module, x: Tensor, parameter: Tensor, *, partial: bool = False) -> Tensor:
    """x (..., n) of all ranks, (..., len(parameter)), where `parameter` is sharded in its first dimension.

    partial: each rank uses it in its own way, so that the ranks' gradients are to be summed."""
    if not is_tensor_parallel(module):
        return x
    if x.is_meta:  # where no ranks are: `parameter` is a rank's part
        return torch.cat([x] * cast(Any, module._tensor_mesh).size(), -1)
    return cast(Tensor, _local_tensors().gather_last(x, parameter, partial=partial))


def own_part_of_each(module: nn.Module, x: Tensor, parts: Sequence[int], dim: int = -1) -> Tensor:
    """This rank's share of each of the parts that follow one another in a dimension of x, which all ranks have; x
    itself where the module is not tensor-parallel. Gradients of the others' are zero.

    parts: their sizes, or relative ones."""
    if not is_tensor_parallel(module):
        return x
    mesh, unit = cast(Any, module._tensor_mesh), x.shape[dim] // sum(parts)
    shares = [each.chunk(mesh.size(), dim)[mesh.get_local_rank()] for each in x.split([unit * n for n in parts], dim)]
    return torch.cat(shares, dim)


def on_first_rank(module: nn.Module, parameter: Any) -> Any:
    """`local` of a replicated parameter that is added to what is then summed over ranks: zeros on all but the first."""
    if type(parameter) in PLAIN_OR_NONE or not is_tensor_parallel(module):
        return parameter
    return local(module, parameter, partial=True) * float(_local_tensors().is_first_rank(parameter))


def dropout(module: nn.Module, x: Tensor, p: float, dim: int | None) -> Tensor:
    """x after dropout with probability p. dim: that in which x is this rank's part; None where all ranks have the same,
    and are to drop the same."""
    if not is_tensor_parallel(module) or x.is_meta:
        return F.dropout(x, p)
    return cast(Tensor, _local_tensors().dropout(x, p, module._tensor_mesh, dim))


def is_tensor_parallel(module: nn.Module) -> bool:
    """Whether `parallel.tensor_parallel` has distributed the parameters of this module."""
    return vars(module).get("_tensor_mesh") is not None


def split_evenly(field: str, size: int, ranks: int) -> int:
    """size / ranks; ConfigError, naming the field, where that is no whole number."""
    if size % ranks:
        known = ", ".join(str(each) for each in range(1, size + 1) if size % each == 0)
        raise ConfigError(f"{field}: {size} cannot be split evenly over {ranks} ranks; its divisors are {known}")
    return size // ranks


def _local_tensors() -> Any:
    from ligermodels.ops.runtime import local_tensors  # imports DTensors, which takes long

    return local_tensors


def reshard(module: ModuleLike) -> None:
    """Give back the parameters that FSDP2 gathered for a forward pass without a backward pass.

    It keeps those of the root until then, and meanwhile `module.parameters()` are the gathered ones.
    """
    for each in module.modules():
        if callable(shard := getattr(type(each), "reshard", None)):  # FSDP2 gives its modules a class of their own
            shard(each)


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, of a DTensor by a collective call of all ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def is_sharded(module: ModuleLike) -> bool:
    """Whether a parameter is a DTensor, or is partitioned by DeepSpeed's ZeRO-3."""
    return any(hasattr(each, "device_mesh") or hasattr(each, "ds_id") for each in module.parameters())


def check_not_partitioned(name: str, parameter: Tensor) -> None:
    """InputError for a parameter that DeepSpeed's ZeRO-3 has partitioned: it is empty while nobody gathers it."""
    if parameter.shape != getattr(parameter, "ds_shape", parameter.shape):
        raise InputError(
            f"{name}: is partitioned by DeepSpeed's ZeRO-3, and empty outside of forward passes; save the model within "
            "deepspeed.zero.GatheredParameters(list(model.parameters())), and make it outside of deepspeed.zero.Init"
        )


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


def chosen_together(model: ModuleLike, choose: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`choose`, of logits (B, V) -> long (B,); under tensor parallelism the choice of the first rank, for all: each
    draws random numbers of its own."""
    found = (vars(module).get("_tensor_mesh") for module in model.modules())
    if (mesh := next((each for each in found if each is not None), None)) is None:
        return choose
    group = mesh.get_group()

    def of_first_rank(logits: Tensor) -> Tensor:
        chosen = choose(logits).contiguous()
        dist.broadcast(chosen, group=group, group_src=0)
        return chosen

    return of_first_rank


def require_same_on_ranks(model: ModuleLike, name: str, value: int, advice: str) -> None:
    """Of a sharded model, InputError on all ranks unless all have the same `value`: they would wait for one another."""
    if dist.is_initialized() and is_sharded(model):
        most = torch.tensor([value, -value], device=next(model.parameters()).device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        high, low = most[0].item(), -most[1].item()
        if high != low:
            raise InputError(f"{name}: is {low} to {high} on the ranks of a sharded model, here {value}; {advice}")


def end_of_decoding(model: ModuleLike) -> Callable[[Tensor], Tensor]:
    """A function of `done`, bool (B,): whether all sequences are; of a sharded model, those of all ranks.

    Until then every rank has to take part in each forward pass.
    """

    def all_ranks(done: Tensor) -> Tensor:
        flag = done.all().int()
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return flag.bool()

    return all_ranks if dist.is_initialized() and is_sharded(model) else Tensor.all
