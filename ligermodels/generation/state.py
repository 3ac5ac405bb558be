"""The decoding state of a model: what its layers keep of the tokens seen so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.arguments import check_count
from ligermodels.errors import InputError
from ligermodels.layers import LayerConfig, LayerState, TreeTokens
from ligermodels.layers.memory import memory_for


class DecodingState:
    """The states of all layers, and how many tokens each sequence has in them.

    A forward pass with an empty state is a prefill: its tokens become those of the sequences. Later passes add T tokens
    to each sequence; those of a tree count only once `commit` has been told which path of it was accepted. Tensors keep
    their addresses, so that a CUDA graph can hold a decoding pass.

    layers: for each layer what its mixer's `forward` takes as `state`; None for one that keeps nothing.
    cache_seqlens: long (B,), the tokens of each sequence; None while the state is empty. It is advanced in place; a
        caller that advances it itself, as generation does with a kernel of its own, sets `advances` to False.

    Args:
        mixers: the configs of the layers; layers of equal configs share one `LayerState`.
        batch_size, max_length: sequences, and the most tokens of each, the nodes of a tree included.
        hidden_size, dtype, device: the model's.

    Raises InputError when a size is not positive, or memory has no room for it.
    """

    def __init__(
        self,
        mixers: Sequence[LayerConfig],
        batch_size: int,
        max_length: int,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        batch_size, max_length = check_count("batch_size", batch_size), check_count("max_length", max_length)
        self.batch_size, self.max_length, self.device = batch_size, max_length, device
        with memory_for(f"a decoding state of {batch_size} sequences of up to {max_length} tokens", device):
            self._states: dict[LayerConfig, LayerState | None] = {
                each: each.new_state(count, batch_size, max_length, hidden_size=hidden_size, dtype=dtype, device=device)
                for each, count in Counter(config for config in mixers if config.state_from is None).items()
            }
        parts: dict[LayerConfig, Iterator[Any]] = {
            config: iter(()) if state is None else map(state.layer, range(len(mixers)))
            for config, state in self._states.items()
        }
        self.layers: list[Any] = []
        for config in mixers:
            source = config.state_from
            self.layers.append(next(parts[config], None) if source is None else self.layers[source])
        self.cache_seqlens: Tensor | None = None
        self.advances = True
        self._longest = 0

    def reset(self) -> None:
        """Become empty."""
        self.cache_seqlens, self._longest = None, 0
        for state in self._states.values():
            if state is not None:
                state.reset()

    def check(self, batch: int, length: int) -> None:
        """InputError when a pass over (batch, length) tokens does not fit; lengths not where the caller advances."""
        if batch != self.batch_size:
            raise InputError(f"the decoding state is of {self.batch_size} sequences, the inputs are {batch}")
        if self.advances and self._longest + length > self.max_length:
            raise InputError(
                f"the decoding state is full: it was made for {self.max_length} tokens a sequence, {length} more do "
                f"not fit beside {self._longest}; make it with a larger max_length"
            )

    def after(self, length: int, seq_lens: Tensor | None, tree: TreeTokens | None) -> None:
        """Called by the decoder at the end of a pass over `length` tokens a sequence."""
        self._longest += length if tree is None else 0
        if self.cache_seqlens is None:
            full = torch.full((self.batch_size,), length, dtype=torch.long, device=self.device)
            self.cache_seqlens = full if seq_lens is None else seq_lens.clone()
        elif tree is None and self.advances:
            self.cache_seqlens += length

    def commit(self, slots: Tensor) -> None:
        """Keep the accepted path of a tree, in every layer: see `LayerState.commit`. `cache_seqlens` is not changed."""
        self._longest += slots.shape[1]  # at most
        for state in self._states.values():
            if state is not None:
                state.commit(slots)
