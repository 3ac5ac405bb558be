"""Linear layers of tensor-parallel models: each rank has some of their output or input channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ligermodels.layers import token_parts
from ligermodels.layers.float8 import Float8Linear
from ligermodels.layers.lora import LoRALinear
from ligermodels.layers.sharding import TensorSharding, gather_last, local, sum_over_ranks, used_in_parts
from ligermodels.ops.runtime import local_tensors

RULES: Mapping[str, Mapping[str, TensorSharding]] = {
    "columns": {"weight": 0, "bias": 0},
    "gathered_columns": {"weight": 0, "bias": 0},
    "columns_to_all": {"weight": 0, "bias": 0},
    "rows": {"weight": 1, "bias": "replicated"},
    "replicated": {"weight": "replicated", "bias": "replicated"},
}
"""How the parameters of a linear layer are distributed; those of LoRA are replicated."""


def divide(linear: nn.Module, kind: str, mesh: DeviceMesh) -> None:
    """Have a linear layer, with LoRA, in float8 or neither, whose parameters are distributed, compute with this rank's
    part of them."""
    linear._tensor_mesh = mesh  # type: ignore[assignment]
    if isinstance(linear, LoRALinear):
        _add_hooks(linear, kind, mesh)
    else:
        vars(linear)["forward"] = MethodType(_FORWARD[kind], linear)


def _product(linear: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear.product(x, weight, bias) if isinstance(linear, Float8Linear) else F.linear(x, weight, bias)


def _columns(linear: nn.Linear, x: Tensor) -> Tensor:
    parts = token_parts.current()
    if parts is None or isinstance(linear, Float8Linear):
        return _replicated(linear, used_in_parts(linear, x))
    return parts.gathered_linear(x, local(linear, linear.weight), local(linear, linear.bias))


def _columns_to_all(linear: nn.Linear, x: Tensor) -> Tensor:
    return gather_last(linear, _columns(linear, x), linear.weight, partial=True)


def _rows(linear: nn.Linear, x: Tensor) -> Tensor:
    parts, weight, bias = token_parts.current(), local(linear, linear.weight), local(linear, linear.bias)
    if parts is None or isinstance(linear, Float8Linear):
        y = sum_over_ranks(linear, _product(linear, x, weight, None), linear.weight)
    else:
        y = parts.summed_linear(x, weight)
    return y if bias is None else y + bias.to(y.dtype)


def _replicated(linear: nn.Linear, x: Tensor) -> Tensor:
    return _product(linear, x, local(linear, linear.weight), local(linear, linear.bias))


_FORWARD: Mapping[str, Callable[[Any, Tensor], Tensor]] = {
    "columns": _columns,
    "gathered_columns": _replicated,
    "columns_to_all": _columns_to_all,
    "rows": _rows,
    "replicated": _replicated,
}


def _add_hooks(linear: nn.Module, kind: str, mesh: DeviceMesh) -> None:
    """A layer with LoRA, of DTensors, takes and gives plain tensors."""
    given = Shard(-1) if kind == "rows" else Replicate()
    takes_all_tokens = kind in ("columns", "columns_to_all")

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = args
        parts = token_parts.current()
        if parts is not None and takes_all_tokens:
            x = parts.gather(x)
        elif parts is not None and kind == "replicated":
            x = parts.whole(x)
        if kind == "gathered_columns" or (parts is not None and takes_all_tokens):
            return (local_tensors.with_own_gradient(x, mesh), *others)
        return (DTensor.from_local(x, mesh, [given], run_check=False), *others)

    def leave(_: nn.Module, args: tuple[Any, ...], y: Any) -> Tensor:
        parts = token_parts.current()
        if parts is not None and kind == "rows" and y.placements[0].is_partial():
            return parts.sum(y.to_local(grad_placements=[Replicate()]))
        if kind in ("rows", "columns_to_all"):
            y = y.redistribute(placements=[Replicate()])
        found: Tensor = y.to_local(grad_placements=[Partial()] if kind == "columns_to_all" else None)
        return found if parts is None or "columns" in kind else parts.take(found)

    linear.register_forward_pre_hook(enter)
    linear.register_forward_hook(leave)
