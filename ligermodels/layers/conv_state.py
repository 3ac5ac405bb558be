"""Decoding state of a short causal convolution: its last inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.layers.context import TreeTokens
from ligermodels.layers.memory import own_storage


class ConvState:
    """State of all layers, zero before the first token. Its memory is never reallocated; see `LayerState`.

    Args:
        num_layers: number of layers.
        batch_size: number of sequences.
        conv_inputs: (width - 1, channels) of the convolution.
        dtype: dtype of the inputs.
        device: device of the state.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        conv_inputs: tuple[int, int],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._inputs = torch.zeros(num_layers, batch_size, *conv_inputs, dtype=dtype, device=device)
        self._layers = [LayerConv(own_storage(inputs)) for inputs in self._inputs]

    def layer(self, index: int) -> LayerConv:
        """The state of layer number `index`."""
        return self._layers[index]

    def reset(self) -> None:
        """Set the state to zero."""
        self._inputs.zero_()

    def commit(self, slots: Tensor) -> None:
        """Keep the state after the last node of the accepted path."""
        node = slots[:, -1] - slots[:, 0]
        for layer in self._layers:
            layer.commit(node)


class LayerConv:
    """State of one layer: `inputs` of the last tokens, (B, width - 1, channels).

    A decode step of one token changes it in place, by `ops.causal_conv_step`.
    """

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs
        self._tree: tuple[Tensor, TreeTokens] | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The arguments of the class: all tensors of a state, outside of passes over trees."""
        return (self.inputs,)

    def advance(self, inputs: Tensor, seq_lens: Tensor | None) -> None:
        """Add tokens of a prefill, or of a part of it.

        Args:
            inputs: inputs of the convolution, (B, T, channels).
            seq_lens: number of tokens of each row, (B,); None if all rows have T.
        """
        whole = torch.cat([self.inputs, inputs], dim=1)
        if seq_lens is None:
            self.inputs.copy_(whole[:, inputs.shape[1] :])
        else:
            positions = seq_lens[:, None] + torch.arange(self.inputs.shape[1], device=whole.device)
            self.inputs.copy_(whole[torch.arange(len(whole), device=whole.device)[:, None], positions])

    def branch(self, inputs: Tensor, tree: TreeTokens) -> None:
        """Add the nodes of a tree. `commit` later keeps one path of them.

        Args:
            inputs: inputs of the convolution, (B, N, channels).
            tree: the tree.
        """
        self._tree = inputs, tree

    def commit(self, node: Tensor) -> None:
        """Keep the state after `node`, long (B,), of the last pass's tree."""
        if self._tree is not None:
            inputs, tree = self._tree
            ops.commit_conv_inputs(self.inputs, inputs, node, (tree.parent, tree.depth))
            self._tree = None
