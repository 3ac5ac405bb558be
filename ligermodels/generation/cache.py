"""The key/value cache that decoding writes to and attention reads from."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ligermodels.errors import InputError


class KVCache:
    """Preallocated keys and values of every layer, with one fill level for all rows of the batch.

    Slots [0, length) are filled. A forward pass over T tokens calls `update` once a layer, which writes to slots
    [length, length + T), and then `advance(T)` once. Nothing is ever reallocated, so addresses stay fixed.

    Args:
        heads: (key/value heads, head_dim) of each layer.
        batch_size, max_length: rows, and slots (tokens) a row.
        dtype, device: of the stored keys and values.

    Raises:
        InputError: a size is not positive, or a later call does not fit in max_length.
    """

    def __init__(
        self,
        heads: Sequence[tuple[int, int]],
        batch_size: int,
        max_length: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not heads or min(batch_size, max_length) < 1:
            raise InputError(f"a KVCache needs layers, rows and slots, got {len(heads)}, {batch_size} and {max_length}")
        self.layers = [  # keys and values (2, B, max_length, Hkv, D) of each layer
            torch.empty(2, batch_size, max_length, *sizes, dtype=dtype, device=device) for sizes in heads
        ]
        self.positions = torch.zeros(batch_size, max_length, dtype=torch.long, device=device)
        self.max_length = max_length
        self.length = 0

    @property
    def device(self) -> torch.device:
        return self.layers[0].device

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new k and v (B, T, Hkv, D); returns views of slots [0, length + T) of all rows."""
        end = self._end(k.shape[1])
        keys, values = self.layers[layer][:, :, :end]
        for name, new, slots in (("k", k, keys[:, self.length :]), ("v", v, values[:, self.length :])):
            # copy_ would broadcast a batch of one into every row without a word
            if new.shape != slots.shape:
                shapes = f"has shape {tuple(new.shape)}, the cache takes {tuple(slots.shape)}"
                raise InputError(f"{name} of layer {layer} {shapes}")
            slots.copy_(new)
        return keys, values

    def place(self, position_ids: Tensor) -> Tensor:
        """Note the positions (B or 1, T) of the tokens about to be written; returns those of slots [0, length + T)."""
        end = self._end(position_ids.shape[1])
        self.positions[:, self.length : end] = position_ids
        return self.positions[:, :end]

    def advance(self, count: int) -> None:
        """Take `count` more slots as filled, once every layer has written them."""
        self.length = self._end(count)

    def keep(self, start: int, indices: Sequence[int]) -> None:
        """Of the slots from `start` on keep only start + indices, moved together in that order; the rest is forgotten.

        After a tree step whose nodes lie in slots [start, start + N), `indices` are the accepted nodes.
        """
        if not 0 <= start <= self.length or any(not 0 <= i < self.length - start for i in indices):
            raise InputError(f"cannot keep slots {start} + {list(indices)}: only slots [0, {self.length}) are filled")
        end = start + len(indices)
        if end > self.max_length:
            raise InputError(f"cannot keep {len(indices)} slots from {start} on: the cache has {self.max_length}")
        if list(indices) != list(range(len(indices))):
            slots = torch.tensor(indices, device=self.device) + start
            # index_select makes a copy first: source and target slots may overlap
            for stored in self.layers:
                stored[:, :, start:end] = stored.index_select(2, slots)
            self.positions[:, start:end] = self.positions.index_select(1, slots)
        self.length = end

    def _end(self, count: int) -> int:
        end = self.length + count
        if end > self.max_length:
            raise InputError(
                f"the KV cache is full: {self.length} slots are filled and {count} more are needed, but it was made "
                f"for {self.max_length}; make it with a larger max_length"
            )
        return end
