"""A native decoder on the modules of a transformers model's backbone."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.integrations.modules import BlockView, native_of
from ligermodels.integrations.views import AddedFeatures, PerLayerInputsView
from ligermodels.layers import SharedKVAttentionConfig
from ligermodels.layers.checkpointing import ActivationCheckpointing
from ligermodels.models.decoder import Decoder


@dataclass
class _Mixer:
    """What a decoder reads of a block's mixer."""

    token_wise: bool


class _LayerCall:
    """A transformers layer, called as a native block, and whether its parts are `token_wise`; to its result `add`, of
    all tokens of the pass, is added."""

    def __init__(self, layer: nn.Module, add: AddedFeatures | None = None) -> None:
        self._layer, self._add, config = layer, add, native_of(layer).config
        self.mixer = _Mixer(isinstance(config.mixer, SharedKVAttentionConfig))
        self.mlp = BlockView(layer).mlp

    def __call__(self, *args: Any) -> Any:
        found = self._layer(*args)
        if self._add is None:
            return found
        x, *more = found if isinstance(found, tuple) else (found,)
        x = self._add.to(x)
        return (x, *more) if more else x


class DecoderView:
    """A native decoder whose parts are those of a transformers model's backbone."""

    def __init__(
        self,
        backbone: Any,
        activation_checkpointing: ActivationCheckpointing = "none",
        added: Sequence[AddedFeatures] = (),
    ) -> None:
        self._backbone, self.config = backbone, backbone.native.config
        layers = backbone.layers[: backbone.config.num_hidden_layers]  # as transformers reads it
        self.blocks = [_LayerCall(layer, add) for layer, add in itertools.zip_longest(layers, added)]
        inputs = self.config.per_layer_inputs
        self.per_layer_inputs = None if inputs is None else PerLayerInputsView(inputs, backbone)
        self.ropes = backbone.native.ropes
        self._activation_checkpointing = activation_checkpointing  # beside that of transformers' layers themselves

    def __call__(self, input_ids: Tensor | None = None, **inputs: Any) -> Tensor:
        """As `Decoder.forward`."""
        device = next(each.device for each in (input_ids, inputs.get("inputs_embeds")) if each is not None)
        native = self._backbone.native.ropes
        if self.ropes is native and any(rope.frequencies.device != device for rope in native):
            if device.type == "meta":  # frequencies have no way back from there
                self.ropes = copy.deepcopy(native).to(device)
            else:
                native.to(device)
        return Decoder.forward(self, input_ids, **inputs)  # type: ignore[arg-type]

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids (B, T) -> (B, T, H)."""
        x: Tensor = self._backbone.embed_tokens(input_ids)
        scale = self.config.embed_scale
        return x if scale is None else x * torch.tensor(scale, dtype=x.dtype)

    def norm(self, x: Tensor) -> Any:
        """The final norm."""
        return self._backbone.norm(x)
