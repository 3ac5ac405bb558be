"""Several token mixers side by side on the same input, as attention and Mamba2 in Falcon-H1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligermodels.convert.mappings import WeightMapping
from ligermodels.errors import ConfigError
from ligermodels.layers.config import LayerConfig, LayerState
from ligermodels.layers.context import ForwardContext
from ligermodels.layers.layer import Layer, built_layer, declared
from ligermodels.layers.rope import RopeConfig
from ligermodels.layers.sharding import TensorSharding


@dataclass(frozen=True)
class ParallelMixersConfig(LayerConfig):
    """Config of token mixers whose outputs are added.

    Args:
        mixers: configs of the mixers, two or more.
        input_scales: factor of each mixer's input; () for 1.
        output_scales: factor of each mixer's output; () for 1.

    Raises:
        ConfigError: there are other numbers of scales than of mixers, or a mixer shares keys and values with other
            layers, which is not implemented here.
    """

    mixers: tuple[LayerConfig, ...]
    input_scales: tuple[float, ...] = ()
    output_scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.mixers) < 2:
            raise ConfigError(f"mixers: needs two or more, got {len(self.mixers)}")
        for name in ("input_scales", "output_scales"):
            if len(scales := getattr(self, name)) not in (0, len(self.mixers)):
                raise ConfigError(f"{name}: needs one for each of {len(self.mixers)} mixers, got {len(scales)}")
        if any(mixer.has_extra_output or mixer.state_from is not None for mixer in self.mixers):
            raise ConfigError("mixers: one of them shares keys and values with other layers; give mixers that do not")

    def build(self, hidden_size: int) -> nn.Module:
        return ParallelMixers(hidden_size, self)

    @property
    def parts(self) -> tuple[LayerConfig, ...]:
        return self.mixers

    @property
    def ropes(self) -> Sequence[RopeConfig]:
        return tuple(rope for mixer in self.mixers for rope in mixer.ropes)

    def new_state(
        self,
        num_layers: int,
        batch_size: int,
        max_length: int,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> ParallelState:
        options: dict[str, Any] = {"hidden_size": hidden_size, "dtype": dtype, "device": device}
        return ParallelState([mixer.new_state(num_layers, batch_size, max_length, **options) for mixer in self.mixers])

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        return [
            mapping
            for index, mixer in enumerate(self.mixers)
            for mapping in mixer.weight_mappings(hidden_size, f"{native}.mixers.{index}", checkpoint, names)
        ]

    def unused(self, checkpoint: str, names: Mapping[str, str]) -> list[str]:
        return [pattern for mixer in self.mixers for pattern in mixer.unused(checkpoint, names)]

    def tensor_shard(self, ranks: int) -> ParallelMixersConfig:
        """Apply `tensor_shard` to each mixer."""
        return replace(self, mixers=tuple(mixer.tensor_shard(ranks) for mixer in self.mixers))

    def with_attention_backend(self, name: str) -> ParallelMixersConfig:
        return replace(self, mixers=tuple(mixer.with_attention_backend(name) for mixer in self.mixers))

    def state_elements(self, max_length: int) -> int:
        return sum(mixer.state_elements(max_length) for mixer in self.mixers)

    def info(self) -> dict[str, Any]:
        return {name: size for mixer in self.mixers for name, size in mixer.info().items()}


class ParallelState:
    """Decoding state of all layers: the states of each mixer. See `LayerState`."""

    def __init__(self, states: Sequence[LayerState | None]) -> None:
        self._states = states

    def layer(self, index: int) -> tuple[Any, ...]:
        """The states of the mixers of layer number `index`, None for a mixer without one."""
        return tuple(None if state is None else state.layer(index) for state in self._states)

    def reset(self) -> None:
        """Empty the states."""
        for state in self._states:
            if state is not None:
                state.reset()

    def commit(self, slots: Tensor) -> None:
        """Keep the accepted path of a tree in each state."""
        for state in self._states:
            if state is not None:
                state.commit(slots)


class ParallelMixers(Layer):
    """The sum over i of `output_scales[i] * mixers[i](input_scales[i] * x)`. Modules: `mixers`."""

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {}

    def __init__(self, hidden_size: int, config: ParallelMixersConfig) -> None:
        super().__init__()
        layers = (built_layer(f"mixers[{i}]", mixer, hidden_size) for i, mixer in enumerate(config.mixers))
        self.mixers = nn.ModuleList(layer for layer in layers if layer is not None)
        ones = (1.0,) * len(config.mixers)
        self.scales = tuple(zip(config.input_scales or ones, config.output_scales or ones, strict=True))

    @property
    def token_wise(self) -> bool:  # type: ignore[override]
        return all(declared(mixer).token_wise for mixer in self.mixers)

    @property
    def context_parallel(self) -> bool:  # type: ignore[override]
        return all(declared(mixer).context_parallel for mixer in self.mixers)

    @property
    def sequence_parallel(self) -> bool:  # type: ignore[override]
        return all(declared(mixer).sequence_parallel for mixer in self.mixers)

    def check_context_parallel(self, ranks: int) -> None:
        for mixer in self.mixers:
            declared(mixer).check_context_parallel(ranks)

    def forward(self, x: Tensor, context: ForwardContext, state: tuple[Any, ...] | None = None) -> Tensor:
        """Mix tokens.

        Args:
            x: hidden states, (B, T, H).
            context: context of the forward pass.
            state: decoding states of the mixers, or None.

        Returns:
            (B, T, H).
        """
        states = (None,) * len(self.mixers) if state is None else state
        outputs = []
        for mixer, own, (input_scale, output_scale) in zip(self.mixers, states, self.scales, strict=True):
            y = mixer(x if input_scale == 1 else input_scale * x, context, own)
            outputs.append(y if output_scale == 1 else output_scale * y)
        return reduce(torch.add, outputs)
