"""What one forward pass tells each of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.layers.context_parallel import SequenceShard
from ligermodels.layers.rope import RopeConfig


class TreeTokens(NamedTuple):
    """New tokens of a decoding pass that form a tree, the same for every sequence; node 0 is its root.

    mask: bool (N, N), True at [i, j] where node j is node i or one of its ancestors.
    parent: long (N,), each node's parent; the root's is itself.
    depth: long (N,), each node's distance from the root.
    """

    mask: Tensor
    parent: Tensor
    depth: Tensor


class RouterOutput(NamedTuple):
    """`logits` (tokens, E) of a mixture of experts' router, and the `top_k` experts that a token is sent to."""

    logits: Tensor
    top_k: int


class KeysValues(NamedTuple):
    """`keys` and `values` of a layer, each (B, T, num_kv_heads, head_dim), that later layers attend to."""

    keys: Tensor
    values: Tensor


class NeededTokens(NamedTuple):
    """The tokens that layers are given, where these are not all: `token_indices`, long (n,), of the flattened
    `batch` * `length` tokens of the pass."""

    token_indices: Tensor
    batch: int
    length: int


@dataclass(frozen=True)
class ForwardContext:
    """Given to every layer of a forward pass, beside its hidden states (B, T, H) and its decoding state.

    rope_tables: cos and sin, each (B or 1, T, dim / 2), for every rope that a layer's config names.
    cu_seqlens: int32 (n + 1,), bounds of documents packed into one row (B = 1); None for one document a row.
    seq_lens: long (B,), in a prefill (a pass with an empty decoding state): the tokens of each sequence; what follows
        them in its row is padding, whose results are not used. None: all T.
    cache_seqlens: long (B,), in a decoding pass: tokens of each sequence that its state holds already.
    tree: in a decoding pass, the new tokens as a tree of candidates, of which `commit` later keeps a path; None: the
        new tokens follow one another, and are kept.
    positions: long (B or 1, T), of each token in its document.
    keys_values: in a pass that is no decoding pass, by the number of their layer those keys and values that earlier
        layers share.
    per_layer_inputs: (B, T, layers, P), what each layer is given of each token beside the hidden states; of all tokens
        of the pass.
    needed: the tokens that the layer is given, (1, n, H), where these are not all (B, T, H): `rope_tables` and
        `positions` are theirs, all else is that of the whole pass.
    shard: under context parallelism, which tokens (B, T, H) are: a part of those of the pass, of which `rope_tables`,
        `positions` and `per_layer_inputs` are too. `cu_seqlens` are of the whole.
    """

    rope_tables: Mapping[RopeConfig, tuple[Tensor, Tensor]] = field(default_factory=dict)
    cu_seqlens: Tensor | None = None
    seq_lens: Tensor | None = None
    cache_seqlens: Tensor | None = None
    tree: TreeTokens | None = None
    positions: Tensor | None = None
    keys_values: Mapping[int, KeysValues] = field(default_factory=dict)
    per_layer_inputs: Tensor | None = None
    needed: NeededTokens | None = None
    shard: SequenceShard | None = None

    def of_tokens(self, token_indices: Tensor, batch: int, length: int) -> ForwardContext:
        """The context of layers that are given (1, n, H), the tokens `token_indices`, long (n,), of the flattened
        `batch` * `length`."""

        def taken(table: Tensor) -> Tensor:
            places = token_indices if table.shape[0] == batch else token_indices % length
            return table.flatten(0, 1)[places][None]

        return replace(
            self,
            rope_tables={rope: (taken(cos), taken(sin)) for rope, (cos, sin) in self.rope_tables.items()},
            positions=None if self.positions is None else taken(self.positions),
            needed=NeededTokens(token_indices, batch, length),
        )

    def paths(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """How the new tokens of each sequence follow one another, for recurrent mixers.

        Returns long (T,), each token's distance from the first one, and bool (T, T), True at [t, s] where token s is
        token t or comes before it: in its document of a packed row, or on its path in a tree.
        """
        if self.tree is not None:
            return self.tree.depth, self.tree.mask
        place = torch.arange(tokens, device=device)
        before = place[:, None] >= place
        if self.cu_seqlens is not None:
            document = torch.bucketize(place, self.cu_seqlens[1:], right=True)
            before = before & (document[:, None] == document)
        return place, before
