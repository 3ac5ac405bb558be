"""Gated short convolutions, as in LFM2 (Liquid AI, 2025, https://arxiv.org/abs/2511.23404)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligermodels.convert.mappings import TensorView, WeightMapping, rename
from ligermodels.layers.causal_conv import CausalConv, with_input_channel
from ligermodels.layers.config import LayerConfig
from ligermodels.layers.config_checks import check_sizes
from ligermodels.layers.context import ForwardContext
from ligermodels.layers.conv_state import ConvState, LayerConv
from ligermodels.layers.external_states import RecurrentLayer
from ligermodels.layers.float8 import INPUT
from ligermodels.layers.linear import Linear
from ligermodels.layers.sharding import TensorSharding, own_part_of_each, split_evenly


@dataclass(frozen=True)
class ShortConvConfig(LayerConfig):
    """Config of a gated short convolution.

    Args:
        channels: channels of the convolution.
        width: number of tokens in the convolution, the current token included.
        bias: whether the two linear layers and the convolution have biases.

    Raises:
        ConfigError: a size is not a whole number above 0; the message names the field.
    """

    NAMES: ClassVar[Mapping[str, str]] = {
        "short_conv.in": "conv.in_proj",
        "short_conv.conv": "conv.conv",
        "short_conv.out": "conv.out_proj",
    }

    channels: int
    width: int = 3
    bias: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "channels", "width")

    def build(self, hidden_size: int) -> nn.Module:
        return ShortConv(hidden_size, self)

    def new_state(
        self,
        num_layers: int,
        batch_size: int,
        max_length: int,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> ConvState:
        return ConvState(num_layers, batch_size, (self.width - 1, self.channels), dtype=dtype, device=device)

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        sources = {part: f"{checkpoint}.{name}" for part, name in {**self.NAMES, **names}.items()}
        conv = sources["short_conv.conv"]
        mappings = [
            WeightMapping(f"{native}.conv.weight", (TensorView(f"{conv}.weight", with_input_channel),)),
            rename(f"{native}.in_proj.weight", f"{sources['short_conv.in']}.weight"),
            rename(f"{native}.out.weight", f"{sources['short_conv.out']}.weight"),
        ]
        if self.bias:
            mappings += [
                rename(f"{native}.conv.bias", f"{conv}.bias"),
                rename(f"{native}.in_proj.bias", f"{sources['short_conv.in']}.bias"),
                rename(f"{native}.out.bias", f"{sources['short_conv.out']}.bias"),
            ]
        return mappings

    def tensor_shard(self, ranks: int) -> ShortConvConfig:
        """Divide the channels over ranks."""
        return replace(self, channels=split_evenly("channels (hidden_size)", self.channels, ranks))

    def state_elements(self, max_length: int) -> int:
        return (self.width - 1) * self.channels

    def info(self) -> dict[str, Any]:
        return {"conv_channels": self.channels, "conv_width": self.width}


class ShortConv(RecurrentLayer):
    """out(C * conv(B * x)) with B, C, x = in_proj(hidden states). The convolution is causal and depthwise.

    The rows of `in_proj` are B, C and x. Tensor parallelism divides them evenly, regardless of these parts, as in
    `GatedDeltaNet`. Under context parallelism each rank gathers the inputs of the convolution of all tokens.
    """

    float8_linears: ClassVar[Mapping[str, str | None]] = {"in_proj": INPUT, "out": None}
    batch_invariant: ClassVar[bool] = True
    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"in_proj": "columns_to_all", "out": "rows"}
    sequence_parallel: ClassVar[bool] = True
    context_parallel: ClassVar[bool] = True

    def __init__(self, hidden_size: int, config: ShortConvConfig) -> None:
        super().__init__()
        self.config = config
        self.in_proj = Linear(hidden_size, 3 * config.channels, bias=config.bias)
        self.conv = CausalConv([config.channels], config.width, config.bias, activation=None)
        self.out = Linear(config.channels, hidden_size, bias=config.bias)

    def mix(self, x: Tensor, context: ForwardContext, state: LayerConv | None) -> Tensor:
        gate_in, gate_out, values = own_part_of_each(self, self.in_proj(x), [self.config.channels] * 3).chunk(3, -1)
        inputs, earlier, tree = gate_in * values, None, context.tree
        one = state is not None and tree is None and context.seq_lens is None and x.shape[1] == 1
        if state is not None:
            inputs, earlier = inputs.to(state.inputs.dtype), state.inputs
        if context.shard is not None:
            inputs = context.shard.all_tokens(inputs)[:, : context.shard.length]
        nodes = None if tree is None else (tree.parent, tree.depth)
        convolved = self.conv(inputs, earlier, context.cu_seqlens, nodes, one).to(gate_out.dtype)
        if context.shard is not None:
            convolved = context.shard.take(convolved)
        if state is not None and tree is not None:
            state.branch(inputs, tree)
        elif state is not None and not one:
            state.advance(inputs, context.seq_lens)
        return self.out(gate_out * convolved)
