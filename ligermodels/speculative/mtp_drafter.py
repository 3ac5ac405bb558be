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

    Layer k of the head has a cache of its own. At position t of the text it holds what the layer makes of the result
    of layer k - 1 at t, or for the first one of the model's own hidden state, and token t + 1 + k, as in training. With
    the text known up to position n, that is possible for positions up to n - 1 - k: `start` and `follow` add these, and
    keep the results at the last of them. In a draft, layer k runs over the k positions after it, with tokens of the
    draft. Past the last layer that one is applied again, each time at a further position. What comes of drafts is
    overwritten.

    Args:
        embed: token ids (B, T) -> (B, T, H).
        head: an `MTPHead`.
        lm_head: hidden states (..., H) -> logits (..., V).
        new_state: (batch_size, max_length) -> the head's decoding state.
        num_layers: of the head.
    """

    reads_states = True

    def __init__(
        self,
        embed: Callable[[Tensor], Tensor],
        head: Callable[..., Tensor],
        lm_head: Callable[[Tensor], Tensor],
        new_state: Callable[[int, int], DecodingState],
        num_layers: int = 1,
    ) -> None:
        self.embed, self.head, self.lm_head, self.new_state, self.num_layers = (
            embed,
            head,
            lm_head,
            new_state,
            num_layers,
        )

    def begin(self, batch_size: int, max_length: int, tree: Tree) -> None:
        self.tree = tree
        # Past the end of a text: the places of a path, or of a draft.
        self._states: Any = self.new_state(batch_size, max_length + tree.max_depth + self.num_layers).layers

    def start(self, sequences: ops.Sequences, states: Tensor) -> None:
        batch, length, size = states.shape
        places = torch.arange(length, device=states.device)[None]
        text = sequences.text
        self._hidden: list[Tensor] = []
        for layer in range(self.num_layers):
            lengths = (sequences.start - layer).clamp(min=0)
            following = (places + 1 + layer).clamp(max=text.shape[1] - 1).expand(batch, -1)
            last = (lengths[:, None] - 1).clamp(min=0)
            states = self.head(
                self.embed(text.gather(1, following)),
                states,
                layer=layer,
                position_ids=torch.minimum(places, last),
                seq_lens=lengths,
                state=self._states[layer],
            )
            self._hidden.append(states.gather(1, last[..., None].expand(batch, 1, size)))

    def draft(self, sequences: ops.Sequences) -> Tensor:
        tree, outputs = self.tree, self._hidden[0]
        best: list[Tensor] = []
        while len(best) < tree.max_depth:
            depth, end = len(best), sequences.cache_seqlens
            if 0 < depth < self.num_layers:
                kept = self._hidden[depth - 1]
                hidden = kept if depth == 1 else torch.cat([kept, outputs], dim=1)
                tokens = torch.cat([each[:, :, 0] for each in best], dim=1)
                outputs = self._run(depth, tokens, hidden, end - depth)
            elif depth:
                layer = self.num_layers - 1
                outputs = self._run(layer, best[-1][:, :, 0], outputs[:, -1:], end + depth - self.num_layers)
            logits = self.lm_head(outputs[:, -1:])
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
        # Of a sequence that has ended, 0 tokens are new.
        last = (sequences.cache_seqlens - start - 1).clamp(min=0)[:, None, None].expand(batch, 1, size)
        hidden = states.gather(1, path.expand(-1, -1, size))
        for layer, kept in enumerate(self._hidden):
            outputs = self._run(layer, tokens, hidden, start - layer)
            hidden = torch.cat([kept, outputs[:, :-1]], dim=1)
            kept.copy_(outputs.gather(1, last))

    def _run(self, layer: int, tokens: Tensor, hidden: Tensor, start: Tensor) -> Tensor:
        """Tokens (B, T) and states (B, T, H), of which the first are at positions `start` (B,), through a layer.

        Where `start` is negative, in a text of fewer tokens than layers, the first positions do not exist, and what is
        there and returned for them has no meaning."""
        batch, length, size = hidden.shape
        places, embeds = torch.arange(length, device=start.device)[None], self.embed(tokens)
        if layer > 1:  # of a text of one token or more
            missing = (-start).clamp(min=0)[:, None]
            moved = (places + missing).clamp(max=length - 1)[..., None].expand(batch, length, size)
            embeds, hidden, start = embeds.gather(1, moved), hidden.gather(1, moved), start.clamp(min=0)
        outputs = self.head(
            embeds,
            hidden,
            layer=layer,
            position_ids=start[:, None] + places,
            cache_seqlens=start,
            state=self._states[layer],
        )
        if layer > 1:
            back = (places - missing).clamp(min=0)[..., None].expand(batch, length, size)
            outputs = outputs.gather(1, back)
        return outputs
