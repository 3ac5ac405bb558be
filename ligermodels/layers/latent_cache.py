"""Decoding state of multi-head latent attention: latents of all tokens so far."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.layers.memory import own_storage


class LatentCache:
    """Preallocated latents of all layers, and the projections from latents to keys and values; see `LayerState`.

    The latent of a token is in the slot of its position. Memory is never reallocated.

    Args:
        num_layers: number of layers.
        batch_size: number of sequences.
        max_length: slots per sequence.
        width: channels of a slot: rotated channels of keys, and the latent.
        up: shape of a layer's projection: (heads, channels of a key and a value, latent channels).
        dtype: dtype of the cache.
        device: device of the cache.

    Raises:
        InputError: a size is not positive.
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
        # Zeros, because a masked slot has weight 0, and 0 times a NaN or infinity in empty memory is NaN.
        self._latents = torch.zeros(shape, dtype=dtype, device=device)
        self._up = torch.zeros(num_layers, *up, dtype=dtype, device=device)

    def layer(self, index: int) -> LayerLatents:
        """The latents and the projection of layer number `index`."""
        return LayerLatents(own_storage(self._latents[index]), own_storage(self._up[index]))

    def reset(self) -> None:
        """Does nothing: slots beyond a sequence's length are never read, and are overwritten when it grows; a prefill
        writes the projection."""

    def commit(self, slots: Tensor) -> None:
        """In all layers, move slot slots[b, i] of sequence b to slot slots[b, 0] + i. `slots`: long (B, P)."""
        ops.compact_kv_cache(self._latents, slots)


class LayerLatents(NamedTuple):
    """Latents of one layer, (B, max_length, rotated + rank), and its projection `up`, (num_heads, channels, rank).

    Decoding multiplies queries and results by the projection, instead of the latents of all tokens. It takes as much
    memory as the layer's weight.
    """

    latents: Tensor
    up: Tensor

    def fill(self, latents: Tensor, up: Tensor) -> None:
        """Write the first T slots, latents (B, T, width), and the projection `up`. InputError if they do not fit."""
        batch, length, width = self.latents.shape
        # Without this check, a batch of one would be broadcast to all sequences.
        if latents.shape[0] != batch or latents.shape[2] != width:
            raise InputError(f"latents have shape {tuple(latents.shape)}, the cache takes ({batch}, T, {width})")
        if latents.shape[1] > length:
            raise InputError(f"latents have {latents.shape[1]} tokens, the cache was made for {length}")
        if up.shape != self.up.shape:
            raise InputError(f"up has shape {tuple(up.shape)}, the cache takes {tuple(self.up.shape)}")
        self.latents[:, : latents.shape[1]] = latents
        self.up.copy_(up)

    def append(self, latents: Tensor, cache_seqlens: Tensor) -> None:
        """Write latents (B, T, width) to T slots of each sequence, from slot `cache_seqlens`, long (B,), on. The slots
        must exist."""
        batch, length = latents.shape[:2]
        sequence = torch.arange(batch, device=latents.device)[:, None]
        slots = cache_seqlens[:, None] + torch.arange(length, device=latents.device)
        self.latents[sequence, slots] = latents.to(self.latents.dtype)
