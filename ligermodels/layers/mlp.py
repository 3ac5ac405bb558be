"""Gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, cast

from torch import Tensor, nn

from ligermodels import ops
from ligermodels.layers.attention import Context
from ligermodels.layers.recompute import cheap, recomputes

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": ops.swiglu,
    "gelu_tanh": ops.geglu,
    "gelu": partial(ops.geglu, approximate="none"),
}
"""Gate activation -> op on packed [gate; up] (..., 2 I) giving (..., I)."""


@dataclass(frozen=True)
class MLPConfig:
    """`size` intermediate channels, the gate's `activation` (a key of ACTIVATIONS), and whether there are biases."""

    size: int
    activation: str = "silu"
    bias: bool = False

    def build(self, hidden_size: int) -> nn.Module:
        """The layer, on hidden states of `hidden_size` channels."""
        return GatedMLP(hidden_size, self)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), with gate and up as one projection (Shazeer, 2020)."""

    takes_rows: ClassVar[bool] = True
    """It may be given `Context.rows` alone: to each token the others have no bearing."""

    def __init__(self, hidden_size: int, config: MLPConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * config.size, bias=config.bias)
        self.down = nn.Linear(config.size, hidden_size, bias=config.bias)
        self.config, self.activation = config, ACTIVATIONS[config.activation]

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """x (..., H) -> (..., H); the context is for feed-forward layers that route."""
        gate_up = self.gate_up(x)
        if recomputes(self.down):
            return ops.glu_linear(gate_up, self.down.weight, self.down.bias, self.config.activation)
        return cast(Tensor, self.down(cheap(self.activation, gate_up)))
