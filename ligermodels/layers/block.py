"""Decoder block: attention and feed-forward, each with its norms and beside a residual."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ligermodels.layers.attention import Attention, AttentionConfig, Context
from ligermodels.layers.mlp import MLPConfig
from ligermodels.layers.moe import MoEConfig
from ligermodels.layers.norm import NormConfig, RMSNorm


@dataclass(frozen=True)
class BlockConfig:
    """The parts of one decoder block.

    Each of attention and feed-forward is normalised before (`pre_norm`), after (`post_norm`, Gemma 2 has both, OLMo 2
    only this), and multiplied by `residual_scale` (Granite) before it is added to the residual.
    """

    attention: AttentionConfig
    mlp: MLPConfig | MoEConfig
    norm: NormConfig
    pre_norm: bool = True
    post_norm: bool = False
    residual_scale: float = 1.0


class Block(nn.Module):
    """x + post_norm(attention(pre_norm(x))), then the same with the feed-forward layer."""

    def __init__(self, hidden_size: int, config: BlockConfig, layer: int) -> None:
        super().__init__()

        def norm(wanted: bool) -> nn.Module:
            return RMSNorm(hidden_size, config.norm) if wanted else nn.Identity()

        self.residual_scale = config.residual_scale
        self.attention_norm = norm(config.pre_norm)
        self.attention = Attention(hidden_size, config.attention, layer)
        self.attention_post_norm = norm(config.post_norm)
        self.mlp_norm = norm(config.pre_norm)
        self.mlp = config.mlp.build(hidden_size)
        self.mlp_post_norm = norm(config.post_norm)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x (B, T, H) -> (B, T, H)."""
        x = self._add(x, self.attention_post_norm(self.attention(self.attention_norm(x), context)))
        return self._add(x, self.mlp_post_norm(self.mlp(self.mlp_norm(x), context)))

    def _add(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch if self.residual_scale == 1.0 else x + self.residual_scale * branch
