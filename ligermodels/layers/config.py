"""The base class of the configs of layers: of token mixers and of feed-forward layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ligermodels.convert.mappings import WeightMapping, rename
from ligermodels.errors import ConfigError
from ligermodels.layers.initialization import persistent_tensors, skip_init
from ligermodels.layers.rope import RopeConfig

if TYPE_CHECKING:
    from ligermodels.layers.router import RouterConfig

Self = TypeVar("Self", bound="LayerConfig")


class LayerState(Protocol):
    """The decoding state of all layers of one config. Its tensors keep their addresses, as CUDA graphs require.

    A pass is a prefill, into a state that is empty, or a decoding pass, after `ForwardContext.cache_seqlens` tokens.
    """

    def layer(self, index: int) -> Any:
        """The `state` argument for the `forward` of layer `index`, counted among the layers of this config."""

    def reset(self) -> None:
        """Become empty."""

    def commit(self, slots: Tensor) -> None:
        """After a decoding pass over a tree: keep the accepted path and drop the other nodes.

        Args:
            slots: long (B, P), the slots of the nodes on the path from the root, node 0, to the last accepted node,
                whose slot is repeated to the end. Node n of sequence b has slot cache_seqlens[b] + n.
        """


class LayerConfig(ABC):
    """Base of the configs of layers; subclasses are frozen dataclasses.

    It builds the layer, its decoding state and its part of the weight map, and says which rotary tables it needs.
    """

    place: ClassVar[str] = ""
    """Name of the layer within its block in checkpoints; by default its name in the native block."""
    normalizes: ClassVar[bool] = False
    """Whether a feed-forward layer normalises its input itself. The block then passes it the residual stream."""

    @abstractmethod
    def build(self, hidden_size: int) -> nn.Module:
        """The layer, a `Layer`, on hidden states of `hidden_size` channels.

        A mixer's `forward(x, context, state)` and a feed-forward layer's `forward(x, context)` map hidden states
        (B, T, H) to the same shape. `context` is a `ForwardContext`; `state` is the result of `LayerState.layer`,
        or None.
        """

    @property
    def expert_router(self) -> RouterConfig | None:
        """Config of the router of a mixture of experts, whose `RouterOutput` has the experts of each token; None for
        any other layer. The layer declares `Layer.reads_experts` if it uses the experts in `context.experts`."""
        return None

    @property
    def has_extra_output(self) -> bool:
        """Whether the layer's `forward` returns a pair (hidden states, extra output) instead of hidden states.

        The extra output of a mixer is the `KeysValues` that later layers attend to, or None in a decoding pass. The
        extra output of a feed-forward layer is the `RouterOutput` of a mixture of experts.
        """
        return False

    @property
    def parts(self) -> Sequence[LayerConfig]:
        """The configs of the layers that are computed side by side in this layer; itself if it is only one."""
        return (self,)

    @property
    def state_from(self) -> int | None:
        """Number of an earlier layer: this layer has no decoding state of its own and reads that layer's state."""
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
        """An empty decoding state for `num_layers` layers of this config; None if they keep nothing of earlier tokens.

        Every mixer that generates text defines it.

        Args:
            num_layers: number of layers of this config in the model.
            batch_size: number of sequences.
            max_length: maximum number of tokens in each sequence.
            hidden_size: hidden size of the model.
            dtype: dtype of the model's parameters.
            device: device of the model's parameters.

        Raises:
            ConfigError: the layer defines no decoding state.
        """
        raise ConfigError(
            f"{type(self).__name__} has no decoding state: define new_state(), which may return None if a token's "
            "result does not depend on earlier tokens"
        )

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        """How checkpoints store the layer's tensors; by default each under its own name.

        Args:
            hidden_size: hidden size of the model.
            native: name of the layer in the model.
            checkpoint: name of its block in the checkpoint.
            names: the family's names of parts of a layer, where they differ from `NAMES`.
        """
        with torch.device("meta"), skip_init():
            tensors = persistent_tensors(self.build(hidden_size))
        place = self.place or native.rpartition(".")[2]
        return [rename(f"{native}.{name}", f"{checkpoint}.{place}.{name}") for name in tensors]

    def unused(self, checkpoint: str, names: Mapping[str, str]) -> list[str]:
        """Patterns of tensors that checkpoints may have for such a layer and that it does not need.

        Args:
            checkpoint: name of its block in the checkpoint.
            names: the family's names of parts of a layer, where they differ from `NAMES`.
        """
        return []

    def tensor_shard(self: Self, ranks: int) -> Self:
        """The config of one rank's shard of the layer under tensor parallelism (see `layers.sharding`). The rank's
        decoding state is built from it.

        Raises:
            ConfigError: the layer cannot be split over so many ranks; the message names the field.
        """
        raise ConfigError(
            f"{type(self).__name__}: has no rule for tensor parallelism; define tensor_shard(ranks), and "
            "tensor_parallel of the module, or shard such models by FSDP2 alone"
        )

    def with_attention_backend(self: Self, name: str) -> Self:
        """The config with another attention backend; itself if the layer has no attention."""
        return self

    def state_elements(self, max_length: int) -> int:
        """Number of elements in the decoding state of one layer for a sequence of up to `max_length` tokens."""
        return 0

    def info(self) -> dict[str, Any]:
        """Sizes of the layer that `ligermodels info` shows."""
        return {}
