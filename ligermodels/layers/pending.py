"""Linear layers that are computed with what follows them, in steps of decoding: see `ops.PendingLinear`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from ligermodels import ops
from ligermodels.layers.quantized import QuantizedLinear
from ligermodels.ops import PendingLinear

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_PLAIN = {each: each.forward for each in (nn.Linear, QuantizedLinear)}
"""Layers whose forward is one linear op, and returns what that returns."""

Forward = TypeVar("Forward", bound=Callable[..., Any])


def takes_pending(forward: Forward) -> Forward:
    """Mark a module's forward whose first argument may be a PendingLinear: a class that overrides it is not taken for
    one that can."""
    forward.takes_pending = True  # type: ignore[attr-defined]
    return forward


def adds_residual(forward: Forward) -> Forward:
    """Mark a layer's forward that takes a `residual`, to which it adds its result."""
    forward.adds_residual = True  # type: ignore[attr-defined]
    return forward


def to_activation(linear: nn.Module, activation: nn.Module, x: Tensor) -> Tensor | PendingLinear:
    """linear(x), or what is pending of it, for `activation` alone."""
    if not ops.is_decoding() or not _marked(activation, "takes_pending"):
        return linear(x)
    return _pending(linear, x)


def add_result(linear: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
    """residual + linear(x)."""
    found = _pending(linear, x) if ops.is_decoding() else linear(x)
    return found.added_to(residual) if isinstance(found, PendingLinear) else residual + found


def can_add(layer: nn.Module) -> bool:
    """Whether, in this step, a feed-forward layer is to be given the residual."""
    return ops.is_decoding() and _marked(layer, "adds_residual")


def _pending(linear: nn.Module, x: Tensor) -> Tensor | PendingLinear:
    kind = type(linear)
    own = kind in _PLAIN and kind.forward is _PLAIN[kind] and "forward" not in vars(linear)  # nobody's in its place
    if not own or _has_hooks(linear):
        return linear(x)
    with ops.pending_linears():
        return linear(x)


def _marked(module: nn.Module, mark: str) -> bool:
    return getattr(module.forward, mark, False) and not _has_hooks(module)


def _has_hooks(module: nn.Module) -> bool:
    """Whether a hook sees the module's input or output, and expects what they are elsewhere."""
    return nn.modules.module._has_any_global_hook() or any(getattr(module, hooks) for hooks in _HOOKS)
