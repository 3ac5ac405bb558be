"""Keys and values of the tokens seen so far: the decoding state of attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError


class KVCache:
    """Preallocated keys and values, (num_layers, 2, B, max_length, num_kv_heads, head_dim); see `LayerState`.

    The key and value of a token lie in the slot of its position. Nothing is ever reallocated.

    Raises InputError when a size is not positive.
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
        # Zeros: a masked slot counts with weight 0, and 0 times what memory may hold can be NaN.
        self._stored = torch.zeros(shape, dtype=dtype, device=device)

    def layer(self, index: int) -> LayerKV:
        """The keys and values of the `index`-th layer."""
        return LayerKV(*self._stored[index])

    def reset(self) -> None:
        """Nothing to do: slots past a sequence's length are never read, and are overwritten as it grows."""

    def commit(self, slots: Tensor) -> None:
        """Move slot slots[b, i] of each sequence to slot slots[b, 0] + i, in all layers: slots long (B, P)."""
        ops.compact_kv_cache(self._stored.flatten(-2), slots)


class LayerKV(NamedTuple):
    """One layer's `keys` and `values`, each (B, max_length, num_kv_heads, head_dim)."""

    keys: Tensor
    values: Tensor

    def fill(self, k: Tensor, v: Tensor) -> None:
        """Write the first T slots: k, v (B, T, num_kv_heads, head_dim). InputError when they do not fit."""
        for name, new in (("k", k), ("v", v)):
            batch, length, *heads = self.keys.shape
            # A batch of one would be broadcast into every sequence.
            if new.shape[0] != batch or list(new.shape[2:]) != heads:
                raise InputError(f"{name} has shape {tuple(new.shape)}, the cache takes ({batch}, T, {heads})")
            if new.shape[1] > length:
                raise InputError(f"{name} has {new.shape[1]} tokens, the cache was made for {length}")
        self.keys[:, : k.shape[1]], self.values[:, : v.shape[1]] = k, v
