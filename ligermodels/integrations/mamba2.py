"""Mamba2 on the projections, the convolution and the norm of a transformers layer."""

from __future__ import annotations

from torch import Tensor, nn

from ligermodels.integrations.modules import OnModules, attribute_named, in_one_dtype, part_named
from ligermodels.layers.mamba2 import GatedGroupNorm, Mamba2, Mamba2Config, Steps


class HFGatedGroupNorm(OnModules, GatedGroupNorm):
    """`GatedGroupNorm` with the weight of its source."""

    weight = attribute_named("weight")

    def __init__(self, source: nn.Module, config: Mamba2Config) -> None:
        super().__init__(source, config)
        self.size, self.eps = config.inner_size // config.num_groups, config.norm_eps
        self.norm_before_gate = config.norm_before_gate

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """See `GatedGroupNorm`. The dtypes may differ; see `in_one_dtype`."""
        return in_one_dtype(super().forward, x, z)


class HFSteps(OnModules, Steps):
    """`Steps` with the parameters of a transformers Mamba2."""

    log_rate, bias, skip = (part_named(f"mamba.{name}") for name in ("A_log", "dt_bias", "D"))

    def __init__(self, source: nn.Module, config: Mamba2Config) -> None:
        super().__init__(source, config)
        self.limit = config.time_step_limit


class HFMamba2(OnModules, Mamba2):
    """`Mamba2` on a transformers Mamba2."""

    config: Mamba2Config
    in_proj, conv, norm, out = (part_named(f"mamba.{name}") for name in ("in", "conv", "norm", "out"))

    def __init__(self, source: nn.Module, config: Mamba2Config) -> None:
        super().__init__(source, config)
        self.steps = HFSteps(source, config)
