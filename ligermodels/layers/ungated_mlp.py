"""Feed-forward layer without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from ligermodels.convert.mappings import WeightMapping, rename
from ligermodels.layers.config import LayerConfig
from ligermodels.layers.config_checks import check_sizes
from ligermodels.layers.context import ForwardContext
from ligermodels.layers.float8 import INPUT
from ligermodels.layers.layer import Layer
from ligermodels.layers.linear import Linear
from ligermodels.layers.sharding import TensorSharding, split_evenly


@dataclass(frozen=True)
class UngatedMLPConfig(LayerConfig):
    """`size` intermediate channels, and whether there are biases; the activation is the squared ReLU."""

    NAMES: ClassVar[Mapping[str, str]] = {f"mlp.{part}": f"mlp.{part}_proj" for part in ("up", "down")}

    size: int
    bias: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "size")

    def build(self, hidden_size: int) -> nn.Module:
        return UngatedMLP(hidden_size, self)

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        sources = {part: f"{checkpoint}.{name}" for part, name in {**self.NAMES, **names}.items()}
        kinds = ("weight", "bias") if self.bias else ("weight",)
        return [
            rename(f"{native}.{part}.{kind}", f"{sources[f'mlp.{part}']}.{kind}")
            for kind in kinds
            for part in ("up", "down")
        ]

    def tensor_shard(self, ranks: int) -> UngatedMLPConfig:
        return replace(self, size=split_evenly("size (intermediate_size)", self.size, ranks))

    def info(self) -> dict[str, Any]:
        return {"mlp_size": self.size}


class UngatedMLP(Layer):
    """down(relu(up(x)) ** 2) (So et al., 2021, https://arxiv.org/abs/2109.08668)."""

    token_wise = True
    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"up": "columns", "down": "rows"}
    float8_linears: ClassVar[Mapping[str, str | None]] = {"up": INPUT, "down": None}

    def __init__(self, hidden_size: int, config: UngatedMLPConfig) -> None:
        super().__init__()
        self.up = Linear(hidden_size, config.size, bias=config.bias)
        self.down = Linear(config.size, hidden_size, bias=config.bias)

    def forward(self, x: Tensor, context: ForwardContext | None = None) -> Tensor:
        """x (..., H) -> (..., H)."""
        return cast(Tensor, self.down(self.up(x).relu().square()))
