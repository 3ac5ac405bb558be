"""The experts that compute each token of a `generate` call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.layers.router import ROUTING_DTYPES
from ligermodels.ops import NOT_ROUTED
from ligermodels.ops.runtime.checks import check_plain


@dataclass(frozen=True)
class GenerateOutput:
    """The result of `generate` with `return_routing`.

    sequences: long (B, T + n), the prompts and the new tokens, as `generate` returns them alone.
    routing: int16 (B, T + n, layers with experts, experts per token), the experts of each token; -1 on padding, and for
        the last token of each sequence, because no pass computes it.
    """

    sequences: Tensor
    routing: Tensor


def check_given(routing: Any, batch: int, length: int, max_new_tokens: int) -> Tensor:
    """The argument `routing` of `generate`.

    Args:
        routing: the argument; layers and experts per token are checked by the model.
        batch: number B of prompts.
        length: number T of columns of the prompts.
        max_new_tokens: most new tokens of a sequence.

    Raises:
        InputError: it is no tensor of integers (B, T to T + max_new_tokens, layers, experts per token).
    """
    check_plain("routing", routing, *ROUTING_DTYPES)
    if routing.ndim != 4 or routing.shape[0] != batch or not length <= routing.shape[1] <= length + max_new_tokens:
        raise InputError(
            f"routing: must be (batch, tokens, layers, experts per token), here {batch} prompts of {length} to "
            f"{length + max_new_tokens} tokens, padded on the left; got {tuple(routing.shape)}. Fill tokens whose "
            f"experts are not known with {NOT_ROUTED}"
        )
    return cast(Tensor, routing)


class RoutingBuffer:
    """The experts of the tokens in a decoding state, at fixed addresses, as CUDA graphs require.

    Args:
        max_length: most tokens of a sequence.
        returned: whether the experts of each token are kept.
        given: experts (B, columns, layers, top_k) of the tokens, in place of the routers' choice, padded on the left;
            None for none.
        padding: long (B,), columns of padding before each sequence.
    """

    def __init__(self, max_length: int, returned: bool, given: Tensor | None, padding: Tensor) -> None:
        self._max_length, self._returned, self._given = max_length, returned, None
        self._of_slots = torch.empty(0)  # (B, max_length, layers, top_k), by slot in the state
        if given is not None:
            columns = torch.arange(max_length, device=padding.device) + padding[:, None]
            is_known = (columns < given.shape[1])[:, :, None, None]
            index = columns.clamp(max=given.shape[1] - 1)[:, :, None, None].expand(-1, -1, *given.shape[2:])
            self._given = given.long().gather(1, index).masked_fill(~is_known, NOT_ROUTED)

    def of_prefill(self, length: int) -> dict[str, Any]:
        """Arguments of the model for a prefill of `length` tokens, padded on the right."""
        return self._arguments(None if self._given is None else self._given[:, :length])

    def of_step(self, slots: Tensor) -> dict[str, Any]:
        """Arguments of the model for the tokens in `slots`, long (B,)."""
        if self._given is None:
            return self._arguments(None)
        index = slots.clamp(max=self._max_length - 1)[:, None, None, None]
        return self._arguments(self._given.gather(1, index.expand(-1, -1, *self._given.shape[2:])))

    def _arguments(self, given: Tensor | None) -> dict[str, Any]:
        found = {} if given is None else {"routing": given}
        return {**found, "return_routing": True} if self._returned else found

    def fill(self, routing: Tensor | None) -> None:
        """Take the routing of a prefill, (B, T, layers, top_k), padded on the right."""
        if routing is None:
            return
        batch, length, *sizes = routing.shape
        if not self._of_slots.numel():
            self._of_slots = routing.new_full((batch, self._max_length, *sizes), NOT_ROUTED)
        self._of_slots[:, :length] = routing

    def write(self, slots: Tensor, routing: Tensor | None) -> None:
        """Take the routing (B, 1, layers, top_k) of the tokens in `slots`, long (B,). Does not synchronise."""
        if routing is None:
            return
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
