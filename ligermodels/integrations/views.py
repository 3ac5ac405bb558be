"""Native layers that have no module of their own in transformers, by those of a transformers layer or backbone that do
their parts: queries over shared keys and values, inputs of a layer, experts beside a dense layer, and the rotary
embedding and further features of tokens of images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ligermodels.layers import DenseMoEConfig, ForwardContext, PerLayerInputConfig, PerLayerInputs, RopeConfig
from ligermodels.layers.dense_moe import DenseMoE
from ligermodels.layers.kv_cache import LayerKV
from ligermodels.layers.per_layer_inputs import PerLayerInput, PerLayerInputsConfig
from ligermodels.layers.shared_kv_attention import SharedKVAttention, SharedKVAttentionConfig

Part = Callable[[str], Any]
"""Gives the module of a part of a native layer, by the names that its config has for parts."""


class SharedKVView:
    """A native `SharedKVAttention`."""

    _queries = SharedKVAttention._queries

    def __init__(self, config: SharedKVAttentionConfig, part: Part) -> None:
        self.config, self.q, self.o = config, part("attention.q"), part("attention.o")
        self.q_norm = None if config.qk_norm is None else part("attention.q_norm")

    def __call__(self, x: Tensor, context: ForwardContext, state: LayerKV | None = None) -> Tensor:
        """As `SharedKVAttention.forward`."""
        return SharedKVAttention.forward(self, x, context, state)  # type: ignore[arg-type]


class PerLayerInputsView:
    """A native `PerLayerInputs`, of a backbone."""

    def __init__(self, config: PerLayerInputsConfig, backbone: nn.Module) -> None:
        self.config = config
        self.embed, self.projection, self.norm = (
            getattr(backbone, config.NAMES[name]) for name in ("embed", "projection", "norm")
        )

    def __call__(self, input_ids: Tensor | None, x: Tensor, embedded: Tensor | None = None) -> Tensor:
        """As `PerLayerInputs.forward`."""
        return PerLayerInputs.forward(self, input_ids, x, embedded)  # type: ignore[arg-type]


class PerLayerInputView:
    """A native `PerLayerInput`, of a layer; `norm` is called as the native one."""

    def __init__(self, config: PerLayerInputConfig, layer: nn.Module, norm: Callable[..., Tensor]) -> None:
        self.config, self.norm = config, norm
        self.gate, self.projection = (getattr(layer, config.NAMES[name]) for name in ("gate", "projection"))

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """As `PerLayerInput.forward`."""
        return PerLayerInput.forward(self, x, context)  # type: ignore[arg-type]


class DenseMoEView:
    """A native `DenseMoE`, of a layer; `dense` is called with (B, T, H). The router is transformers'."""

    token_wise = True

    def __init__(self, dense: Callable[[Tensor], Tensor], part: Part) -> None:
        self.dense, self._router, self._experts = dense, part("experts.router"), part("experts")
        self.dense_norm, self.dense_post_norm, self.experts_norm, self.experts_post_norm = map(
            part, DenseMoEConfig.NAMES
        )

    def __call__(self, x: Tensor, context: ForwardContext | None = None) -> Tensor:
        """As `DenseMoE.forward`."""
        return DenseMoE.forward(self, x, context)  # type: ignore[arg-type]

    def experts(self, x: Tensor, routed_by: Tensor) -> Tensor:
        """x (..., H), each token to the experts that it has by `routed_by`, of the same shape."""
        _, weights, experts = self._router(routed_by.flatten(0, -2))
        return cast(Tensor, self._experts(x.flatten(0, -2), experts, weights).view(x.shape))


def text_positions(position_ids: Tensor) -> tuple[Tensor | None, Tensor]:
    """position_ids (3 or 4, B, T) -> positions of the text (B, T), if they come first, and the time, height and width
    of each token, (B, T, 3)."""
    text, grid = (position_ids[0], position_ids[1:]) if len(position_ids) == 4 else (None, position_ids)
    return text, grid.permute(1, 2, 0)


class GridRope:
    """The rotary tables of tokens with a time, a height and a width, by the `rotary` embedding of transformers, in
    place of the native one of `config`."""

    def __init__(self, config: RopeConfig, rotary: nn.Module, grid: Tensor) -> None:
        self.config, self._rotary, self._grid = config, rotary, grid

    def __call__(self, positions: Tensor, dtype: Any) -> tuple[Tensor, Tensor]:
        """As `RotaryEmbedding`; `positions` (B, T) says how the tokens lie in rows."""
        grid = self._grid.reshape(-1, positions.shape[1], 3).permute(2, 0, 1)
        cos, sin = self._rotary(positions.new_empty((), dtype=dtype), grid)
        half = cos.shape[-1] // 2
        return cos[..., :half].contiguous(), sin[..., :half].contiguous()


@dataclass(frozen=True)
class AddedFeatures:
    """Features of images (n, H) that join the states of the n tokens where `mask`, bool (B, T), is True, in their order
    (DeepStack, https://arxiv.org/abs/2406.04334)."""

    mask: Tensor
    features: Tensor

    def to(self, x: Tensor) -> Tensor:
        """x, B * T tokens in rows of any length, (..., H) -> the same with the features."""
        mask = self.mask.reshape(*x.shape[:-1], 1).expand_as(x)
        return x + torch.zeros_like(x).masked_scatter(mask, self.features.to(x))
