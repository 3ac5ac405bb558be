"""The nodes of a candidate tree as tensors: of a fixed tree, or of trees that grow from probabilities."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.layers import TreeTokens
from ligermodels.speculative.tree import DynamicTree, Tree


class Layout(NamedTuple):
    """The N nodes of a tree, ordered by depth. Where each of B sequences has its own, tensors begin with a dimension B.

    paths: the paths of the nodes.
    rank: long (N,), rank of each node among the candidates of its depth; -1 for the root.
    tokens: the nodes, for a forward pass.
    """

    paths: ops.Paths
    rank: Tensor
    tokens: TreeTokens

    @classmethod
    def of(cls, tree: Tree, device: torch.device) -> Layout:
        """The layout of a fixed tree, on a device."""
        paths = ops.Paths(*(tensor.to(device) for tensor in (tree.parent, tree.depth, tree.route)))
        return cls(paths, tree.rank.to(device), TreeTokens(tree.mask.to(device), paths.parent, paths.depth))


class Candidates:
    """The candidates of all levels of a `DynamicTree`, for a batch. They are numbered level by level.

    Args:
        tree: the tree.
        scores: (B, k), log-probabilities of the first level.
    """

    def __init__(self, tree: DynamicTree, scores: Tensor) -> None:
        self._tree, self._scores = tree, [scores]
        self._parents = [torch.full_like(scores, -1, dtype=torch.long)]
        self.beam = torch.arange(tree.top_k, device=scores.device).expand(len(scores), -1)
        """Long (B, k): numbers of the candidates that continue."""
        self.beam_scores = scores

    def grow(self, log_probabilities: Tensor) -> Tensor:
        """Add a level. Its k most probable paths continue.

        Args:
            log_probabilities: (B, k, k), of the candidates after each candidate of `beam`, given that candidate.

        Returns:
            Long (B, k): the new `beam` as indices into the flattened candidates of this level.
        """
        k, before = self._tree.top_k, sum(scores.shape[1] for scores in self._scores)
        scores = (self.beam_scores[..., None] + log_probabilities).flatten(1)
        self._parents.append(self.beam[..., None].expand(-1, -1, k).flatten(1))
        self._scores.append(scores)
        chosen = ops.topk_indices(scores, k)
        self.beam, self.beam_scores = before + chosen, scores.gather(1, chosen)
        return chosen

    def layout(self) -> Layout:
        """The tree of the candidates with the most probable paths. A candidate is chosen with its ancestors: their
        paths are at least as probable, and their numbers lower."""
        scores, parents = torch.cat(self._scores, dim=1), torch.cat(self._parents, dim=1)
        batch, device, count, k = len(scores), scores.device, len(self._tree), self._tree.top_k
        chosen = ops.topk_indices(scores, count - 1).sort(dim=1).values
        level = (chosen + (k - 1) * k) // k**2  # from 0; the first level has k candidates, the others k ** 2
        place = torch.where(level > 0, (chosen - k) % k**2, chosen)
        node = torch.arange(count, device=device).expand(batch, -1)
        node_of = torch.zeros_like(parents).scatter(1, chosen, node[:, 1:])
        above = parents.gather(1, chosen)
        root = node.new_zeros(batch, 1)
        parent = torch.cat([root, node_of.gather(1, above.clamp(min=0)).masked_fill(above < 0, 0)], dim=1)
        depth, rank = torch.cat([root, level + 1], dim=1), torch.cat([root - 1, place], dim=1)
        upward = [node]
        for _ in range(self._tree.max_depth):
            upward.append(parent.gather(1, upward[-1]))
        ancestors = torch.stack(upward, dim=2)  # from each node to the root, repeated
        mask = torch.zeros(batch, count, count, dtype=torch.bool, device=device).scatter_(2, ancestors, True)
        levels = depth[..., None] - torch.arange(self._tree.max_depth + 1, device=device)
        routes = ancestors.gather(2, levels.clamp(min=0))
        return Layout(ops.Paths(parent, depth, routes), rank, TreeTokens(mask, parent, depth))
