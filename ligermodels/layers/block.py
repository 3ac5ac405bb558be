"""Decoder block: attention and feed-forward, each behind a norm and beside a residual."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ligermodels.layers.attention import Attention, AttentionConfig, Context
from ligermodels.layers.mlp import GatedMLP, MLPConfig
from ligermodels.layers.norm import NormConfig, RMSNorm


@dataclass(frozen=True)
class BlockConfig:
    """The parts of one decoder block."""

    attention: AttentionConfig
    mlp: MLPConfig
    norm: NormConfig


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, hidden_size: int, config: BlockConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden_size, config.norm)
        self.attention = Attention(hidden_size, config.attention, layer)
        self.mlp_norm = RMSNorm(hidden_size, config.norm)
        self.mlp = GatedMLP(hidden_size, config.mlp)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x (B, T, H) -> (B, T, H)."""
        x = x + self.attention(self.attention_norm(x), context)
        return x + self.mlp(self.mlp_norm(x))
