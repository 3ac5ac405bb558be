"""Drafting one token after another, or a tree that grows from the head's probabilities, with the key/value cache of
the head itself: MTP heads and EAGLE-3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import ops
from ligermodels.generation.state import DecodingState
from ligermodels.layers import TreeTokens
from ligermodels.speculative.drafting import ChooseDrafts, Drafter, unchanged
from ligermodels.speculative.layout import Candidates
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
        """The k most probable tokens after outputs (B, T, H) of the head: ids and log-probabilities, both (B, T, k).
        NaN counts as -inf: it would rank before the tokens that it follows."""
        logits, k = self.lm_head(outputs), self.tree.top_k
        chosen = ops.topk_indices(logits, k)
        scores = logits.float().log_softmax(dim=-1).gather(-1, chosen)
        return self.token_ids(chosen), scores.masked_fill(scores.isnan(), -torch.inf)


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
