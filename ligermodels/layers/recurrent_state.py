"""Decoding state of recurrent mixers: a value per sequence that each token updates."""

from __future__ import annotations

import torch
from torch import Tensor

from ligermodels.layers.context import ForwardContext
from ligermodels.layers.memory import own_storage


class RecurrentState:
    """A value per layer and sequence, zero before the first token; see `LayerState`.

    Args:
        num_layers: number of layers.
        batch_size: number of sequences.
        shape: shape of the value after a token.
        dtype: dtype of the values; a recurrence over many tokens usually needs float32.
        device: device of the values.
    """

    def __init__(
        self, num_layers: int, batch_size: int, *shape: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._values = torch.zeros(num_layers, batch_size, *shape, dtype=dtype, device=device)
        self._layers = [LayerRecurrence(own_storage(value)) for value in self._values]

    def layer(self, index: int) -> LayerRecurrence:
        """The value of layer number `index`."""
        return self._layers[index]

    def reset(self) -> None:
        """Set all values to zero."""
        self._values.zero_()

    def commit(self, slots: Tensor) -> None:
        """Keep the value after the last node of the accepted path."""
        node = slots[:, -1] - slots[:, 0]
        for layer in self._layers:
            layer.commit(node)


class LayerRecurrence:
    """State of one layer: `value`, (B, ...), after all tokens so far. Its memory is never reallocated."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._nodes: Tensor | None = None

    def update(self, values: Tensor, context: ForwardContext) -> None:
        """Take the values after new tokens, and keep the value after the last token. Of a tree, the values after all
        nodes are kept until `commit`.

        Args:
            values: the value after each new token, (B, T, ...).
            context: context of the forward pass.
        """
        if context.tree is not None:
            self._nodes = values
            return
        sequence = torch.arange(len(values), device=values.device)
        last = values.shape[1] - 1 if context.seq_lens is None else context.seq_lens - 1
        self.value.copy_(values[sequence, last])

    def commit(self, node: Tensor) -> None:
        """Keep the value after `node`, long (B,), of the last pass's tree."""
        if self._nodes is not None:
            self.value.copy_(self._nodes[torch.arange(len(node), device=node.device), node])
            self._nodes = None
