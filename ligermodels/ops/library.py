"""Registration of the ops with torch.library, so that torch.compile sees each as one opaque node."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.function

PLAIN = (torch.Tensor, torch.nn.Parameter)
_library = torch.library.Library("ligermodels", "FRAGMENT")


def opaque_op(
    fake: Callable[..., Any], mutates: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: registers a function as `torch.ops.ligermodels.<its name>`; the result calls that op.

    The schema comes from the function's annotations. `fake` takes the same arguments and returns empty tensors of the
    shapes, dtypes and strides of the results. The function's first argument is a tensor (or a list of them): it runs on
    the device of that. The function may change no inputs but the tensors that `mutates` names, nor return its inputs or
    views of them, and has no gradient of its own. In eager mode, where nobody looks on (no tensor subclass, meta
    tensor or dispatch mode), the function is called past the dispatcher, whose boxing would take longer than a small
    kernel.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.strip("_")
        parameters = list(inspect.signature(function).parameters)
        mutated = [parameters.index(parameter) for parameter in mutates]

        def on_device(first: Any, *args: Any) -> Any:
            if mutated:  # so that autograd refuses what it saved of their old values
                torch.autograd.graph.increment_version([(first, *args)[place] for place in mutated])
            device = (first[0] if isinstance(first, list) else first).device
            if device.type == "cuda" and device.index != torch.cuda.current_device():
                with torch.cuda.device(device):
                    return function(first, *args)
            return function(first, *args)

        _library.define(name + torch.library.infer_schema(function, mutates_args=mutates))
        for key in ("CPU", "CUDA"):
            _library.impl(name, on_device, key)
        torch.library.register_fake(f"ligermodels::{name}", fake, lib=_library)
        op = getattr(torch.ops.ligermodels, name).default

        def call(first: Any, *args: Any) -> Any:
            tensor = first[0] if isinstance(first, list) else first
            # Compilers trace no further than the first question.
            if torch.compiler.is_compiling() or (
                type(tensor) not in PLAIN or tensor.is_meta or torch._C._len_torch_dispatch_stack()
            ):
                return op(first, *args)
            if not torch.is_grad_enabled():  # as within the passes of an autograd.Function
                return on_device(first, *args)
            with torch._C._AutoDispatchBelowAutograd():
                return on_device(first, *args)

        return call

    return register


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.autograd.function.once_differentiable`, free of cost where nobody asks for gradients of gradients."""
    guarded = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx: Any, *gradients: Any) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return call


def empty_like(x: torch.Tensor) -> torch.Tensor:
    """An empty contiguous tensor of x's shape, dtype and device."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x (..., N) as (rows, N) whose last dimension is contiguous: a view where the strides allow it, else a copy."""
    if x.dim() == 2:
        rows = x
    else:
        rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
