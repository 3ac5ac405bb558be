"""The context of a forward pass, which its layers read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.layers.packing import document_of
from ligermodels.layers.rope import RopeConfig
from ligermodels.layers.tokens import ContextShard, SelectedTokens, Tokens


class TreeTokens(NamedTuple):
    """New tokens of a decoding pass that form a tree; node 0 is its root. The tree is the same for every sequence, or
    each has its own: then all tensors begin with a dimension B.

    mask: bool (N, N), True at [i, j] where node j is node i or one of its ancestors.
    parent: long (N,), each node's parent; the root's is itself.
    depth: long (N,), each node's distance from the root.
    """

    mask: Tensor
    parent: Tensor
    depth: Tensor


class RouterOutput(NamedTuple):
    """The result of a mixture of experts' router.

    logits: (tokens, E).
    top_k: number of experts that a token is sent to.
    experts: long (tokens, top_k), these experts; None from a layer that does not return them.
    aux_loss: whether the layer takes part in the load-balancing loss.
    """

    logits: Tensor
    top_k: int
    experts: Tensor | None = None
    aux_loss: bool = True


class KeysValues(NamedTuple):
    """`keys` and `values` of a layer, each (B, T, num_kv_heads, head_dim), that later layers attend to."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class ForwardContext:
    """What every layer of a forward pass is given beside its hidden states (B, T, H) and its decoding state.

    rope_tables: cos and sin, each (B or 1, T, dim / 2), for every rope that a layer's config names.
    cu_seqlens: int32 (n + 1,), bounds of documents packed into one row (B = 1); None for one document in each row.
    positions: long (B or 1, T), of each token in its document.
    shard: under context parallelism, this rank's part of the tokens. The hidden states, `rope_tables`, `positions` and
        `per_layer_inputs` belong to it; `cu_seqlens` are the bounds in the whole row.
    seq_lens: long (B,), in a prefill (a pass with an empty decoding state; a `RecurrentLayer` may also be given a part
        of a prefill): the number of tokens in each sequence. The rest of its row is padding, and results there are not
        used. None: all T.
    cache_seqlens: long (B,), in a decoding pass: number of tokens of each sequence that its state holds already.
    tree: in a decoding pass, the new tokens as a tree of candidates, of which `commit` later keeps a path; None: the
        new tokens follow one another, and are kept.
    keys_values: outside of decoding passes, the keys and values that earlier layers share, by the layer's number. All
        contexts that are made from one context share this dict.
    per_layer_inputs: (B, T, layers, P), a small vector for each layer and token (Gemma 4).
    routing: the experts that the caller gives for each token, by the number of the block: (rows, length, top_k), -1 for
        the router's choice. Blocks without an entry choose by themselves.
    experts: the entry of `routing` for the block that computes; see `of_block`.
    needed: if the layer is given only the tokens whose states are needed, (1, n, H), these tokens. `rope_tables`,
        `positions` and `per_layer_inputs` then belong to them; all other fields describe the whole pass.
    agreed: this rank's number of tokens in this pass, and the largest of a rank, on which the ranks of a process group
        have agreed, by the group's name; see `expert_parallel`. All contexts that are made from one context share it.
    """

    rope_tables: Mapping[RopeConfig, tuple[Tensor, Tensor]] = field(default_factory=dict)
    cu_seqlens: Tensor | None = None
    positions: Tensor | None = None
    shard: ContextShard | None = None
    seq_lens: Tensor | None = None
    cache_seqlens: Tensor | None = None
    tree: TreeTokens | None = None
    keys_values: dict[int, KeysValues] = field(default_factory=dict)
    per_layer_inputs: Tensor | None = None
    routing: Mapping[int, Tensor] = field(default_factory=dict)
    experts: Tensor | None = None
    needed: SelectedTokens | None = None
    agreed: dict[str, tuple[int, int]] = field(default_factory=dict)

    def of_block(self, number: int) -> ForwardContext:
        """The context of one block of a pass with `routing`: with the `experts` of the block, if it has any."""
        return replace(self, experts=self.routing.get(number))

    def of_shard(self, shard: ContextShard) -> ForwardContext:
        """The context of this rank's tokens under context parallelism, from the context of all tokens. Its
        `per_layer_inputs` are this rank's already."""
        return replace(
            self,
            rope_tables={rope: (shard.take(cos), shard.take(sin)) for rope, (cos, sin) in self.rope_tables.items()},
            positions=None if self.positions is None else shard.take(self.positions),
            shard=shard,
        )

    def of_tokens(self, needed: SelectedTokens) -> ForwardContext:
        """The context of layers that are given only the `needed` tokens."""
        per_layer = self.per_layer_inputs
        return replace(
            self,
            rope_tables={rope: (needed.take(cos), needed.take(sin)) for rope, (cos, sin) in self.rope_tables.items()},
            positions=None if self.positions is None else needed.take(self.positions),
            per_layer_inputs=None if per_layer is None else needed.take(per_layer),
            needed=needed,
        )

    def of_parts(self, parts: Tokens) -> ForwardContext:
        """The context of blocks that compute a part of the tokens under sequence parallelism: only the per-layer inputs
        and the given experts are divided. Tables and positions stay whole, because the projections of a mixer gather
        all tokens."""
        per_layer = self.per_layer_inputs
        return replace(
            self,
            per_layer_inputs=None if per_layer is None else parts.take(per_layer),
            routing={number: parts.take(experts) for number, experts in self.routing.items()},
        )

    def paths(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """How the new tokens of each sequence follow one another, for recurrent mixers.

        Args:
            tokens: T, the number of new tokens.
            device: device of the results.

        Returns:
            Long (T,), each token's distance from the first token; and bool (T, T), True at [t, s] where token s is
            token t or comes before it, in its document of a packed row or on its path in a tree.

        Raises:
            InputError: each sequence has a tree of its own.
        """
        if self.tree is not None:
            if self.tree.depth.dim() > 1:
                raise InputError("tree: a mixer of this model needs the same tree for all sequences: give a Tree")
            return self.tree.depth, self.tree.mask
        index = torch.arange(tokens, device=device)
        before = index[:, None] >= index
        if self.cu_seqlens is not None:
            document = document_of(self.cu_seqlens, tokens)
            before = before & (document[:, None] == document)
        return index, before
