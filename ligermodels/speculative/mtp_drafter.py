"""Drafting with a head of multi-token prediction: one token after another, with a cache of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.generation.state import DecodingState
from ligermodels.speculative.tree import Tree


class MTPDrafter:
    """A `Drafter`: the best tokens of each step of the head, which follow the best token of the step before.

    The cache holds for each position t of the text what the head makes of the model's own hidden state h_t and token
    t + 1; `follow` adds those of an accepted path. A draft's own positions come after them, and are overwritten.

    Args:
        embed: token ids (B, T) -> (B, T, H).
        head: an `MTPHead`.
        lm_head: hidden states (..., H) -> logits (..., V).
        new_state: (batch_size, max_length) -> the head's decoding state.
    """

    reads_states = True

    def __init__(
        self,
        embed: Callable[[Tensor], Tensor],
        head: Callable[..., Tensor],
        lm_head: Callable[[Tensor], Tensor],
        new_state: Callable[[int, int], DecodingState],
    ) -> None:
        self.embed, self.head, self.lm_head, self.new_state = embed, head, lm_head, new_state

    def begin(self, batch_size: int, max_length: int, tree: Tree) -> None:
        self.tree = tree
        # Past the end of a text: the places of a path, or of a draft.
        self._state: Any = self.new_state(batch_size, max_length + tree.max_depth + 1).layers[0]

    def start(self, sequences: ops.Sequences, states: Tensor) -> None:
        batch, length = states.shape[:2]
        places = torch.arange(length, device=states.device)
        lengths = sequences.start[:, None]
        y = self.head(
            self.embed(sequences.text[:, 1 : length + 1]),
            states,
            position_ids=torch.minimum(places, lengths - 1),
            seq_lens=sequences.start,
            state=self._state,
        )
        self._hidden = y.gather(1, (lengths - 1)[..., None].expand(batch, 1, y.shape[2]))

    def draft(self, sequences: ops.Sequences) -> Tensor:
        tree, hidden = self.tree, self._hidden
        best: list[Tensor] = []
        while len(best) < tree.max_depth:
            if best:
                place = sequences.cache_seqlens + len(best) - 1
                hidden = self._run(best[-1][:, :, 0], hidden, place)
            logits = self.lm_head(hidden)
            if logits.shape[-1] < tree.width:
                raise InputError(f"tree: has {tree.width} candidates of a token, of {logits.shape[-1]} that there are")
            best.append(ops.topk_indices(logits, tree.width))
        return torch.cat(best, dim=1) if best else sequences.root.new_zeros(len(sequences.root), 0, 0)

    def follow(self, sequences: ops.Sequences, slots: Tensor, states: Tensor) -> None:
        batch, size = len(slots), states.shape[2]
        start, text = slots[:, 0], sequences.text
        path = (slots - slots[:, :1])[..., None]
        places = start[:, None] + torch.arange(1, slots.shape[1] + 1, device=start.device)
        tokens = text.gather(1, places.clamp(max=text.shape[1] - 1))
        y = self._run(tokens, states.gather(1, path.expand(-1, -1, size)), start)
        # Of a sequence that has ended, 0 tokens are new.
        last = (sequences.cache_seqlens - start - 1).clamp(min=0)[:, None, None]
        self._hidden.copy_(y.gather(1, last.expand(batch, 1, size)))

    def _run(self, tokens: Tensor, hidden: Tensor, start: Tensor) -> Tensor:
        """Tokens (B, T) and states (B, T, H), of which the first are at positions `start` (B,), through the head."""
        places = start[:, None] + torch.arange(tokens.shape[1], device=start.device)
        return self.head(self.embed(tokens), hidden, position_ids=places, cache_seqlens=start, state=self._state)
