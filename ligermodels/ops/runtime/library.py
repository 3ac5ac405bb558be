"""Registration of the ops with torch.library, so that torch.compile sees each as one opaque node."""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.function
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ligermodels.errors import InputError

PLAIN = (Tensor, torch.nn.Parameter)
PLAIN_OR_NONE = (*PLAIN, type(None))
_library = torch.library.Library("ligermodels", "FRAGMENT")


_keep: dict[Any, Callable[..., bool]] = {}
"""Ops whose results selective activation checkpointing keeps, depending on their arguments."""


def always(*_: Any) -> bool:
    """For `custom_op`: keep the results of every call."""
    return True


def keeps_results(op: Any, args: Sequence[Any]) -> bool:
    """Whether selective activation checkpointing keeps the results of a call of `op`, as its registration declares.

    False for ops that are not registered here.
    """
    keep = _keep.get(op)
    return keep is not None and keep(*args)


def custom_op(
    mutates_args: Sequence[str] = (), *, keep: Callable[..., bool] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: registers a function as `torch.ops.ligermodels.<its name>`, and returns a call of that op.

    The schema comes from the function's annotations. The first argument is a tensor: the function runs on its device.
    It may change only the inputs in `mutates_args`, may not return inputs or views of them, and has no gradient of its
    own. It is its own fake: it allocates its results first, and returns them at once if `is_fake`.

    Args:
        mutates_args: names of the inputs that the function changes.
        keep: a function of the op's arguments: whether selective activation checkpointing keeps the results of the
            call, instead of computing them again. By default it keeps none.

    Eagerly, with plain tensors and no dispatch mode, the function is called without the dispatcher, whose overhead
    would exceed the time of a small kernel. DTensors go by the rules in `sharding`; an op that has none there raises
    InputError.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.strip("_")
        parameters = list(inspect.signature(function).parameters)
        mutated = [parameters.index(parameter) for parameter in mutates_args]

        def on_device(*args: Any) -> Any:
            if mutated:  # autograd then raises an error if it saved these tensors before the change
                torch.autograd.graph.increment_version([args[i] for i in mutated if args[i] is not None])
            device = args[0].device
            if device.type == "cuda" and device.index != torch.cuda.current_device():
                with torch.cuda.device(device):
                    return function(*args)
            return function(*args)

        _library.define(name + torch.library.infer_schema(function, mutates_args=mutates_args))
        for key in ("CPU", "CUDA"):
            _library.impl(name, on_device, key)
        torch.library.register_fake(f"ligermodels::{name}", function, lib=_library)
        op = getattr(torch.ops.ligermodels, name).default
        if keep is not None:
            _keep[op] = keep

        sharded = False

        def call(*args: Any) -> Any:
            nonlocal sharded
            if torch.compiler.is_compiling():  # compilers trace no further
                return op(*args)
            if type(args[0]) not in PLAIN or args[0].is_meta or torch._C._len_torch_dispatch_stack():
                if not sharded and is_dtensor(args[0]):
                    _sharding().register(name, op)
                    sharded = True
                return op(*args)
            if not torch.is_grad_enabled():  # as within the passes of an autograd.Function
                return on_device(*args)
            with torch._C._AutoDispatchBelowAutograd():
                return on_device(*args)

        return call

    return register


def _sharding() -> Any:
    return importlib.import_module("ligermodels.ops.runtime.sharding")


def is_dtensor(x: Any) -> bool:
    """Whether x is a DTensor; it does not import them."""
    return type(x) not in PLAIN and "torch.distributed.tensor" in sys.modules and _sharding().is_dtensor(x)


def replicated(op: str, x: Tensor, **others: Tensor | None) -> list[Any]:
    """The other arguments of an op on x: if x is a DTensor, plain ones become replicated DTensors on its mesh.

    Raises InputError if x is plain, but one of the others a DTensor."""
    given = list(others.values())
    for t in (x, *given):  # a plain loop: ops begin with this
        if type(t) not in PLAIN_OR_NONE:
            break
    else:
        return given
    if torch.compiler.is_compiling() or not any(is_dtensor(t) for t in (x, *given) if t is not None):
        return given
    return list(_sharding().replicated(op, x, others))


def reject_dtensors(op: str, *tensors: Tensor | None) -> None:
    """Raises InputError if one of these is a DTensor: for ops that have no rule in `sharding`."""
    for t in tensors:  # a plain loop: ops begin with this
        if type(t) not in PLAIN_OR_NONE:
            break
    else:
        return
    if not torch.compiler.is_compiling() and any(is_dtensor(t) for t in tensors if t is not None):
        raise InputError(
            f"{op} takes no DTensors: pass local tensors (x.to_local()), or gather first (x.full_tensor())"
        )


def is_fake(x: Tensor) -> bool:
    """Whether x has a shape and a dtype, but no data: then no kernel may run, and no code that reads values.

    Functions under `custom_op` check it right after allocating their results. Sizes may be symbolic there, and code
    that branches on them would make a compiled graph valid for those sizes only.
    """
    return x.is_meta or isinstance(x, FakeTensor)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.autograd.function.once_differentiable`, without its overhead unless second derivatives are asked for.

    The function returns the gradients of the first inputs. Those that are not needed may be anything: None replaces
    them, and follows for the other inputs.
    """

    def needed(ctx: Any, *gradients: Any) -> Any:
        needs = ctx.needs_input_grad
        found = *backward(ctx, *gradients), *[None] * len(needs)
        return tuple(g if need else None for g, need in zip(found, needs, strict=False))

    guarded = torch.autograd.function.once_differentiable(needed)

    @functools.wraps(backward)
    def call(ctx: Any, *gradients: Any) -> Any:
        return (guarded if torch.is_grad_enabled() else needed)(ctx, *gradients)

    return call
