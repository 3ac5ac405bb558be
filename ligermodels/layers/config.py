"""What a block asks of the config of each of its two layers, the token mixer and the feed-forward layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ligermodels.convert.mappings import WeightMapping, rename
from ligermodels.errors import ConfigError
from ligermodels.layers.initialization import persistent_tensors, skip_init
from ligermodels.layers.rope import RopeConfig

Self = TypeVar("Self", bound="LayerConfig")


class LayerState(Protocol):
    """What all layers of one config keep while decoding; tensors of fixed addresses, so that CUDA graphs hold them.

    A pass is a prefill, into a state that is empty, or a decoding pass, after `ForwardContext.cache_seqlens` tokens.
    """

    def layer(self, index: int) -> Any:
        """What the `index`-th of these layers gets as the `state` argument of its `forward`."""

    def reset(self) -> None:
        """Become empty."""

    def commit(self, slots: Tensor) -> None:
        """After a decoding pass over a tree: keep the accepted path and drop the other nodes.

        slots: long (B, P). Node n of sequence b was given slot cache_seqlens[b] + n; slots[b] are those of the path
        from the root, node 0, to the last accepted node, which is repeated to the end.
        """


class LayerConfig(ABC):
    """Base of the configs of layers; subclasses are frozen dataclasses.

    It builds the layer, its decoding state and its part of the weight map, and says which rotary tables it needs.
    """

    place: ClassVar[str] = ""
    """Where checkpoints have the layer, within its block; by default the name that the block has it under."""
    normalizes: ClassVar[bool] = False
    """Whether the layer, a feed-forward one, normalises its input itself: it is given the residual as it is."""

    @abstractmethod
    def build(self, hidden_size: int) -> nn.Module:
        """The layer, on hidden states of `hidden_size` channels.

        A mixer's `forward(x, context, state)` and a feed-forward layer's `forward(x, context)` map hidden states
        (B, T, H) to the same shape; `context` is a `ForwardContext`, `state` what `LayerState.layer` gives, or None. A
        mixture of experts gives (hidden states, `RouterOutput`).
        A layer whose result for a token depends on no other token that it is given says so by the attribute
        `token_wise = True`: a feed-forward layer, or a mixer that sees others only as earlier layers hand them on. It
        is then only given the tokens that are needed, (1, n, H); for a mixer `ForwardContext.needed` says which.
        A mixer that shares keys and values with later layers gives (hidden states, `KeysValues`).
        """

    @property
    def state_from(self) -> int | None:
        """Number of the earlier layer whose decoding state the layer is given, for one that has none of its own."""
        return None

    @property
    def ropes(self) -> Sequence[RopeConfig]:
        """The rotary tables that the layer reads from `ForwardContext.rope_tables`."""
        return ()

    def new_state(
        self,
        num_layers: int,
        batch_size: int,
        max_length: int,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerState | None:
        """An empty decoding state of `num_layers` layers of this config; None if these keep nothing of earlier tokens.

        Every mixer that is to generate text defines it.

        Args:
            batch_size, max_length: sequences, and the most tokens of each.
            hidden_size, dtype, device: the model's.
        """
        raise ConfigError(
            f"{type(self).__name__} has no decoding state: define new_state(), which may return None if a token's "
            "result does not depend on earlier tokens"
        )

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        """How the layer's tensors are stored: here each under its own name.

        Args:
            native: name of the layer in the model.
            checkpoint: name of its block in the checkpoint.
            names: a family's own names of parts of a layer, for those of `NAMES` that differ.
        """
        with torch.device("meta"), skip_init():
            tensors = persistent_tensors(self.build(hidden_size))
        place = self.place or native.rpartition(".")[2]
        return [rename(f"{native}.{name}", f"{checkpoint}.{place}.{name}") for name in tensors]

    def unused(self, checkpoint: str, names: Mapping[str, str]) -> list[str]:
        """Patterns of tensors that checkpoints may have of such a layer, and that it does not need; arguments as of
        `weight_mappings`."""
        return []

    def tensor_shard(self: Self, ranks: int) -> Self:
        """The config of what each of several ranks has of the layer under tensor parallelism (see `layers.sharding`):
        its decoding state is that of this config. Raises ConfigError, naming the field, where the layer cannot be
        split so."""
        raise ConfigError(
            f"{type(self).__name__}: has no rule for tensor parallelism; define tensor_shard(ranks), and "
            "tensor_parallel of the module, or shard such models by FSDP2 alone"
        )

    def with_attention_backend(self: Self, name: str) -> Self:
        """The config with attention on the backend of this name, if the layer attends."""
        return self

    def state_elements(self, max_length: int) -> int:
        """Elements that the decoding state of one such layer holds for a sequence of up to `max_length` tokens."""
        return 0

    def info(self) -> dict[str, Any]:
        """Sizes for people: what `ligermodels info` shows of the layer."""
        return {}
