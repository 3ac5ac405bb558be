"""The experts that compute each token of a `generate` call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ligermodels.layers.router import NOT_ROUTED


@dataclass(frozen=True)
class GenerateOutput:
    """The result of `generate` with `return_routing`.

    sequences: long (B, T + n), the prompts and the new tokens, as `generate` returns them alone.
    routing: int16 (B, T + n, layers with experts, experts per token), the experts of each token; -1 on padding, and for
        the last token of each sequence, because no pass computes it.
    """

    sequences: Tensor
    routing: Tensor


class RoutingBuffer:
    """The experts of the tokens in a decoding state, at fixed addresses, as CUDA graphs require.

    Args:
        max_length: most tokens of a sequence.
    """

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._of_slots = torch.empty(0)  # (B, max_length, layers, top_k), by slot in the state

    def fill(self, routing: Tensor) -> None:
        """Take the routing of a prefill, (B, T, layers, top_k), padded on the right."""
        batch, length, *sizes = routing.shape
        if not self._of_slots.numel():
            self._of_slots = routing.new_full((batch, self._max_length, *sizes), NOT_ROUTED)
        self._of_slots[:, :length] = routing

    def write(self, slots: Tensor, routing: Tensor) -> None:
        """Take the routing (B, 1, layers, top_k) of the tokens in `slots`, long (B,). Does not synchronise."""
        self._of_slots.scatter_(1, slots[:, None, None, None].expand_as(routing), routing)

    def result(self, length: int, padding: Tensor, known: Tensor) -> Tensor:
        """The routing of sequences that are padded on the left.

        Args:
            length: columns of the result.
            padding: long (B,), columns of padding before each sequence.
            known: long (B,), tokens of each sequence that were computed.

        Returns:
            int16 (B, length, layers, top_k), -1 on padding and for tokens that were not computed.
        """
        experts = self._of_slots
        slots = torch.arange(length, device=padding.device) - padding[:, None]
        places = (slots >= 0) & (slots < known[:, None])
        index = slots.clamp(0, self._max_length - 1)[:, :, None, None].expand(-1, -1, *experts.shape[2:])
        return experts.gather(1, index).masked_fill(~places[:, :, None, None], NOT_ROUTED)
