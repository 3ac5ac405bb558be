"""Per-layer inputs: beside hidden states, each layer gets a small vector per token (Gemma 3n, Gemma 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ligermodels.convert.mappings import WeightMapping, rename
from ligermodels.errors import BackendError, InputError
from ligermodels.layers.activation import ACTIVATIONS
from ligermodels.layers.config import LayerConfig
from ligermodels.layers.config_checks import check_choice, check_sizes
from ligermodels.layers.context import ForwardContext
from ligermodels.layers.embedding import Embedding
from ligermodels.layers.layer import Layer
from ligermodels.layers.linear import Linear
from ligermodels.layers.norm import NormConfig, adds_residual
from ligermodels.layers.sharding import TensorSharding


@dataclass(frozen=True)
class PerLayerInputsConfig:
    """Per-layer inputs, computed from an embedding of the token and from the hidden states before the first layer.

    Args:
        vocab_size: rows of the embedding.
        num_layers: number of layers.
        size: channels for each layer.
        norm: norm of the part from the hidden states.
        padding_idx: row of the embedding that gets no gradient, or None.
    """

    NAMES: ClassVar[Mapping[str, str]] = {
        "embed": "embed_tokens_per_layer",
        "projection": "per_layer_model_projection",
        "norm": "per_layer_projection_norm",
    }

    vocab_size: int
    num_layers: int
    size: int
    norm: NormConfig
    padding_idx: int | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "num_layers", "size")

    def weight_mappings(self, native: str, checkpoint: str) -> list[WeightMapping]:
        """Mappings of the tensors: `native` and `checkpoint` are the prefixes of their names, with the dot."""
        return [rename(f"{native}{part}.weight", f"{checkpoint}{name}.weight") for part, name in self.NAMES.items()]


class PerLayerInputs(nn.Module):
    """(norm(projection(x) / sqrt(H)) + sqrt(P) * embedding(token)) / sqrt(2), for all layers at once."""

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"projection": "replicated"}

    def __init__(self, hidden_size: int, config: PerLayerInputsConfig) -> None:
        super().__init__()
        self.config = config
        width = config.num_layers * config.size
        self.embed = Embedding(config.vocab_size, width, config.size**0.5, config.padding_idx)
        self.projection = Linear(hidden_size, width, bias=False)
        self.norm = config.norm.build(config.size)

    def forward(self, input_ids: Tensor | None, x: Tensor, embedded: Tensor | None = None) -> Tensor:
        """Compute the inputs of all layers.

        Args:
            input_ids: long (B, T).
            x: their embeddings, (B, T, H).
            embedded: embeddings per layer, (B, T, layers, P), to use instead of looking up `input_ids`.

        Returns:
            (B, T, layers, P).

        Raises:
            InputError: `embedded` has another shape.
            BackendError: torch.compile traces this on a GPU with gradients. The embedding's gradients by torch 2.11's
                inductor were found to be wrong there. Without `fullgraph` this part is then not compiled.
        """
        shape = (self.config.num_layers, self.config.size)
        if embedded is None:
            embedded = cast(Tensor, self.embed(input_ids))
        elif embedded.shape != (*x.shape[:-1], *shape):
            raise InputError(f"per_layer_inputs: must be {(*x.shape[:-1], *shape)}, got {tuple(embedded.shape)}")
        if torch.compiler.is_compiling() and embedded.is_cuda and embedded.requires_grad:
            raise BackendError(
                "torch.compile: the gradient of embed_tokens_per_layer by inductor on a GPU is wrong; freeze it "
                "(requires_grad_(False)), or compile without fullgraph, which leaves this part out"
            )
        projected = self.norm((self.projection(x) * x.shape[-1] ** -0.5).unflatten(-1, shape))
        return cast(Tensor, (projected + embedded.reshape(projected.shape)) * 2**-0.5)


@dataclass(frozen=True)
class PerLayerInputConfig(LayerConfig):
    """The part of a layer that adds its per-layer input.

    Args:
        layer: number of the layer.
        size: channels of the input.
        norm: norm of the result before it is added to the hidden states.
        activation: a key of ACTIVATIONS.
    """

    NAMES: ClassVar[Mapping[str, str]] = {
        "gate": "per_layer_input_gate",
        "projection": "per_layer_projection",
        "norm": "post_per_layer_input_norm",
    }

    layer: int
    size: int
    norm: NormConfig
    activation: str = "gelu_tanh"

    def __post_init__(self) -> None:
        check_sizes(self, "layer", least=0)
        check_sizes(self, "size")
        check_choice(self, "activation", ACTIVATIONS)

    def build(self, hidden_size: int) -> nn.Module:
        return PerLayerInput(hidden_size, self)

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        return [rename(f"{native}.{part}.weight", f"{checkpoint}.{name}.weight") for part, name in self.NAMES.items()]

    def tensor_shard(self, ranks: int) -> PerLayerInputConfig:
        """The whole config, because there are few channels."""
        return self

    def info(self) -> dict[str, Any]:
        return {"per_layer_input_size": self.size}


class PerLayerInput(Layer):
    """x + norm(projection(activation(gate(x)) * input of the layer))."""

    token_wise = True
    batch_invariant: ClassVar[bool] = True
    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"gate": "replicated", "projection": "replicated"}

    def __init__(self, hidden_size: int, config: PerLayerInputConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Linear(hidden_size, config.size, bias=False)
        self.projection = Linear(config.size, hidden_size, bias=False)
        self.norm = config.norm.build_after(hidden_size)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """x (B, T, H), or (1, n, H) of the needed tokens -> the same shape. InputError without per-layer inputs."""
        if context.per_layer_inputs is None:
            raise InputError("per_layer_inputs: of the ForwardContext are missing, and a layer takes them")
        own = context.per_layer_inputs[:, :, self.config.layer]
        gate = self.gate(x)
        gated = ACTIVATIONS[self.config.activation](gate, own.to(gate.dtype))
        y = self.projection(gated)
        return cast(Tensor, self.norm(y, x) if adds_residual(self.norm) else x + self.norm(y))
