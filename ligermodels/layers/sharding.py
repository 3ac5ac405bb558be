"""How modules compute with parameters that are sharded over ranks, by FSDP2 or tensor parallelism.

Under tensor parallelism all parameters are DTensors, but modules compute with plain tensors. Hidden states are the same
on all ranks, or each rank has some of the tokens (`layers.sequence_parallel`). Between a projection by columns and a
projection by rows, each rank has some of the channels. A class of modules that supports this declares
`tensor_parallel`: it maps the names of the class's own parameters, and of the linear layers in it, to a
`TensorSharding`; other submodules have a `tensor_parallel` of their own. The module's forward reads its own parameters
through `local`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import sequence_parallel
from ligermodels.ops.runtime.collectives import Ranks
from ligermodels.ops.runtime.library import is_dtensor, is_plain

TensorSharding = int | Literal["replicated", "columns", "gathered_columns", "columns_to_all", "rows"]
"""How a parameter or a linear layer is distributed.

A parameter is sharded in this dimension, or "replicated". In a linear layer, "columns" shards the output channels;
"rows" shards the input channels, and the products are summed over ranks; "replicated" shards neither.
"gathered_columns" is "columns" for an input that is already a result of `used_in_parts`. "columns_to_all" is "columns"
with the outputs of all ranks gathered on each rank, as `own_part_of_each` takes them.
"""

Result = TypeVar("Result")


class ModuleLike(Protocol):
    """The methods of nn.Module that these functions call."""

    def modules(self) -> Iterator[nn.Module]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def eval(self) -> Any: ...


def local(module: nn.Module, parameter: Any, *, partial: bool = False) -> Any:
    """This rank's shard of a parameter of `module`; without tensor parallelism the parameter itself.

    Args:
        module: the module that computes with the parameter.
        parameter: a parameter of its own, or None.
        partial: a replicated parameter is used with this rank's channels only, so that its gradient is summed over
            ranks. It is also summed where each rank has some of the tokens. Default: False.
    """
    if is_plain(parameter) or not is_tensor_parallel(module):
        return parameter
    from ligermodels.ops.runtime.local_tensors import local as local_tensor  # imports DTensors, which takes long

    return local_tensor(parameter, partial=partial or sequence_parallel.current() is not None)


def own_experts(parameter: Any) -> Any:
    """This rank's experts of a parameter with a row per expert, which expert parallelism or FSDP2 may have spread; None
    for None."""
    return parameter.to_local() if parameter is not None and is_dtensor(parameter) else parameter


def used_in_parts(module: nn.Module, x: Tensor) -> Tensor:
    """x with all tokens, for ranks that each use it with their shard of `module`. The gradient is summed over ranks."""
    if not is_tensor_parallel(module):
        return x
    if (parts := _sequence_parts(module)) is not None:
        return parts.gather(x)
    ranks = _ranks(module, x)
    return x if ranks is None else ranks.sum_gradients(x)


def sum_over_ranks(module: nn.Module, x: Tensor) -> Tensor:
    """The sum over ranks of x, which each rank computed with its shard of `module`: all tokens, or this rank's."""
    if (parts := _sequence_parts(module)) is not None:
        return parts.reduce_scatter(x)
    ranks = _ranks(module, x)
    return x if ranks is None else ranks.total(x)


def mean_over_ranks(module: nn.Module, x: Tensor) -> Tensor:
    """The mean of x over ranks, for ranks that each use it with their shard of `module`; x has all tokens.

    The gradient is summed over ranks.
    """
    ranks = _ranks(module, x)
    return x if ranks is None else ranks.all_reduce(x) / ranks.size


def of_all_tokens(module: nn.Module, x: Tensor) -> Tensor:
    """x with all tokens, for computations that are the same on all ranks."""
    parts = _sequence_parts(module)
    return x if parts is None else parts.restore(x)


def gather_last(module: nn.Module, x: Tensor, size: int, *, partial: bool = False) -> Tensor:
    """Concatenate the last dimension of x over ranks.

    Args:
        module: the module whose shards computed x.
        x: (..., n), of this rank. Sizes n are as `torch.chunk` divides `size`.
        size: size of the whole dimension.
        partial: each rank uses the result differently, so that its gradient is summed over ranks. Default: False.

    Returns:
        (..., size), contiguous; x itself without tensor parallelism.
    """
    if not is_tensor_parallel(module):
        return x
    if (ranks := _ranks(module, x)) is None:  # on the meta device `size` is of one rank too
        return torch.cat([x] * cast(Any, module._tensor_mesh).size(), -1)
    most = -(-size // ranks.size)
    if padding := most - x.shape[-1]:
        x = F.pad(x, (0, padding))
    shards = ranks.gather(x[None]) if partial else ranks.whole(x[None])
    return torch.cat([shard[..., : size - i * most] for i, shard in enumerate(shards)], -1)


def own_part_of_each(module: nn.Module, x: Tensor, parts: Sequence[int], dim: int = -1) -> Tensor:
    """This rank's share of each of several consecutive parts of x; x itself without tensor parallelism.

    Args:
        module: the module that computes with the shares.
        x: any shape, the same on all ranks. Elements of other ranks get a gradient of zero.
        parts: sizes of the parts, or sizes relative to one another.
        dim: the dimension that consists of the parts. Default: the last one.
    """
    if not is_tensor_parallel(module):
        return x
    mesh, unit = cast(Any, module._tensor_mesh), x.shape[dim] // sum(parts)
    shares = [part.chunk(mesh.size(), dim)[mesh.get_local_rank()] for part in x.split([unit * n for n in parts], dim)]
    return torch.cat(shares, dim)


def on_first_rank(module: nn.Module, parameter: Any) -> Any:
    """`local` of a replicated parameter that is added to a summand of `sum_over_ranks`: zeros except on rank 0."""
    if is_plain(parameter) or not is_tensor_parallel(module):
        return parameter
    first = cast(Any, module._tensor_mesh).get_local_rank() == 0
    return local(module, parameter, partial=True) * float(first)


def is_tensor_parallel(module: nn.Module) -> bool:
    """Whether `parallel.tensor_parallel` has distributed the parameters of this module."""
    return vars(module).get("_tensor_mesh") is not None


def split_evenly(field: str, size: int, ranks: int) -> int:
    """size / ranks; ConfigError, naming the field, where that is no whole number."""
    if size % ranks:
        known = ", ".join(str(each) for each in range(1, size + 1) if size % each == 0)
        raise ConfigError(f"{field}: {size} cannot be split evenly over {ranks} ranks; its divisors are {known}")
    return size // ranks


def _sequence_parts(module: nn.Module) -> sequence_parallel.SequenceParts | None:
    """How the tokens are divided over the ranks that compute `module`; None if each rank has all tokens."""
    return sequence_parallel.current() if is_tensor_parallel(module) else None


def _ranks(module: nn.Module, x: Tensor) -> Ranks | None:
    """The tensor-parallel ranks that exchange x; None without tensor parallelism, or if x is on the meta device."""
    mesh = vars(module).get("_tensor_mesh")
    return None if mesh is None or x.is_meta else Ranks.of(mesh)


def reshard(module: ModuleLike) -> None:
    """Shard the parameters again that FSDP2 gathered for a forward pass without a backward pass.

    FSDP2 keeps the root's parameters gathered until the backward pass; until then `module.parameters()` returns the
    gathered parameters, and another pass computes with them, also after a step of the optimizer.
    """
    for submodule in module.modules():
        if is_fsdp(submodule):
            cast(Any, submodule).reshard()


def reshard_before_pass(module: nn.Module) -> None:
    """`reshard` and `check_not_cast` before a pass of a root of FSDP2; nothing for other modules."""
    if is_fsdp(module):
        reshard(module)
        check_not_cast(module)


def check_not_cast(root: nn.Module) -> None:
    """Raise InputError if a root of FSDP2 was cast since its first pass.

    FSDP2 keeps the tensors into which it gathers parameters, and fails with those of another dtype.
    """
    if torch.compiler.is_compiling():
        return
    now = [parameter.dtype for parameter in root.parameters() if is_dtensor(parameter)]
    first = vars(root).setdefault("_dtypes_of_passes", now)
    if len(first) != len(now):  # parameters were added or removed, or are gathered for a pass around this one
        vars(root)["_dtypes_of_passes"] = now
    elif first != now:
        was, is_now = next(pair for pair in zip(first, now, strict=True) if pair[0] != pair[1])
        raise InputError(
            f"to: the model was cast from {was} to {is_now} after a forward pass, and FSDP2 computes in the dtypes of "
            "its first pass; cast the model before that pass (or load it with dtype=), or give "
            "ParallelPlan(param_dtype=) to compute in another dtype than the parameters have"
        )


def check_not_freed(parameters: Iterable[Tensor]) -> None:
    """Raise InputError for a parameter of an optimizer that FSDP2 had gathered for a pass, and has freed since.

    Such an optimizer was made between a forward pass and its backward pass. Its parameters never get a gradient.
    """
    for parameter in parameters:
        own: Tensor = cast(Any, parameter)._local_tensor if is_dtensor(parameter) else parameter
        if is_plain(own) and own.numel() and not own.is_meta and not own.untyped_storage().nbytes():
            raise InputError(
                "optimizer: was made after a forward pass without a backward pass, when FSDP2 had gathered parameters, "
                f"and would not train the one of shape {tuple(own.shape)}; make it before that pass, or run the pass "
                "under torch.no_grad()"
            )


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor. For a DTensor this is a collective call of all ranks."""
    return cast(Any, tensor).full_tensor() if is_dtensor(tensor) else tensor


def is_fsdp(module: nn.Module) -> bool:
    """Whether FSDP2 shards this module: it has then gathered its parameters when its forward runs."""
    return hasattr(type(module), "unshard")


def is_sharded(module: ModuleLike) -> bool:
    """Whether parameters are sharded over ranks, also while FSDP2 has gathered all of them."""
    return holds_shards(module) or any(map(is_fsdp, module.modules()))


def holds_shards(module: ModuleLike) -> bool:
    """Whether a parameter is a DTensor now, or is partitioned by DeepSpeed's ZeRO-3."""
    return any(is_dtensor(p) or hasattr(p, "ds_id") for p in module.parameters())


def check_not_partitioned(name: str, parameter: Tensor) -> None:
    """Raise InputError for a parameter that DeepSpeed's ZeRO-3 has partitioned: it is empty until it is gathered."""
    if parameter.shape != getattr(parameter, "ds_shape", parameter.shape):
        raise InputError(
            f"{name}: is partitioned by DeepSpeed's ZeRO-3, and empty outside of forward passes; save the model within "
            "deepspeed.zero.GatheredParameters(list(model.parameters())), and make it outside of deepspeed.zero.Init"
        )


def call_gathered(module: nn.Module, function: Callable[..., Result], *args: Any, **options: Any) -> Result:
    """Call a function that uses a module's parameters. FSDP2 gathers them for the call, as for the module's forward.

    Args:
        module: the module, sharded by FSDP2 or not.
        function: the function.
        args: its arguments.
        options: its keyword arguments.

    Returns:
        The function's result.
    """
    if not is_fsdp(module):
        return function(*args, **options)
    start_at_root(module)
    gather_before_inference(module)
    if "_call" not in vars(module):
        from torch.distributed.fsdp import register_fsdp_forward_method  # a large import

        vars(module)["_call"] = lambda function, *args, **options: function(*args, **options)
        register_fsdp_forward_method(module, "_call")
    try:
        return cast(Callable[..., Result], module._call)(function, *args, **options)
    except BaseException:
        shard_after_error(module)
        raise


def start_at_root(module: nn.Module) -> None:
    """Before the first pass of a module that `set_root` knows, start FSDP2 at its root.

    FSDP2 takes the first module that gathers parameters as the root, and raises an error when a module around it
    follows: the base of draft heads may be called before the heads.
    """
    vars(module)["_has_started"] = True
    root = vars(module).get("_root", lambda: None)()
    if root is not None and not vars(root).get("_has_started"):
        with torch.inference_mode(False), torch.no_grad():
            call_gathered(root, lambda: None)
            reshard(root)


def set_root(root: nn.Module) -> None:
    """Tell all modules in `root` that FSDP2 shards that it is their root: see `start_at_root`."""
    for module in root.modules():
        if module is not root and is_fsdp(module):
            vars(module)["_root"] = weakref.ref(root)


def shard_after_error(module: nn.Module) -> None:
    """Shard a module's parameters again that FSDP2 gathered for a pass that ended with an error."""
    module.state_dict(keep_vars=True)  # has FSDP2's hooks for it; its `reshard` does nothing within a forward pass


def gather_before_inference(module: nn.Module, *_: Any) -> None:
    """Under torch.inference_mode, gather each group of FSDP2 in a module once outside of it; also a forward pre-hook.

    FSDP2 keeps the tensors of its first gathering for all later ones. As inference tensors they would fail in the next
    forward pass, without a message that names the cause.
    """
    if not torch.is_inference_mode_enabled() or vars(module).get("_is_gathered"):
        return
    with torch.inference_mode(False), torch.no_grad():
        for part in module.modules():
            if is_fsdp(part) and not vars(part).get("_is_gathered"):
                cast(Any, part).unshard()
                cast(Any, part).reshard()
                vars(part)["_is_gathered"] = True


def chosen_together(model: ModuleLike, choose: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function that samples the same tokens on all tensor-parallel ranks.

    Args:
        model: the model.
        choose: logits (B, V) -> tokens, long (B,). Each rank would draw random numbers of its own.

    Returns:
        `choose`; under tensor parallelism a function that calls it and broadcasts the result of rank 0.
    """
    meshes = (vars(module).get("_tensor_mesh") for module in model.modules())
    if (mesh := next((mesh for mesh in meshes if mesh is not None), None)) is None:
        return choose
    group = mesh.get_group()

    def of_first_rank(logits: Tensor) -> Tensor:
        chosen = choose(logits).contiguous()
        dist.broadcast(chosen, group=group, group_src=0)
        return chosen

    return of_first_rank


def require_same_on_ranks(model: ModuleLike, name: str, value: int, advice: str) -> None:
    """Raise InputError on all ranks of a sharded model unless all pass the same value; collectives would hang.

    Args:
        model: the model.
        name: name of the value, for the message.
        value: this rank's value.
        advice: end of the message.
    """
    if dist.is_initialized() and is_sharded(model):
        most = torch.tensor([value, -value], device=next(model.parameters()).device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        high, low = most[0].item(), -most[1].item()
        if high != low:
            raise InputError(f"{name}: is {low} to {high} on the ranks of a sharded model, here {value}; {advice}")


def end_of_decoding(model: ModuleLike) -> Callable[[Tensor], Tensor]:
    """A function of `done`, bool (B,), that tells whether all sequences are done.

    For a sharded model it counts the sequences of all ranks, because all ranks must take part in each forward pass.
    """

    def all_ranks(done: Tensor) -> Tensor:
        flag = done.all().int()
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return flag.bool()

    return all_ranks if dist.is_initialized() and is_sharded(model) else Tensor.all
