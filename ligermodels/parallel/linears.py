"""Linear layers of tensor-parallel models: each rank has some of their output or input channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ligermodels.layers import token_parts
from ligermodels.layers.float8 import Float8Linear
from ligermodels.layers.lora import LoRALinear
from ligermodels.layers.sharding import (
    TensorSharding,
    dropout,
    gather_last,
    local,
    own_part_of_each,
    sum_over_ranks,
    used_in_parts,
)

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
    vars(linear)["forward"] = MethodType(_FORWARD[kind], linear)


def _product(linear: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None, dim: int | None) -> Tensor:
    """x times this rank's part, in dimension `dim`, of the weight; where it is None all ranks have the whole."""
    if isinstance(linear, LoRALinear):
        return _with_update(linear, x, weight, bias, dim)
    return linear.product(x, weight, bias) if isinstance(linear, Float8Linear) else F.linear(x, weight, bias)


def _with_update(linear: LoRALinear, x: Tensor, weight: Tensor, bias: Tensor | None, dim: int | None) -> Tensor:
    """With the columns of A, or the rows of B, that go with the part of the weight."""
    a, *bs = (local(linear, each, partial=dim is not None) for each in linear.lora_parameters().values())
    b, of_x = linear.native_b(bs), None
    if dim == 0:
        b = own_part_of_each(linear, b, [len(b)], 0)
    elif dim == 1:
        a, of_x = own_part_of_each(linear, a, [a.shape[1]], 1), x.ndim - 1
    elif token_parts.current() is not None:
        of_x = x.ndim - 2
    return linear.product(x, weight, bias, a, b, lambda x, p: dropout(linear, x, p, of_x))


def _columns(linear: nn.Linear, x: Tensor) -> Tensor:
    parts = token_parts.current()
    if parts is None or isinstance(linear, GATHERED_BEFORE):
        return _gathered_columns(linear, used_in_parts(linear, x))
    return parts.gathered_linear(x, local(linear, linear.weight), local(linear, linear.bias))


def _gathered_columns(linear: nn.Linear, x: Tensor) -> Tensor:
    return _product(linear, x, local(linear, linear.weight), local(linear, linear.bias), 0)


def _columns_to_all(linear: nn.Linear, x: Tensor) -> Tensor:
    return gather_last(linear, _columns(linear, x), linear.weight, partial=True)


def _rows(linear: nn.Linear, x: Tensor) -> Tensor:
    parts, weight, bias = token_parts.current(), local(linear, linear.weight), local(linear, linear.bias)
    if parts is None or isinstance(linear, GATHERED_BEFORE):
        y = sum_over_ranks(linear, _product(linear, x, weight, None, 1), linear.weight)
    else:
        y = parts.summed_linear(x, weight)
    return y if bias is None else y + bias.to(y.dtype)


def _replicated(linear: nn.Linear, x: Tensor) -> Tensor:
    return _product(linear, x, local(linear, linear.weight), local(linear, linear.bias), None)


GATHERED_BEFORE = (Float8Linear, LoRALinear)
"""Linear layers whose input is gathered by an op of its own; the others gather, and sum, within their product."""
_FORWARD: Mapping[str, Callable[[Any, Tensor], Tensor]] = {
    "columns": _columns,
    "gathered_columns": _gathered_columns,
    "columns_to_all": _columns_to_all,
    "rows": _rows,
    "replicated": _replicated,
}
