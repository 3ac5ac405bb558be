"""The decoding state of Gated DeltaNet: its state matrices, and the last inputs of the convolution before them."""

from __future__ import annotations

import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.layers.context import TreeTokens


class DeltaState:
    """Zeros before the first token, of fixed addresses; see `LayerState`.

    Args:
        num_layers, batch_size: layers and sequences.
        conv_inputs: (width - 1, channels) of the convolution.
        matrix: (R, K, V), of all value heads.
        dtype: of the inputs; matrices are fp32.
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
        self._layers = [LayerDelta(*each) for each in zip(self._inputs, self._matrices, strict=True)]

    def layer(self, index: int) -> LayerDelta:
        """The state of the `index`-th layer."""
        return self._layers[index]

    def reset(self) -> None:
        """Zero."""
        self._inputs.zero_()
        self._matrices.zero_()

    def commit(self, slots: Tensor) -> None:
        """Keep the state after the last node of the accepted path."""
        node = slots[:, -1] - slots[:, 0]
        for layer in self._layers:
            layer.commit(node)


class LayerDelta:
    """One layer's `inputs` (B, width - 1, channels), those of the last tokens, and `matrix` (B, R, K, V).

    A step of one token changes both in place, by `ops.causal_conv_step` and `ops.gated_delta_rule_step`."""

    def __init__(self, inputs: Tensor, matrix: Tensor) -> None:
        self.inputs, self.matrix = inputs, matrix
        self._tree: tuple[Tensor, ops.TreeUpdates, TreeTokens] | None = None

    def advance(self, inputs: Tensor, matrix: Tensor, seq_lens: Tensor | None) -> None:
        """Add tokens: inputs (B, T, channels), and the matrix after them; seq_lens (B,), how many of T are there."""
        whole = torch.cat([self.inputs, inputs], dim=1)
        if seq_lens is None:
            self.inputs.copy_(whole[:, inputs.shape[1] :])
        else:
            places = seq_lens[:, None] + torch.arange(self.inputs.shape[1], device=whole.device)
            self.inputs.copy_(whole[torch.arange(len(whole), device=whole.device)[:, None], places])
        self.matrix.copy_(matrix)

    def branch(self, inputs: Tensor, updates: ops.TreeUpdates, tree: TreeTokens) -> None:
        """Add the nodes of a tree, of which `commit` keeps a path: inputs (B, N, channels), and their updates."""
        self._tree = inputs, updates, tree

    def commit(self, node: Tensor) -> None:
        """Keep the state after `node`, long (B,), of the tree of the last pass."""
        if self._tree is not None:
            inputs, updates, tree = self._tree
            ops.commit_conv_inputs(self.inputs, inputs, node, (tree.parent, tree.depth))
            ops.commit_tree(self.matrix, updates, node, tree.mask)
            self._tree = None
