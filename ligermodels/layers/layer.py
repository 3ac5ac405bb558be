"""The base class of token mixers and feed-forward layers, with a layer's declarations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from ligermodels.errors import ConfigError
from ligermodels.layers import sequence_parallel
from ligermodels.layers.config import LayerConfig
from ligermodels.layers.float8 import INPUT
from ligermodels.layers.linear import input_form
from ligermodels.layers.sharding import TensorSharding
from ligermodels.ops import Float8Form


class Layer(nn.Module):
    """Base class of the layers that a `Block` is built from.

    A subclass defines `forward(x, context, state)` as a token mixer, or `forward(x, context)` as a feed-forward layer.
    Both map hidden states (B, T, H) to hidden states of the same shape; `context` is a `ForwardContext`. The attributes
    below declare further features of the layer. Every default is safe: the layer is then given all tokens, and a
    feature that it would have to support is refused with an error that names it.
    """

    token_wise: bool = False
    """Whether the result for a token depends on no other token of `x`. The layer may then be given only the tokens
    whose states are needed, (1, n, H), or a part of the tokens under sequence parallelism; a feed-forward layer also
    under context parallelism."""

    context_parallel: ClassVar[bool] = False
    """Whether a layer that is not `token_wise`, or a token mixer, supports context parallelism: if `context.shard` is
    not None, `x` holds only this rank's tokens, and the layer exchanges with the other ranks through that
    `ContextShard`. Tokens beyond the end of a row are padding, which must not influence other tokens; in a causal
    mixer it does not. A `token_wise` mixer declares it too, because it may read keys of other tokens from the
    context."""

    sequence_parallel: ClassVar[bool] = False
    """Whether a layer that is not `token_wise` supports sequence parallelism: under tensor parallelism `x` is then this
    rank's part of the tokens, (1, n, H), and the layer only passes it to its linear layers, which gather it."""

    tensor_parallel: ClassVar[Mapping[str, TensorSharding] | None] = None
    """How tensor parallelism distributes the layer's own parameters and its linear layers, by name; see
    `ligermodels.layers.sharding`. None: tensor parallelism is refused."""

    expert_parallel: ClassVar[tuple[str, ...]] = ()
    """Names of the parameters, or of submodules with parameters, that have a row for each expert. Expert parallelism
    spreads them over ranks. Such a layer has an attribute `_expert_mesh`, None until it is spread."""

    batch_invariant: ClassVar[bool] = False
    """Whether under `ops.set_batch_invariant` the layer's result for a token depends on the token's own document alone,
    bit for bit, while decoding too, as it does if the layer computes by ops that take the mode. Otherwise the mode is
    refused."""

    reads_experts: ClassVar[bool] = False
    """Whether a mixture of experts sends tokens to the experts in `context.experts`, if there are any, in place of the
    experts that its router chooses. Otherwise `routing=` is refused."""

    float8_linears: ClassVar[Mapping[str, str | None]] = {}
    """Names of the linear layers that may compute in float8: "input" for a linear layer that takes `x` itself, None for
    any other. See `ligermodels.layers.float8`."""

    in_float8: bool = False
    """Whether one of its linear layers may compute in float8: `adapt.float8` sets it."""

    def check_tensor_parallel(self, ranks: int) -> None:
        """Raise InputError or ConfigError unless a rank can compute its part of the layer, one of `ranks` parts. The
        parts of linear layers are checked without it."""

    def check_context_parallel(self, ranks: int) -> None:
        """Raise InputError or ConfigError unless the layer can divide its work over `ranks` ranks of context and tensor
        parallelism."""

    def input_form(self) -> Float8Form | None:
        """The form in which the layer takes `x` as a `Float8Tensor` now: the form of its linear layers that take `x`,
        if it is the same for all of them. Else None, and each linear layer casts for itself, as it does if it gathers
        its input from parts of the tokens."""
        if not (self.training or torch.is_grad_enabled()):  # as `Float8.active`; spares decoding the rest
            return None
        linears = [getattr(self, name, None) for name, source in self.float8_linears.items() if source == INPUT]
        forms = {input_form(linear) for linear in linears if linear is not None}
        form = forms.pop() if len(forms) == 1 else None
        return None if form is None or sequence_parallel.current() is not None else form


_DEFAULTS = Layer()


def declared(module: nn.Module) -> Layer:
    """The declarations of a layer of a block: the module itself, or the defaults of `Layer` for a module that replaced
    the layer after it was built and is no `Layer`."""
    return module if isinstance(module, Layer) else _DEFAULTS


def built_layer(field: str, config: LayerConfig | None, hidden_size: int) -> Layer | None:
    """The module that the config of a layer builds; None for None.

    Args:
        field: name of the block's field that holds the config, for the error.
        config: the layer's config, or None.
        hidden_size: hidden size of the model.

    Raises:
        ConfigError: the module's class does not derive from `Layer`.
    """
    module = None if config is None else config.build(hidden_size)
    if module is None or isinstance(module, Layer):
        return module
    name = type(module).__name__
    raise ConfigError(
        f"{field}: {type(config).__name__}.build returns a {name}, and {name} does not derive from "
        f"ligermodels.layers.Layer; write `class {name}(Layer)`"
    )
