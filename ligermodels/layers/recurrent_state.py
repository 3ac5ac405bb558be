"""A recurrent value per sequence: the decoding state of mixers that carry one from token to token."""

from __future__ import annotations

import torch
from torch import Tensor

from ligermodels.layers.context import ForwardContext


class RecurrentState:
    """`shape` elements per layer and sequence, zero before the first token; see `LayerState`.

    Args:
        num_layers, batch_size: layers and sequences.
        shape: of the value after a token.
        dtype, device: of the values; a recurrence over many tokens usually needs float32.
    """

    def __init__(
        self, num_layers: int, batch_size: int, *shape: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._values = torch.zeros(num_layers, batch_size, *shape, dtype=dtype, device=device)
        self._layers = [LayerRecurrence(value) for value in self._values]

    def layer(self, index: int) -> LayerRecurrence:
        """The value of the `index`-th layer."""
        return self._layers[index]

    def reset(self) -> None:
        """Zero."""
        self._values.zero_()

    def commit(self, slots: Tensor) -> None:
        """Keep the value after the last node of the accepted path."""
        node = slots[:, -1] - slots[:, 0]
        for layer in self._layers:
            layer.commit(node)


class LayerRecurrence:
    """One layer's `value` (B, ...), of a fixed address: that after the tokens so far."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._nodes: Tensor | None = None

    def update(self, values: Tensor, context: ForwardContext) -> None:
        """values (B, T, ...): the value after each new token. That after the last one is kept; of a tree, all are until
        `commit`."""
        if context.tree is not None:
            self._nodes = values
            return
        sequence = torch.arange(len(values), device=values.device)
        last = values.shape[1] - 1 if context.seq_lens is None else context.seq_lens - 1
        self.value.copy_(values[sequence, last])

    def commit(self, node: Tensor) -> None:
        """Keep the value after `node`, long (B,), of the tree of the last pass."""
        if self._nodes is not None:
            self.value.copy_(self._nodes[torch.arange(len(node), device=node.device), node])
            self._nodes = None
