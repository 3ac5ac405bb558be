"""Decoding state of Gated DeltaNet and Mamba2: state matrices, and the last inputs of the convolution."""

from __future__ import annotations

import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.layers.context import TreeTokens
from ligermodels.layers.conv_state import LayerConv
from ligermodels.layers.memory import own_storage


class DeltaState:
    """State of all layers, zero before the first token. Its memory is never reallocated; see `LayerState`.

    Args:
        num_layers: number of layers.
        batch_size: number of sequences.
        conv_inputs: (width - 1, channels) of the convolution.
        matrix: (R, K, V): value heads, key channels, value channels; of Mamba2 heads, state size, head channels.
        dtype: dtype of the inputs of the convolution; matrices are at least fp32.
        device: device of the state.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        conv_inputs: tuple[int, int],
        matrix: tuple[int, int, int],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        self._inputs = torch.zeros(num_layers, batch_size, *conv_inputs, dtype=dtype, device=device)
        self._matrices = torch.zeros(num_layers, batch_size, *matrix, dtype=wide, device=device)
        states = zip(self._inputs, self._matrices, strict=True)
        self._layers = [LayerDelta(*map(own_storage, state)) for state in states]

    def layer(self, index: int) -> LayerDelta:
        """The state of layer number `index`."""
        return self._layers[index]

    def reset(self) -> None:
        """Set the state to zero."""
        self._inputs.zero_()
        self._matrices.zero_()

    def commit(self, slots: Tensor) -> None:
        """Keep the state after the last node of the accepted path."""
        node = slots[:, -1] - slots[:, 0]
        for layer in self._layers:
            layer.commit(node)


class LayerDelta:
    """State of one layer: `inputs` of the last tokens, (B, width - 1, channels), and `matrix`, (B, R, K, V).

    A decode step of one token changes both in place, by `ops.causal_conv_step` and
    `ops.gated_delta_rule_step` or `ops.ssd_step`.
    """

    def __init__(self, inputs: Tensor, matrix: Tensor) -> None:
        self._conv, self.inputs, self.matrix = LayerConv(inputs), inputs, matrix
        self._tree: tuple[ops.TreeUpdates, TreeTokens] | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The arguments of the class: all tensors of a state, outside of passes over trees."""
        return self.inputs, self.matrix

    def advance(self, inputs: Tensor, matrix: Tensor, seq_lens: Tensor | None) -> None:
        """Add tokens of a prefill, or of a part of it.

        Args:
            inputs: inputs of the convolution, (B, T, channels).
            matrix: state matrix after these tokens, (B, R, K, V).
            seq_lens: number of tokens of each row, (B,); None if all rows have T.
        """
        self._conv.advance(inputs, seq_lens)
        self.matrix.copy_(matrix)

    def branch(self, inputs: Tensor, updates: ops.TreeUpdates, tree: TreeTokens) -> None:
        """Add the nodes of a tree. `commit` later keeps one path of them.

        Args:
            inputs: inputs of the convolution, (B, N, channels).
            updates: updates of the state matrix.
            tree: the tree.
        """
        self._conv.branch(inputs, tree)
        self._tree = updates, tree

    def commit(self, node: Tensor) -> None:
        """Keep the state after `node`, long (B,), of the last pass's tree."""
        self._conv.commit(node)
        if self._tree is not None:
            updates, tree = self._tree
            ops.commit_tree(self.matrix, updates, node, tree.mask)
            self._tree = None
