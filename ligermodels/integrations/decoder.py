"""A native decoder on the modules of a transformers model's backbone."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.integrations.modules import BlockView, native_of
from ligermodels.integrations.views import AddedFeatures, PerLayerInputsView
from ligermodels.layers import BlockOutput, SharedKVAttentionConfig
from ligermodels.layers.checkpointing import ActivationCheckpointing
from ligermodels.models.decoder import Decoder


class _LayerCall:
    """A transformers layer, called as a native block, and whether it is `token_wise`; the features `add`, of all tokens
    of the pass, are added to its result."""

    def __init__(self, layer: nn.Module, add: AddedFeatures | None = None) -> None:
        self._layer, self._add, config = layer, add, native_of(layer).config
        shares = isinstance(config.mixer, SharedKVAttentionConfig)
        self.token_wise = shares and getattr(BlockView(layer).mlp, "token_wise", False)

    def __call__(self, *args: Any) -> BlockOutput:
        output = BlockOutput(*self._layer(*args))  # gradient checkpointing makes it a plain tuple
        return output if self._add is None else output._replace(hidden=self._add.to(output.hidden))


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

    _context_mesh = _token_mesh = None
    layout, _embed, _context, _run = Decoder.layout, Decoder._embed, Decoder._context, Decoder._run

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
