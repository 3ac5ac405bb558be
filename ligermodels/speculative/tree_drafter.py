"""Drafting a tree that grows from the head's probabilities: EAGLE-3, and MTP heads of one layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.layers import TreeTokens
from ligermodels.speculative.drafting import ChooseDrafts
from ligermodels.speculative.layout import Candidates
from ligermodels.speculative.step_drafter import StepDrafter
from ligermodels.speculative.tree import DynamicTree


class TreeDrafter(StepDrafter):
    """A `StepDrafter` of a head with one layer that drafts a `DynamicTree`.

    At each level the head runs over the tokens of all levels above, as one tree after the text: each token attends to
    the text and to its ancestors. The tokens of earlier levels are computed again, so there is no cache of drafts.
    """

    tree: DynamicTree

    def begin(self, batch_size: int, max_length: int, tree: Any, choose: ChooseDrafts) -> None:
        # The cache also holds the tokens that continue, k per level.
        super().begin(batch_size, max_length + tree.max_depth * tree.top_k, tree, choose)

    def draft(self, sequences: ops.Sequences) -> Tensor:
        """Candidate tokens, long (B, depth, k ** 2). Their tree is then in `layout`."""
        k, end = self.tree.top_k, sequences.cache_seqlens
        tokens, scores = self._candidates(self._hidden[0])
        best, growth = [tokens[:, 0]], Candidates(self.tree, scores[:, 0])
        beam = best[0]
        row = torch.arange(len(beam), device=beam.device)[:, None]
        hidden = self._hidden[0].expand(-1, k, -1)
        parent = torch.full_like(beam, -1)
        drafted: _Drafted | None = None
        while len(best) < self.tree.max_depth:
            drafted = _Drafted.after(drafted, beam, hidden, parent)
            outputs = self.head(
                self.embed(drafted.tokens),
                drafted.hidden,
                layer=0,
                position_ids=end[:, None] + drafted.depth,
                cache_seqlens=end,
                state=self._states[0],
                tree=TreeTokens(drafted.mask, drafted.parent.clamp(min=0), drafted.depth),
            )[:, -k:]
            tokens, scores = self._candidates(outputs)
            chosen = growth.grow(scores)
            best.append(tokens.flatten(1))
            beam, parent = best[-1].gather(1, chosen), drafted.tokens.shape[1] - k + chosen // k
            hidden = outputs[row, chosen // k]
        self.layout = growth.layout()
        width = max(each.shape[1] for each in best)
        return torch.stack([F.pad(each, (0, width - each.shape[1])) for each in best], dim=1)

    def _candidates(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """The k most probable tokens after outputs (B, T, H) of the head: ids and log-probabilities, both (B, T, k)."""
        logits, k = self.lm_head(outputs), self.tree.top_k
        if logits.shape[-1] < k:
            raise InputError(f"tree: has {k} candidates per token, but there are {logits.shape[-1]} tokens")
        chosen = ops.topk_indices(logits, k)
        return self.token_ids(chosen), logits.float().log_softmax(dim=-1).gather(-1, chosen)


class _Drafted:
    """The m tokens of all levels that continue, as a tree after the text.

    tokens: long (B, m). hidden: (B, m, H), the inputs of the head. parent: long (B, m), -1 for the first level. depth:
    long (B, m), from 0. mask: bool (B, m, m).
    """

    def __init__(self, tokens: Tensor, hidden: Tensor, parent: Tensor, depth: Tensor, mask: Tensor) -> None:
        self.tokens, self.hidden, self.parent, self.depth, self.mask = tokens, hidden, parent, depth, mask

    @classmethod
    def after(cls, above: _Drafted | None, tokens: Tensor, hidden: Tensor, parent: Tensor) -> _Drafted:
        """The tokens above and a further level.

        Args:
            above: the tokens of the levels above; None for the first level.
            tokens: long (B, k).
            hidden: (B, k, H), the inputs of the head.
            parent: long (B, k), indices of tokens above; -1 in the first level.
        """
        k = tokens.shape[1]
        own = torch.eye(k, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        if above is None:
            return cls(tokens, hidden, parent, torch.zeros_like(tokens), own)
        ancestors = above.mask.gather(1, parent[..., None].expand(-1, -1, above.mask.shape[2]))
        mask = torch.cat([F.pad(above.mask, (0, k)), torch.cat([ancestors, own], dim=2)], dim=1)
        depth = torch.cat([above.depth, above.depth[:, -1:].expand(-1, k) + 1], dim=1)
        pairs = (above.tokens, tokens), (above.hidden, hidden), (above.parent, parent)
        joined = [torch.cat(pair, dim=1) for pair in pairs]
        return cls(joined[0], joined[1], joined[2], depth, mask)
