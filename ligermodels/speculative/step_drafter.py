"""Drafting one token after another, with the key/value cache of the head itself: MTP heads and EAGLE-3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.generation.state import DecodingState
from ligermodels.speculative.drafting import ChooseDrafts, Drafter, unchanged
from ligermodels.speculative.tree import DynamicTree, Tree


class StepDrafter(Drafter):
    """A `Drafter` with a head of which each step continues from the best token of the previous step.

    Layer k of the head has its own cache. As in training, layer k at position t of the text reads token t + 1 + k, and
    the result of layer k - 1 at t, or for k = 0 the model's hidden state. With the text known up to position n, layer k
    can run at positions up to n - 1 - k. `start` and `follow` run it there, and keep its result at position n - 1 - k.
    In a draft, layer k runs over the k positions after n - 1 - k, with tokens of the draft. After the last layer, a
    draft applies the last layer again, each time one position further. `follow` overwrites the cache entries of drafts.

    Args:
        embed: token ids (B, T) -> embeddings (B, T, H).
        head: an `MTPHead`.
        lm_head: hidden states (..., H) -> logits (..., V).
        new_state: (batch_size, max_length) -> the head's decoding state.
        num_layers: number of layers of the head.
        read: the model's states (B, T, ...) -> what the head reads of them, (B, T, H).
        token_ids: candidates of the lm_head -> ids of the model's tokens, where these differ.
        boundaries: see `Drafter`.
    """

    reads_states = True

    def __init__(
        self,
        embed: Callable[[Tensor], Tensor],
        head: Callable[..., Tensor],
        lm_head: Callable[[Tensor], Tensor],
        new_state: Callable[[int, int], DecodingState],
        num_layers: int = 1,
        *,
        read: Callable[[Tensor], Tensor] = unchanged,
        token_ids: Callable[[Tensor], Tensor] = unchanged,
        boundaries: tuple[int, ...] = (),
    ) -> None:
        self.embed, self.head, self.lm_head = embed, head, lm_head
        self.new_state, self.num_layers = new_state, num_layers
        self.read, self.token_ids, self.boundaries = read, token_ids, boundaries

    def begin(self, batch_size: int, max_length: int, tree: Tree | DynamicTree, choose: ChooseDrafts) -> None:
        self.tree, self.choose = tree, choose
        # A path or a draft may extend beyond the end of the text.
        self._states: Any = self.new_state(batch_size, max_length + tree.max_depth + self.num_layers).layers

    def start(self, sequences: ops.Sequences, states: Tensor) -> None:
        states = self.read(states)
        batch, length, size = states.shape
        positions = torch.arange(length, device=states.device)[None]
        text = sequences.text
        self._hidden: list[Tensor] = []
        for layer in range(self.num_layers):
            lengths = (sequences.start - layer).clamp(min=0)
            following = (positions + 1 + layer).clamp(max=text.shape[1] - 1).expand(batch, -1)
            last = (lengths[:, None] - 1).clamp(min=0)
            states = self.head(
                self.embed(text.gather(1, following)),
                states,
                layer=layer,
                position_ids=torch.minimum(positions, last),
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
                tokens = torch.cat([candidates[:, :, 0] for candidates in best], dim=1)
                outputs = self._run(depth, tokens, hidden, end - depth)
            elif depth:
                layer = self.num_layers - 1
                outputs = self._run(layer, best[-1][:, :, 0], outputs[:, -1:], end + depth - self.num_layers)
            logits = self.lm_head(outputs[:, -1:])
            if logits.shape[-1] < tree.width:
                raise InputError(
                    f"tree: has {tree.width} candidates per token, but there are {logits.shape[-1]} tokens"
                )
            best.append(self.choose(logits, len(best), self.token_ids))
        return torch.cat(best, dim=1) if best else sequences.root.new_zeros(len(sequences.root), 0, 0)

    def follow(self, sequences: ops.Sequences, slots: Tensor, states: Tensor) -> None:
        states = self.read(states)
        batch, size = len(slots), states.shape[2]
        start, text = slots[:, 0], sequences.text
        path = (slots - slots[:, :1])[..., None]
        positions = start[:, None] + torch.arange(1, slots.shape[1] + 1, device=start.device)
        tokens = text.gather(1, positions.clamp(max=text.shape[1] - 1))
        # A finished sequence has 0 new tokens.
        last = (sequences.cache_seqlens - start - 1).clamp(min=0)[:, None, None].expand(batch, 1, size)
        hidden = states.gather(1, path.expand(-1, -1, size))
        for layer, kept in enumerate(self._hidden):
            outputs = self._run(layer, tokens, hidden, start - layer)
            hidden = torch.cat([kept, outputs[:, :-1]], dim=1)
            kept.copy_(outputs.gather(1, last))

    def _run(self, layer: int, tokens: Tensor, hidden: Tensor, start: Tensor) -> Tensor:
        """Run a layer of the head.

        Args:
            layer: number of the layer.
            tokens: long (B, T).
            hidden: (B, T, H).
            start: long (B,), position of the first token. It is negative in a text with fewer tokens than layers.

        Returns:
            (B, T, H). The values at negative positions have no meaning.
        """
        batch, length, size = hidden.shape
        positions, embeds = torch.arange(length, device=start.device)[None], self.embed(tokens)
        if layer > 1:  # in layers 0 and 1 start is at least 0, as a text has a token or more
            negative = (-start).clamp(min=0)[:, None]
            moved = (positions + negative).clamp(max=length - 1)[..., None].expand(batch, length, size)
            embeds, hidden, start = embeds.gather(1, moved), hidden.gather(1, moved), start.clamp(min=0)
        outputs = self.head(
            embeds,
            hidden,
            layer=layer,
            position_ids=start[:, None] + positions,
            cache_seqlens=start,
            state=self._states[layer],
        )
        if layer > 1:
            back = (positions - negative).clamp(min=0)[..., None].expand(batch, length, size)
            outputs = outputs.gather(1, back)
        return outputs
