"""Gated DeltaNet by the modules of a transformers layer: their projections, convolution and norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ligermodels.layers.context import ForwardContext
from ligermodels.layers.delta_state import LayerDelta
from ligermodels.layers.gated_delta_net import CausalConv, Decay, GatedDeltaNet, GatedDeltaNetConfig, GatedNorm


def conv_forward(
    module: Any,
    x: Tensor,
    earlier: Tensor | None,
    cu_seqlens: Tensor | None,
    tree: tuple[Tensor, Tensor] | None,
    step: bool,
) -> Tensor:
    """As `CausalConv`, of an nn.Conv1d of one input channel a group, which transformers does not call."""
    weights = SimpleNamespace(weight=module.weight.squeeze(1), parts=())
    return CausalConv.forward(weights, x, earlier, cu_seqlens, tree, step)  # type: ignore[arg-type]


def gated_norm_forward(module: Any, x: Tensor, z: Tensor) -> Tensor:
    """As `GatedNorm`."""
    return GatedNorm.forward(SimpleNamespace(weight=module.weight, eps=module.native.config.norm_eps), x, z)  # type: ignore


class DeltaView:
    """A native Gated DeltaNet whose parts `part` gives, by their names in `GatedDeltaNetConfig.NAMES`."""

    def __init__(self, config: GatedDeltaNetConfig, part: Callable[[str], Any], *, packed: bool) -> None:
        self.config, self._part, self._packed = config, part, packed
        self.conv, self.norm, self.out = (part(f"delta.{name}") for name in ("conv", "norm", "out"))

    def __call__(self, x: Tensor, context: ForwardContext, state: LayerDelta | None = None) -> Tensor:
        """As `GatedDeltaNet.forward`."""
        return GatedDeltaNet.forward(self, x, context, state)  # type: ignore[arg-type]

    def in_proj(self, x: Tensor) -> Tensor:
        """The rows q, k, v, z, b and a of the projections, whose rows are by key head where they are packed."""
        if not self._packed:
            return torch.cat([self._part(f"delta.{name}")(x) for name in ("qkv", "z", "b", "a")], dim=-1)
        config, found = self.config, []
        repeats = config.num_value_heads // config.num_key_heads
        keys, values = config.key_head_dim, repeats * config.value_head_dim
        for name, sizes in (("qkvz", (keys, keys, values, values)), ("ba", (repeats, repeats))):
            heads = self._part(f"delta.{name}")(x).unflatten(-1, (config.num_key_heads, -1))
            found += [each.flatten(2) for each in heads.split(sizes, dim=-1)]
        return torch.cat(found, dim=-1)

    def decay(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """As `Decay`."""
        parameters = SimpleNamespace(log_rate=self._part("delta.A_log"), bias=self._part("delta.dt_bias"))
        return Decay.forward(parameters, a, b)  # type: ignore[arg-type]


FORWARDS: Mapping[str, Callable[..., Any]] = {"delta.conv": conv_forward, "delta.norm": gated_norm_forward}
"""Part of the layer -> the forward that its module gets."""
