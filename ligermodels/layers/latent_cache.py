"""Latents of the tokens seen so far: the decoding state of multi-head latent attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError


class LatentCache:
    """Preallocated latents, (num_layers, B, max_length, rotated + rank), and what keys and values are made of them by,
    (num_layers, num_heads, channels of a key and a value, rank); see `LayerState`.

    The latent of a token lies in the slot of its position. Nothing is ever reallocated.

    Args:
        num_layers, batch_size, max_length: layers, sequences, and the most tokens of each.
        width: rotated + rank, the channels of a token.
        up: shape of one layer's projection.

    Raises InputError when a size is not positive.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        max_length: int,
        width: int,
        up: tuple[int, int, int],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = num_layers, batch_size, max_length, width
        if min(*shape, *up) < 1:
            raise InputError(f"LatentCache: all sizes must be positive, got {shape} and {up}")
        # Zeros: a masked slot counts with weight 0, and 0 times what memory may hold can be NaN.
        self._latents = torch.zeros(shape, dtype=dtype, device=device)
        self._up = torch.zeros(num_layers, *up, dtype=dtype, device=device)

    def layer(self, index: int) -> LayerLatents:
        """What is kept of the `index`-th layer."""
        return LayerLatents(self._latents[index], self._up[index])

    def reset(self) -> None:
        """Nothing to do: slots past a sequence's length are never read, and are overwritten as it grows; a prefill
        writes the projection."""

    def commit(self, slots: Tensor) -> None:
        """Move slot slots[b, i] of each sequence to slot slots[b, 0] + i, in all layers: slots long (B, P)."""
        ops.compact_kv_cache(self._latents, slots)


class LayerLatents(NamedTuple):
    """One layer's `latents` (B, max_length, rotated + rank), and its projection `up` (num_heads, channels, rank), which
    decoding multiplies queries and results by instead of the latents: as large as the layer's weight."""

    latents: Tensor
    up: Tensor

    def fill(self, latents: Tensor, up: Tensor) -> None:
        """Write the first T slots, latents (B, T, width), and the projection. InputError when they do not fit."""
        batch, length, width = self.latents.shape
        # A batch of one would be broadcast into every sequence.
        if latents.shape[0] != batch or latents.shape[2] != width:
            raise InputError(f"latents have shape {tuple(latents.shape)}, the cache takes ({batch}, T, {width})")
        if latents.shape[1] > length:
            raise InputError(f"latents have {latents.shape[1]} tokens, the cache was made for {length}")
        if up.shape != self.up.shape:
            raise InputError(f"up has shape {tuple(up.shape)}, the cache takes {tuple(self.up.shape)}")
        self.latents[:, : latents.shape[1]] = latents
        self.up.copy_(up)

    def append(self, latents: Tensor, cache_seqlens: Tensor) -> None:
        """Write latents (B, T, width) to the T slots of each sequence from cache_seqlens, long (B,), on; all of them
        must exist."""
        batch, length = latents.shape[:2]
        sequence = torch.arange(batch, device=latents.device)[:, None]
        slots = cache_seqlens[:, None] + torch.arange(length, device=latents.device)
        self.latents[sequence, slots] = latents.to(self.latents.dtype)
