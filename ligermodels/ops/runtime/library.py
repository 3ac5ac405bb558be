"""Registration of the ops with torch.library, so that torch.compile sees each as one opaque node."""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ligermodels.errors import InputError

PLAIN = (Tensor, torch.nn.Parameter)
PLAIN_OR_NONE = (*PLAIN, type(None))


def is_plain(*tensors: Any) -> bool:
    """Whether each argument is None, a `Tensor` or a `Parameter`, and of no subclass such as a DTensor."""
    for tensor in tensors:  # noqa: SIM110  # a plain loop is the fastest: each op begins with it
        if type(tensor) not in PLAIN_OR_NONE:
            return False
    return True


_library = torch.library.Library("ligermodels", "FRAGMENT")

DISPATCH_KEYS = torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA
"""The keys of the dispatcher under which ops run their functions."""


_keep: dict[Any, Callable[..., bool]] = {}
"""Op -> function of its arguments: whether selective activation checkpointing keeps its results."""


_host_code: dict[Any, Callable[..., Any]] = {}
"""Op -> its function, if that runs on the meta device too."""


def host_code(op: Any) -> Callable[..., Any] | None:
    """The function of an op that was registered with `runs_on_meta`, for plans of memory; None for other ops."""
    return _host_code.get(op)


def always(*_: Any) -> bool:
    """For `custom_op`: keep the results of every call."""
    return True


def keeps_results(op: Any, args: Sequence[Any]) -> bool:
    """Whether selective activation checkpointing keeps the results of a call of `op`, as its registration declares.

    False for ops that are not registered here.
    """
    keep = _keep.get(op)
    return keep is not None and keep(*args)


class Rows(NamedTuple):
    """For `custom_op`: the op computes each row of its tensors by itself, so DTensors may be sharded by rows.

    whole: number of the last dimensions of the first tensor that cannot be sharded; or a function of the op's
        arguments, by name, that returns it.
    results: a function of the op's arguments, by name: whether each result has elements. None: all have.
    """

    whole: int | Callable[..., int] = 1
    results: Callable[..., Sequence[bool]] | None = None


def custom_op(
    mutates_args: Sequence[str] = (),
    *,
    keep: Callable[..., bool] | None = None,
    rows: Rows | None = None,
    runs_on_meta: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: register a function as `torch.ops.ligermodels.<its name>`, and return a function that calls the op.

    The schema comes from the function's annotations. The first argument is a tensor, and the function runs on its
    device, without torch's autocast: it computes in the dtypes of its operands. The function may change only the
    inputs in `mutates_args`, and may not return inputs or views of them. It also serves as the fake implementation: it
    allocates its results first, and returns them at once if `is_fake`.

    The op has no gradient: an autograd.Function calls it, and a backward pass through the op itself, as in a program of
    torch.export, raises RuntimeError.

    Eager calls with plain tensors and without a dispatch mode skip the dispatcher, because its overhead exceeds the
    time of a small kernel. DTensors follow the rules in `sharding`; an op without `rows` raises InputError for them.

    Args:
        mutates_args: names of the inputs that the function changes. Default: none.
        keep: called with the op's arguments; returns whether selective activation checkpointing keeps the results of
            the call instead of recomputing them. Default: None, it keeps no results.
        rows: how DTensors may be sharded. Default: None, the op takes no DTensors.
        runs_on_meta: whether the function, given tensors on the meta device, allocates all that it allocates on a GPU,
            without launching kernels: plans of memory then count its buffers. It returns its results at once only if
            `is_symbolic`. Default: False.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.strip("_")
        parameters = list(inspect.signature(function).parameters)
        mutated = [parameters.index(parameter) for parameter in mutates_args]

        def on_device(*args: Any) -> Any:
            device = args[0].device
            is_other = device.type == "cuda" and device.index != torch.cuda.current_device()
            if not is_other and not torch.is_autocast_enabled(device.type):
                return function(*args)
            with torch.cuda.device(device) if is_other else nullcontext(), torch.autocast(device.type, enabled=False):
                return function(*args)

        def on_device_in_place(*args: Any) -> Any:
            # autograd then raises an error if it saved these tensors before the change
            torch.autograd.graph.increment_version([args[i] for i in mutated if args[i] is not None])
            return on_device(*args)

        run = on_device_in_place if mutated else on_device

        _library.define(name + torch.library.infer_schema(function, mutates_args=mutates_args))
        op = getattr(torch.ops.ligermodels, name).default

        def on_autograd(keys: Any, *args: Any) -> Any:
            # A program of torch.export calls the op itself, without the autograd.Function around it.
            keys = keys & torch._C._after_ADInplaceOrView_keyset
            if _needs_gradient(args):
                return _WithoutGradient.apply(op, keys, args, *_tensors(args))
            if keys.highestPriorityTypeId() in DISPATCH_KEYS:  # a compiled graph calls ops often: redispatch costs 3 us
                return run(*args)
            return _below_autograd(op, keys, *args)

        for key in DISPATCH_KEYS:
            _library.impl(name, run, key.name)
        _library.impl(name, on_autograd, "Autograd", with_keyset=True)
        torch.library.register_fake(f"ligermodels::{name}", function, lib=_library)
        if keep is not None:
            _keep[op] = keep
        if runs_on_meta:
            _host_code[op] = function

        sharded = False

        def call(*args: Any) -> Any:
            nonlocal sharded
            if torch.compiler.is_compiling():  # compilers trace no further; torch 2.11 does not take named tuples
                return op(*[[*each] if isinstance(each, tuple) else each for each in args])
            if type(args[0]) not in PLAIN or args[0].is_meta or torch._C._len_torch_dispatch_stack():
                if not sharded and is_dtensor(args[0]):
                    _sharding().register(op, rows)
                    sharded = True
                return op(*args)
            return op(*args) if _needs_gradient(args) else run(*args)

        return call

    return register


def _tensors(args: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of an op, and in its lists of tensors."""
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from (each for each in x if isinstance(each, Tensor))


def _needs_gradient(args: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in _tensors(args))


def _below_autograd(op: Any, keys: Any, *args: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keys, *args)


class _WithoutGradient(torch.autograd.Function):
    """A call of an op with `args`, recorded by autograd through their tensors: its backward pass raises an error, so
    no gradient stops here silently."""

    @staticmethod
    def forward(ctx, op, keys, args, *tensors):
        ctx.op = op
        results = _below_autograd(op, keys, *args)
        return tuple(results) if isinstance(results, list) else results

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(
            f"{ctx.op.name()} has no gradient. A program of torch.export is for inference: call it under "
            "torch.no_grad(); to train, call the model itself"
        )


def _sharding() -> Any:
    return importlib.import_module("ligermodels.ops.runtime.sharding")


def is_dtensor(x: Any) -> bool:
    """Whether x is a DTensor; it does not import them."""
    return type(x) not in PLAIN and "torch.distributed.tensor" in sys.modules and _sharding().is_dtensor(x)


def replicated(op: str, x: Tensor, **others: Tensor | None) -> list[Any]:
    """The arguments of an op beside x. If x is a DTensor, plain tensors become replicated DTensors on its mesh.

    Args:
        op: name of the op, for the message.
        x: the first argument of the op.
        others: its other tensors, by name.

    Raises:
        InputError: another argument is a DTensor, but x is not.
    """
    tensors = list(others.values())
    if is_plain(x, *tensors):
        return tensors
    if torch.compiler.is_compiling() or not any(is_dtensor(t) for t in (x, *tensors) if t is not None):
        return tensors
    return list(_sharding().replicated(op, x, others))


def reject_dtensors(op: str, *tensors: Tensor | None) -> None:
    """Raise InputError if a tensor is a DTensor: for ops that have no rule in `sharding`."""
    if is_plain(*tensors):
        return
    if not torch.compiler.is_compiling() and any(is_dtensor(t) for t in tensors if t is not None):
        raise InputError(
            f"{op} takes no DTensors: pass local tensors (x.to_local()), or gather first (x.full_tensor())"
        )


def is_fake(x: Tensor) -> bool:
    """Whether x has a shape and dtype, but no data. Then no kernel and no code that reads values may run.

    Functions under `custom_op` check it right after they allocate their results. Sizes may be symbolic, and a branch on
    a size would make a compiled graph valid for this size only.
    """
    return x.is_meta or is_symbolic(x)


def is_symbolic(x: Tensor) -> bool:
    """Whether x is a tensor of a compiler's trace, whose sizes may be symbolic."""
    return isinstance(x, FakeTensor)


def mark_constants(ctx: Any, *outputs: tuple[Tensor, Sequence[int]]) -> None:
    """In the forward pass of an autograd.Function: outputs whose inputs need no gradients will not require gradients.

    Without it each output requires a gradient if one of the inputs does.

    Args:
        ctx: the context of the function.
        outputs: (output, numbers of the inputs on which it depends).
    """
    needs = ctx.needs_input_grad
    ctx.mark_non_differentiable(*(output for output, inputs in outputs if not any(needs[i] for i in inputs)))


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for the backward pass of an autograd.Function that has no second derivatives.

    A backward pass with `create_graph=True` raises RuntimeError. torch's own `once_differentiable` does not suffice:
    its gradients count as constants where the gradient of the output requires none, as in `loss.backward()`, and in
    `torch.autograd.grad` for chosen inputs.

    The function returns the gradients of the first inputs. None replaces gradients that are not needed, and follows for
    the other inputs.
    """
    name = backward.__qualname__.split(".")[0].strip("_")

    @functools.wraps(backward)
    def call(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        # Gradients are recorded only with create_graph=True. A compiled graph refuses second derivatives itself.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(f"{name} has no second derivatives: leave create_graph=True out")
        needs = ctx.needs_input_grad
        results = *backward(ctx, *gradients), *[None] * len(needs)
        return tuple(g if need else None for g, need in zip(results, needs, strict=False))

    call.refuses_second_derivatives = True  # type: ignore[attr-defined]
    return call
