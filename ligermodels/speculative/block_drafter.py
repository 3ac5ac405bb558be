"""Drafting a block of tokens in one pass of the head, with a cache of the context's keys and values: DFlash, DSpark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.speculative.block_head import BlockHead
from ligermodels.speculative.drafting import ChooseDrafts, Drafter


class BlockDrafter(Drafter):
    """A `Drafter` with a `BlockHead`.

    The caches hold the keys and values of all verified tokens before the root. `draft` writes those of the block after
    them, and `follow` overwrites these by the keys and values of the tokens that were accepted.

    With a Markov head, the candidates of a level follow the best token of the level before.

    Args:
        head: the head's network.
        embed: token ids (B, T) -> embeddings (B, T, H).
        project: hidden states (..., H) -> logits (..., V_d), without the Markov head's.
        token_ids: ids of the draft vocabulary -> ids of the model's tokens.
        confidence_threshold: drafts of a sequence can be accepted while the product of the confidences up to them is
            at least this. 0 for all drafts, without the confidence head.
    """

    reads_states = True

    def __init__(
        self,
        head: BlockHead,
        embed: Callable[[Tensor], Tensor],
        project: Callable[[Tensor], Tensor],
        token_ids: Callable[[Tensor], Tensor],
        confidence_threshold: float = 0.0,
    ) -> None:
        self.head, self.embed, self.project, self.token_ids = head, embed, project, token_ids
        self.threshold = confidence_threshold
        self.boundaries = head.config.boundaries

    def begin(self, batch_size: int, max_length: int, tree: Any, choose: ChooseDrafts) -> None:
        config, device = self.head.config, self.head.fc.weight.device
        if tree.max_depth > config.num_drafts:
            raise InputError(f"tree: is {tree.max_depth} tokens deep, but a block proposes {config.num_drafts}")
        self.tree, size = tree, config.block_size
        self.choose = choose
        self._caches: Any = self.head.new_state(batch_size, max_length + size + tree.max_depth, device).layers
        self._rows = torch.arange(batch_size, device=device)[:, None]
        self._slots = torch.arange(size, device=device)
        self._all = torch.ones(size, size, dtype=torch.bool, device=device)
        for layer in (layer for layer, window in zip(self._caches, config.windows, strict=True) if window is not None):
            layer.keys.zero_()  # `block_context_attention` may multiply keys that no slot sees by 0
            layer.values.zero_()
        self._masks = torch.full((batch_size, size - 1), config.mask_token_id, device=device)

    def start(self, sequences: ops.Sequences, states: Tensor) -> None:
        self._append(states, torch.zeros_like(sequences.start))

    def follow(self, sequences: ops.Sequences, slots: Tensor, states: Tensor) -> None:
        nodes = (slots - slots[:, :1])[..., None].expand(-1, -1, states.shape[2])
        self._append(states.gather(1, nodes), slots[:, 0])

    def draft(self, sequences: ops.Sequences) -> Tensor:
        depth = self.tree.max_depth
        if not depth:
            return sequences.root.new_zeros(len(sequences.root), 0, 0)
        hidden = self._block(sequences)[:, :depth]
        logits, markov = self.project(hidden), self.head.markov
        if markov is None:
            found = self.choose(logits, 0, self.token_ids)
        else:
            chosen, previous, state = list[Tensor](), sequences.root, None
            for slot in range(depth):
                code, state = markov.step(markov.w1(previous), hidden[:, slot], state)
                corrected = (logits[:, slot] + markov.w2(code))[:, None]
                chosen.append(self.choose(corrected, slot, self.token_ids))
                previous = chosen[-1][:, 0, 0]
            found = torch.cat(chosen, dim=1)
        if self.threshold:
            self.max_depth = self._confident(sequences, hidden, found)
        return found

    def _confident(self, sequences: ops.Sequences, hidden: Tensor, found: Tensor) -> Tensor:
        """Long (B,), the depth up to which the slots of each sequence are confident.

        Whether a draft is cut depends on the drafts before it, not on its own token, so that speculative sampling
        stays exact.
        """
        previous = torch.cat([sequences.root[:, None], found[:, :-1, 0]], dim=1)
        logits = cast(Tensor, self.head.drafted(hidden, previous).confidence)
        return (logits.float().sigmoid().cumprod(1) >= self.threshold).sum(1)

    def _block(self, sequences: ops.Sequences) -> Tensor:
        """The hidden states (B, K, H) of the slots of a block from each root."""
        start = sequences.cache_seqlens
        positions = start[:, None] + self._slots

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._write(layer, positions, k, v)
            q = q.to(keys.dtype)  # under autocast, projections have another dtype
            options = self.head.config.sees(layer)
            scale, window = options["softmax_scale"], options["window"]
            if options["causal"]:
                return ops.decode_attention(q, keys, values, start, softmax_scale=scale, window=window)
            if window is None:
                return ops.decode_attention(q, keys, values, start, softmax_scale=scale, tree_mask=self._all)
            q, k, v = (x[:, None].to(keys.dtype) for x in (q, k, v))
            return ops.block_context_attention(q, k, v, keys, values, start[:, None].long(), **options)[:, 0]

        tokens = torch.cat([sequences.root[:, None], self._masks], dim=1)
        return self.head(self.embed(tokens), positions, attend)

    def _append(self, states: Tensor, start: Tensor) -> None:
        """Write the context of states (B, T, n H) from the positions `start` (B,) on into the caches."""
        positions = start[:, None] + torch.arange(states.shape[1], device=start.device)
        for layer, (k, v) in enumerate(self.head.context(states, positions)):
            self._write(layer, positions, k, v)

    def _write(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._caches[layer].keys, self._caches[layer].values
        keys[self._rows, positions], values[self._rows, positions] = k.to(keys.dtype), v.to(values.dtype)
        return keys, values
