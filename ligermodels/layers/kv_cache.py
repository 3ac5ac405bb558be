"""Decoding state of attention: keys and values of all tokens so far."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.layers.memory import own_storage


class KVCache:
    """Preallocated keys and values of all layers; see `LayerState`. Memory is never reallocated.

    The key and value of a token are in the slot of its position.

    Args:
        num_layers: number of layers.
        batch_size: number of sequences.
        max_length: slots per sequence.
        num_kv_heads: key/value heads.
        head_dim: channels of a head.
        dtype: dtype of keys and values.
        device: device of keys and values.

    Raises:
        InputError: a size is not positive.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        shape = num_layers, 2, batch_size, max_length, num_kv_heads, head_dim
        if min(shape) < 1:
            raise InputError(f"KVCache: all sizes must be positive, got {shape}")
        # Zeros, because a masked slot has weight 0, and 0 times a NaN or infinity in empty memory is NaN.
        self._stored = torch.zeros(shape, dtype=dtype, device=device)

    def layer(self, index: int) -> LayerKV:
        """The keys and values of layer number `index`."""
        return LayerKV(*map(own_storage, self._stored[index]))

    def reset(self) -> None:
        """Does nothing: slots beyond a sequence's length are never read, and are overwritten when it grows."""

    def commit(self, slots: Tensor) -> None:
        """In all layers, move slot slots[b, i] of sequence b to slot slots[b, 0] + i. `slots`: long (B, P)."""
        ops.compact_kv_cache(self._stored.flatten(-2), slots)


class LayerKV(NamedTuple):
    """Keys and values of one layer, (B, max_length, num_kv_heads, head_dim) each."""

    keys: Tensor
    values: Tensor

    def fill(self, k: Tensor, v: Tensor) -> None:
        """Write the first T slots: k, v (B, T, num_kv_heads, head_dim). InputError if they do not fit."""
        for name, new in (("k", k), ("v", v)):
            batch, length, *heads = self.keys.shape
            # Without this check, a batch of one would be broadcast to all sequences.
            if new.shape[0] != batch or list(new.shape[2:]) != heads:
                raise InputError(f"{name} has shape {tuple(new.shape)}, the cache takes ({batch}, T, {heads})")
            if new.shape[1] > length:
                raise InputError(f"{name} has {new.shape[1]} tokens, the cache was made for {length}")
        self.keys[:, : k.shape[1]], self.values[:, : v.shape[1]] = k, v
