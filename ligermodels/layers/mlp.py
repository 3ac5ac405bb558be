"""Gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from ligermodels.convert.mappings import WeightMapping, interleaved_gate_up, interleaved_gate_up_in_one, rename
from ligermodels.layers.activation import ACTIVATIONS, GatedActivation
from ligermodels.layers.config import LayerConfig
from ligermodels.layers.config_checks import check_choice, check_numbers, check_sizes
from ligermodels.layers.context import ForwardContext
from ligermodels.layers.float8 import INPUT
from ligermodels.layers.layer import Layer
from ligermodels.layers.linear import Linear, call_linear, input_form
from ligermodels.layers.sharding import TensorSharding, split_evenly


@dataclass(frozen=True)
class MLPConfig(LayerConfig):
    """`size` intermediate channels, the gate's `activation` (a key of ACTIVATIONS), and whether there are biases.

    The gate is multiplied by `gate_multiplier` before its activation, and the output, bias included, by
    `down_multiplier`: Falcon-H1's `mlp_multipliers`. With a `limit` the gate is at most the limit (with
    "clamped_silu" the gate's activation), and up is within [-limit, limit]."""

    NAMES: ClassVar[Mapping[str, str]] = {f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}

    size: int
    activation: str = "silu"
    bias: bool = False
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0
    limit: float | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "size")
        check_numbers(self, "limit", positive=True)
        check_choice(self, "activation", ACTIVATIONS)

    def build(self, hidden_size: int) -> nn.Module:
        return GatedMLP(hidden_size, self)

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        """Gate and up are tensors of their own, or one, the gate first, where `names` has an "mlp.gate_up".

        Args:
            hidden_size: hidden size of the model.
            native: name of the layer in the model.
            checkpoint: name of its block in the checkpoint.
            names: the family's names of parts of a layer, where they differ from `NAMES`.
        """
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
    batch_invariant: ClassVar[bool] = True
    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"gate_up": "columns", "down": "rows"}
    float8_linears: ClassVar[Mapping[str, str | None]] = {"gate_up": INPUT, "down": None}

    def __init__(self, hidden_size: int, config: MLPConfig) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * config.size, bias=config.bias)
        self.activation = GatedActivation(config.activation, config.gate_multiplier, limit=config.limit)
        self.down = Linear(config.size, hidden_size, bias=config.bias)
        self.down_multiplier = config.down_multiplier

    def forward(self, x: Tensor, context: ForwardContext | None = None) -> Tensor:
        """x (..., H) -> (..., H), of the dtype of x; `context` is not used."""
        form = input_form(self.down) if self.in_float8 else None
        y = call_linear(self.gate_up, x, activation=self.activation, form=form)
        y = self.down(y)
        return y if self.down_multiplier == 1 else y * self.down_multiplier
