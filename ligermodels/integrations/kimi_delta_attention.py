"""Kimi Delta Attention on the projections, the convolution and the norm of a transformers layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ligermodels.integrations.modules import OnModules, native_of, part, part_named, projected
from ligermodels.layers import KimiDeltaAttentionConfig
from ligermodels.layers.kimi_delta_attention import ChannelDecay, KimiDeltaAttention


class HFChannelDecay(OnModules, ChannelDecay):
    """`ChannelDecay` with the parameters of a transformers Kimi Delta Attention."""

    bias = part_named("delta.dt_bias")

    def __init__(self, source: nn.Module, config: KimiDeltaAttentionConfig) -> None:
        super().__init__(source, config)
        self.beta_scale, self.lower_bound = config.beta_scale, config.decay_bound

    @property
    def log_rate(self) -> Tensor:  # type: ignore[override]
        """(heads,)."""
        names = ("delta.A_log_of_4d", "delta.A_log")
        name = next(name for name in names if name in native_of(self.source).names)
        log_rate: Tensor = part(self.source, name)
        return log_rate.flatten()


class HFKimiDeltaAttention(OnModules, KimiDeltaAttention):
    """`KimiDeltaAttention` on a transformers Kimi Delta Attention."""

    config: KimiDeltaAttentionConfig
    conv, norm, out = part_named("delta.conv"), part_named("delta.norm"), part_named("delta.out")

    def __init__(self, source: nn.Module, config: KimiDeltaAttentionConfig) -> None:
        super().__init__(source, config)
        self.decay = HFChannelDecay(source, config)

    def in_proj(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """x (B, T, H) -> the parts of `config.projected`, one after another, (B, T, channels)."""
        return self._projected(x, *self.config.projected)

    def low_rank(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """x (B, T, H) -> the inputs of `decay_b`, then of `z_b`, (B, T, 2 * gate_rank)."""
        return self._projected(x, "decay_a", "z_a")

    def decay_b(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """x (B, T, gate_rank) -> (B, T, channels of the keys)."""
        return self._projected(x, "decay_b")

    def z_b(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """x (B, T, gate_rank) -> (B, T, channels of the values)."""
        return self._projected(x, "z_b")

    def _projected(self, x: Tensor, *names: str) -> Tensor:
        return torch.cat([projected(self.source, f"delta.{name}", x) for name in names], dim=-1)
