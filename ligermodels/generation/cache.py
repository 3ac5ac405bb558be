"""The key/value cache that decoding writes to and attention reads from."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError


class KVCache:
    """Preallocated keys and values of every layer, with one fill level for all rows of the batch, or one for each row.

    Slots [0, length) are filled. A forward pass over T tokens calls `update` once a layer, which writes to slots
    [length, length + T), and then `advance(T)` once. Within `rows` each row has its own length instead, in `lengths`,
    which is None elsewhere: its T tokens take slots lengths + [0, T), by `write`, or by an op on `layers`. A slot's
    number is the position of its token. Nothing is ever reallocated, so addresses stay fixed.

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
        # Zeros: a slot that a mask hides counts with weight 0, and 0 times what memory may hold can be NaN.
        counts = Counter(heads)
        self._alike = {  # keys and values (layers, 2, B, max_length, Hkv, D) of all layers of one size
            size: torch.zeros(count, 2, batch_size, max_length, *size, dtype=dtype, device=device)
            for size, count in counts.items()
        }
        parts = {size: iter(stored) for size, stored in self._alike.items()}
        self.layers = [next(parts[size]) for size in heads]  # (2, B, max_length, Hkv, D) each
        self.max_length = max_length
        self.length = 0
        self.lengths: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.layers[0].device

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new k and v (B, T, Hkv, D); returns views of slots [0, length + T) of all rows."""
        end = self._end(k.shape[1])
        keys, values = self._checked(layer, k, v)[:, :, :end]
        keys[:, self.length :], values[:, self.length :] = k.to(keys.dtype), v.to(values.dtype)
        return keys, values

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Within `rows`: write one layer's new k and v (B, T, Hkv, D) to the slots after each row's last."""
        if self.lengths is None:
            raise InputError("KVCache.write is for rows of different lengths: use it within KVCache.rows")
        keys, values = self._checked(layer, k, v)
        row = torch.arange(k.shape[0], device=self.device)[:, None]
        at = row, self.lengths[:, None] + torch.arange(k.shape[1], device=self.device)
        keys[at], values[at] = k.to(keys.dtype), v.to(values.dtype)

    def _checked(self, layer: int, k: Tensor, v: Tensor) -> Tensor:
        """The layer's keys and values (2, B, max_length, Hkv, D), into which k and v must fit."""
        stored = self.layers[layer]
        for name, new in (("k", k), ("v", v)):
            wanted = (stored.shape[1], k.shape[1], *stored.shape[3:])
            # it would be broadcast: a batch of one into every row, without a word
            if new.shape != wanted:
                raise InputError(f"{name} of layer {layer} has shape {tuple(new.shape)}, the cache takes {wanted}")
        return stored

    def advance(self, count: int) -> None:
        """Take `count` more slots as filled, once every layer has written them."""
        if self.lengths is None:
            self.length = self._end(count)

    def clear(self) -> None:
        """Forget all tokens."""
        self.length = 0

    # -- rows of different lengths -------------------------------------------------------------------------------------

    @contextmanager
    def rows(self, lengths: Tensor) -> Iterator[None]:
        """Within it each row is filled to a length of its own, (B,) long, and `length` neither counts nor changes.

        Nothing is read back from the device, so that a CUDA graph can hold a forward pass; that the new tokens fit is
        up to the caller.
        """
        self.lengths = lengths
        try:
            yield
        finally:
            self.lengths = None

    def compact(self, slots: Tensor) -> None:
        """Move slot slots[b, i] of each row to slot slots[b, 0] + i: slots long (B, P).

        After a tree step they are those of the accepted path; what it does not hold is overwritten by what comes next.
        """
        for stored in self._alike.values():
            ops.move_slots(stored.flatten(-2), slots)

    def _end(self, count: int) -> int:
        end = self.length + count
        if end > self.max_length:
            raise InputError(
                f"the KV cache is full: {self.length} slots are filled and {count} more are needed, but it was made "
                f"for {self.max_length}; make it with a larger max_length"
            )
        return end
