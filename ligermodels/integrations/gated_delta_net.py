"""Gated DeltaNet on the projections, the convolution and the norm of a transformers layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ligermodels.integrations.modules import OnModules, attribute_named, in_one_dtype, native_of, part_named, projected
from ligermodels.layers.causal_conv import CausalConv
from ligermodels.layers.gated_delta_net import Decay, GatedDeltaNet, GatedDeltaNetConfig, GatedNorm


class HFCausalConv(OnModules, CausalConv):
    """`CausalConv` with the weight and bias of an nn.Conv1d of one input channel per group."""

    parts = ()
    activation: str | None = "silu"
    bias = attribute_named("bias")

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """(channels, width)."""
        return self.source.weight.squeeze(1)


class HFGatedNorm(OnModules, GatedNorm):
    """`GatedNorm` with the weight of its source."""

    weight = attribute_named("weight")

    def __init__(self, source: nn.Module, config: GatedDeltaNetConfig) -> None:
        super().__init__(source, config)
        self.eps, self.activation = config.norm_eps, config.OUTPUT_GATE

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """See `GatedNorm`. The dtypes may differ; see `in_one_dtype`."""
        return in_one_dtype(super().forward, x, z)


class HFDecay(OnModules, Decay):
    """`Decay` with the parameters of a transformers Gated DeltaNet."""

    log_rate = part_named("delta.A_log")
    bias = part_named("delta.dt_bias")

    def __init__(self, source: nn.Module, config: GatedDeltaNetConfig) -> None:
        super().__init__(source, config)
        self.beta_scale = config.beta_scale


class HFGatedDeltaNet(OnModules, GatedDeltaNet):
    """`GatedDeltaNet` on a transformers Gated DeltaNet."""

    config: GatedDeltaNetConfig
    conv, norm, out = part_named("delta.conv"), part_named("delta.norm"), part_named("delta.out")

    def __init__(self, source: nn.Module, config: GatedDeltaNetConfig) -> None:
        super().__init__(source, config)
        self.decay = HFDecay(source, config)

    def in_proj(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """x (B, T, H) -> q, k, v, z, b and a, one after another, (B, T, channels). Where transformers has two
        projections, their rows are ordered by key head."""
        source, config = self.source, self.config
        if "delta.qkvz" not in native_of(source).names:
            qkv = "qkv" if "delta.q" in native_of(source).names else ("qkv",)
            return torch.cat([projected(source, f"delta.{name}", x) for name in (*qkv, "z", "b", "a")], dim=-1)
        repeats = config.num_value_heads // config.num_key_heads
        keys, values = config.key_head_dim, repeats * config.value_head_dim
        channels: list[Tensor] = []
        for name, sizes in (("qkvz", (keys, keys, values, values)), ("ba", (repeats, repeats))):
            heads = projected(source, f"delta.{name}", x).unflatten(-1, (config.num_key_heads, -1))
            channels += [piece.flatten(2) for piece in heads.split(sizes, dim=-1)]
        return torch.cat(channels, dim=-1)
