"""The decoding state of a model: the caches of its layers, and the number of tokens in them."""

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
    """The states of all layers, and the number of tokens that they hold of each sequence.

    A forward pass with an empty state is a prefill: the state then holds its tokens. Each later pass adds T tokens to
    each sequence. The tokens of a tree count only after `commit` with the accepted path. Tensors keep their addresses,
    so a CUDA graph can record a decoding pass.

    layers: for each layer the `state` argument of its mixer's `forward`; None for a mixer without a state.
    cache_seqlens: long (B,), tokens of each sequence; None while the state is empty. Passes advance it in place, unless
        `advances` is False: generation advances it in a kernel instead.

    Args:
        mixers: the configs of the layers' mixers, None for a layer without one; layers with equal configs share one
            `LayerState`.
        batch_size: sequences.
        max_length: most tokens of a sequence, including the nodes of a tree.
        hidden_size: the model's hidden size.
        dtype: dtype of the states.
        device: device of the states.
        config: config of the decoder that the layers belong to; None for layers of no decoder, such as a draft head's.

    Raises:
        InputError: a size is not positive, or the state does not fit into memory.
    """

    def __init__(
        self,
        mixers: Sequence[LayerConfig | None],
        batch_size: int,
        max_length: int,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        config: Any = None,
    ) -> None:
        self._config = config
        batch_size, max_length = check_count("batch_size", batch_size), check_count("max_length", max_length)
        self.batch_size, self.max_length, self.device = batch_size, max_length, device
        own = Counter(mixer for mixer in mixers if mixer is not None and mixer.state_from is None)
        options: dict[str, Any] = {"hidden_size": hidden_size, "dtype": dtype, "device": device}
        with memory_for(f"a decoding state of {batch_size} sequences of up to {max_length} tokens", device):
            self._states: dict[LayerConfig, LayerState | None] = {
                config: config.new_state(count, batch_size, max_length, **options) for config, count in own.items()
            }
        parts: dict[LayerConfig, Iterator[Any]] = {
            config: iter(()) if state is None else map(state.layer, range(len(mixers)))
            for config, state in self._states.items()
        }
        self.layers: list[Any] = []
        for config in mixers:
            if config is None or config.state_from is None:
                self.layers.append(None if config is None else next(parts[config], None))
            else:
                self.layers.append(self.layers[config.state_from])
        self.cache_seqlens: Tensor | None = None
        self.advances = True
        self._longest = 0

    def reset(self) -> None:
        """Empty the state."""
        self.cache_seqlens, self._longest = None, 0
        for state in self._states.values():
            if state is not None:
                state.reset()

    def check(self, batch: int, length: int, config: Any = None) -> None:
        """InputError if a pass over tokens (batch, length) does not fit; `length` counts only while `advances`. The
        decoder's `config` must equal the config of the decoder that made the state, if both are given."""
        if config is not None and self._config is not None and config is not self._config and config != self._config:
            raise InputError("state: was made by a model with another config; make it by new_state of this model")
        if batch != self.batch_size:
            raise InputError(f"the decoding state is for {self.batch_size} sequences, the inputs have {batch}")
        if self.advances and self._longest + length > self.max_length:
            raise InputError(
                f"the decoding state is full: it has room for {self.max_length} tokens per sequence, and {length} more "
                f"do not fit beside {self._longest}; make it with a larger max_length"
            )

    def after(self, length: int, seq_lens: Tensor | None, tree: TreeTokens | None) -> None:
        """Count the tokens of a pass; the decoder calls it at the end of each pass.

        Args:
            length: tokens per sequence, padding included.
            seq_lens: long (B,), tokens of each sequence without padding, for a padded prefill; else None.
            tree: the tree of the tokens, which are counted by `commit` instead; else None.
        """
        self._longest += length if tree is None else 0
        if self.cache_seqlens is None:
            full = torch.full((self.batch_size,), length, dtype=torch.long, device=self.device)
            self.cache_seqlens = full if seq_lens is None else seq_lens.clone()
        elif tree is None and self.advances:
            self.cache_seqlens += length

    def commit(self, slots: Tensor) -> None:
        """Keep the accepted path of a tree, slots long (B, path length), in every layer. `cache_seqlens` stays."""
        self._longest += slots.shape[1]  # at most
        for state in self._states.values():
            if state is not None:
                state.commit(slots)
