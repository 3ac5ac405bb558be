"""Results that are cheap to compute again, and so are not kept for the backward pass.

Norms and gated activations cost one pass over memory, but what they give is kept by the projection that takes it.
Within `recomputing`, a layer announces such a result by `cheap`; whoever saves it for its backward pass then saves how
it was computed instead, from tensors that are kept anyway. This works through autograd's hooks for saved tensors, and
so for any module that takes the result.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class _Recipe(NamedTuple):
    """How `result` was computed; it is held weakly, for its memory to be freed."""

    result: weakref.ref[Tensor]
    function: Callable[..., Tensor]
    inputs: tuple[Any, ...]


class _Again(NamedTuple):
    """What autograd keeps in place of a result, or of a view of it."""

    recipe: _Recipe
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


_recipes: ContextVar[dict[int, _Recipe] | None] = ContextVar("recipes", default=None)


def cheap(function: Callable[..., Tensor], *inputs: Any, result: Tensor | None = None) -> Tensor:
    """`function(*inputs)`, or `result` if that is at hand already; within `recomputing` it is not kept.

    The function must give the same contiguous tensor each time; inputs that are tensors are kept in its stead.
    """
    result = function(*inputs) if result is None else result
    recipes = None if torch.compiler.is_compiling() else _recipes.get()
    if recipes is not None and result.requires_grad:
        kept = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
        recipes[result.untyped_storage().data_ptr()] = _Recipe(weakref.ref(result), function, kept)
    return result


def watched(module: nn.Module) -> bool:
    """Whether hooks look on, so that what the module takes and gives must be what it says."""
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return any(hooks)


def recomputes(projection: nn.Module) -> bool:
    """Whether results are not kept now, and `projection` is a linear layer that an op may take the place of: nobody
    has changed it, nor looks on."""
    if torch.compiler.is_compiling() or _recipes.get() is None or type(projection) is not nn.Linear:
        return False
    plain = type(projection.weight) is nn.Parameter
    return plain and not watched(projection) and not torch.is_autocast_enabled(projection.weight.device.type)


@contextmanager
def recomputing() -> Iterator[None]:
    """Results of `cheap` are computed again in the backward pass of what runs within this context."""
    recipes: dict[int, _Recipe] = {}

    def pack(tensor: Tensor) -> Tensor | _Again:
        recipe = recipes.get(tensor.untyped_storage().data_ptr())
        if recipe is None or recipe.result() is None or not tensor.requires_grad:
            return tensor
        return _Again(recipe, tensor.shape, tensor.stride(), tensor.storage_offset())

    def unpack(kept: Tensor | _Again) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            again = kept.recipe.function(*kept.recipe.inputs)
        return again.as_strided(kept.size, kept.stride, kept.offset)

    token = _recipes.set(recipes)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _recipes.reset(token)
        recipes.clear()
