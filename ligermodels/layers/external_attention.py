"""Attention that an inference engine computes, with its own cache of keys and values."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ligermodels.layers.layer import Layer


class ExternalAttention(Protocol):
    """Computes the attention of one layer for the tokens of a flat batch, and keeps their keys and values."""

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Softmax attention.

        Args:
            q: queries (1, tokens, num_heads, D), normalised, rotated and scaled by position.
            k: keys (1, tokens, num_kv_heads, D), normalised and rotated; None for a layer that attends to the keys and
                values of an earlier layer.
            v: values (1, tokens, num_kv_heads, value channels), or None with `k`.

        Returns:
            (1, tokens, num_heads, value channels).
        """


class AttentionLayer(Layer):
    """Base class of mixers with softmax attention.

    An inference engine replaces the attention between queries and keys by setting `external`. Projections, norms,
    rotation, gates and the output projection stay the layer's own. The engine then owns the cache: such a layer is
    called without a decoding state, and its tokens may belong to several requests.
    """

    external: ExternalAttention | None = None
