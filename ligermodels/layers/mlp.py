"""Gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from ligermodels import ops
from ligermodels.convert.mappings import WeightMapping, interleaved_gate_up, interleaved_gate_up_in_one, rename
from ligermodels.layers.config import LayerConfig
from ligermodels.layers.context import ForwardContext
from ligermodels.layers.float8 import INPUT, own_float8_input, produce, writes_float8
from ligermodels.layers.layer import Layer
from ligermodels.layers.pending import add_result, adds_residual, takes_pending, to_activation
from ligermodels.layers.sharding import TensorSharding, split_evenly
from ligermodels.ops import Float8Form, PendingLinear

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "silu": ops.swiglu,
    "gelu_tanh": ops.geglu,
    "gelu": partial(ops.geglu, approximate="none"),
}
"""Gate activation -> op on pairs of gate and up (..., 2 I), or on both (..., I), giving (..., I)."""

_FLOAT8: dict[str, Callable[..., Tensor]] = {
    "silu": ops.float8_swiglu,
    "gelu_tanh": ops.float8_geglu,
    "gelu": partial(ops.float8_geglu, approximate="none"),
}


class GatedActivation(nn.Module):
    """activation(gate) * up, of channels that alternate gate and up: (..., 2 I) -> (..., I).

    activation: a key of ACTIVATIONS; `options` are those of its op. With a form `float8` the result is a
    Float8Tensor, and so is the gradient of gate_up: for a float8 linear layer after it, and before it.
    """

    def __init__(self, activation: str, **options: float | None) -> None:
        super().__init__()
        self.activation, self.options = activation, options

    @takes_pending
    @writes_float8
    def forward(self, gate_up: Tensor | PendingLinear, *, float8: Float8Form | None = None) -> Tensor:
        """gate_up (..., 2 I) -> (..., I), same dtype."""
        if isinstance(gate_up, PendingLinear):
            return gate_up.gated(self.activation, **self.options)
        if float8 is not None:
            return _FLOAT8[self.activation](gate_up, *float8[:2], **float8.layouts, **self.options)
        return ACTIVATIONS[self.activation](gate_up, **self.options)


@dataclass(frozen=True)
class MLPConfig(LayerConfig):
    """`size` intermediate channels, the gate's `activation` (a key of ACTIVATIONS), and whether there are biases.

    The gate is multiplied by `gate_multiplier` before its activation, and the output, bias included, by
    `down_multiplier`: Falcon-H1's `mlp_multipliers`."""

    NAMES: ClassVar[Mapping[str, str]] = {f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}

    size: int
    activation: str = "silu"
    bias: bool = False
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0

    def build(self, hidden_size: int) -> nn.Module:
        return GatedMLP(hidden_size, self)

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        """Gate and up are tensors of their own, or one, the gate first, where `names` has an "mlp.gate_up"."""
        there = {part: f"{checkpoint}.{name}" for part, name in {**self.NAMES, **names}.items()}
        found = []
        for kind in ("weight", "bias") if self.bias else ("weight",):
            target = f"{native}.gate_up.{kind}"
            if "mlp.gate_up" in names:
                found.append(interleaved_gate_up_in_one(target, f"{there['mlp.gate_up']}.{kind}"))
            else:
                found.append(
                    interleaved_gate_up(target, *(f"{there[f'mlp.{part}']}.{kind}" for part in ("gate", "up")))
                )
            found.append(rename(f"{native}.down.{kind}", f"{there['mlp.down']}.{kind}"))
        return found

    def tensor_shard(self, ranks: int) -> MLPConfig:
        return replace(self, size=split_evenly("size (intermediate_size)", self.size, ranks))

    def info(self) -> dict[str, Any]:
        return {"mlp_size": self.size}


class GatedMLP(Layer):
    """down(activation(gate(x)) * up(x)) (Shazeer, 2020), with the multipliers of `MLPConfig`.

    `gate_up` is one projection, its rows in pairs: row 2i is the gate's i-th, row 2i + 1 the i-th of up, so that a
    shard of its rows holds whole pairs.
    """

    token_wise = True
    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"gate_up": "columns", "down": "rows"}
    float8_linears: ClassVar[Mapping[str, str | None]] = {"gate_up": INPUT, "down": None}

    def __init__(self, hidden_size: int, config: MLPConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * config.size, bias=config.bias)
        self.activation = GatedActivation(config.activation, gate_multiplier=config.gate_multiplier)
        self.down = nn.Linear(config.size, hidden_size, bias=config.bias)
        self.down_multiplier = config.down_multiplier

    @adds_residual
    def forward(self, x: Tensor, context: ForwardContext | None = None, residual: Tensor | None = None) -> Tensor:
        """x (..., H) -> (..., H), added to `residual` (..., H), if it is given."""
        gate_up = to_activation(self.gate_up, self.activation, x)
        y: Tensor = produce(self.activation, own_float8_input(self.down), gate_up)
        if residual is not None and self.down_multiplier == 1:
            return add_result(self.down, y, residual)
        y = cast(Tensor, self.down(y))
        y = y if self.down_multiplier == 1 else y * self.down_multiplier
        return y if residual is None else residual + y
