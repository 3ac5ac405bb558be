"""A gated feed-forward layer and a mixture of experts side by side, each with its own norms (Gemma 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from ligermodels.convert.mappings import WeightMapping, rename
from ligermodels.errors import ConfigError
from ligermodels.layers.config import LayerConfig
from ligermodels.layers.context import ForwardContext, RouterOutput
from ligermodels.layers.layer import Layer
from ligermodels.layers.mlp import MLPConfig
from ligermodels.layers.moe import MoE, MoEConfig
from ligermodels.layers.norm import NormConfig
from ligermodels.layers.router import RouterConfig
from ligermodels.layers.sharding import TensorSharding


@dataclass(frozen=True)
class DenseMoEConfig(LayerConfig):
    """Config of a gated feed-forward layer beside a mixture of experts.

    Args:
        dense: config of the feed-forward layer.
        experts: config of the mixture.
        norm: config of the norms at the input and output of both.

    Raises:
        ConfigError: `experts` has an `aux_loss`; it is not implemented here.
    """

    NAMES: ClassVar[Mapping[str, str]] = {
        "norm.dense_norm": "pre_feedforward_layernorm",
        "norm.dense_post_norm": "post_feedforward_layernorm_1",
        "norm.experts_norm": "pre_feedforward_layernorm_2",
        "norm.experts_post_norm": "post_feedforward_layernorm_2",
    }
    normalizes: ClassVar[bool] = True

    dense: MLPConfig
    experts: MoEConfig
    norm: NormConfig

    def __post_init__(self) -> None:
        if self.experts.aux_loss:
            raise ConfigError("aux_loss: is not implemented for experts beside a dense layer; set it to False")

    @property
    def expert_router(self) -> RouterConfig:
        return self.experts.router

    @property
    def has_extra_output(self) -> bool:
        return True

    def build(self, hidden_size: int) -> nn.Module:
        return DenseMoE(hidden_size, self)

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        sources = {**self.NAMES, **names}
        norms = (name.removeprefix("norm.") for name in self.NAMES)
        return [
            *self.dense.weight_mappings(hidden_size, f"{native}.dense", checkpoint, names),
            *self.experts.weight_mappings(hidden_size, f"{native}.experts", checkpoint, names),
            *(rename(f"{native}.{norm}.weight", f"{checkpoint}.{sources[f'norm.{norm}']}.weight") for norm in norms),
        ]

    def tensor_shard(self, ranks: int) -> DenseMoEConfig:
        return replace(self, dense=self.dense.tensor_shard(ranks), experts=self.experts.tensor_shard(ranks))

    def info(self) -> dict[str, Any]:
        return {**self.dense.info(), "expert_size": self.experts.size, **_counts(self.experts)}


def _counts(experts: MoEConfig) -> dict[str, Any]:
    return {name: value for name, value in experts.info().items() if name != "mlp_size"}


class DenseMoE(Layer):
    """dense_post_norm(dense(dense_norm(x))) + experts_post_norm(experts(experts_norm(x))), routed by x itself."""

    token_wise = True
    reads_experts: ClassVar[bool] = True
    batch_invariant: ClassVar[bool] = True
    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {}

    def __init__(self, hidden_size: int, config: DenseMoEConfig) -> None:
        super().__init__()
        self.dense = config.dense.build(hidden_size)
        self.experts = MoE(hidden_size, config.experts)
        self.dense_norm, self.dense_post_norm, self.experts_norm, self.experts_post_norm = (
            config.norm.build(hidden_size) for _ in range(4)
        )

    def forward(self, x: Tensor, context: ForwardContext | None = None) -> tuple[Tensor, RouterOutput]:
        """x (..., H), the residual stream -> (..., H), and the router's output."""
        y = self.dense_post_norm(self.dense(self.dense_norm(x)))
        experts, router = self.experts(self.experts_norm(x), context, routed_by=x)
        return y + self.experts_post_norm(experts), router
