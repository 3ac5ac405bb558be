"""Recurrent mixers whose decoding states an inference engine keeps, in slots of its own cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ligermodels.layers.context import ForwardContext
from ligermodels.layers.layer import Layer


class ExternalStates(Protocol):
    """Runs one layer on the tokens of a flat batch, with the states of their requests."""

    def __call__(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Mix tokens.

        Args:
            layer: the layer; it is called with a decoding state for the requests of its rows.
            x: hidden states (1, tokens, H), the tokens of all requests one after another.

        Returns:
            (1, tokens, H).
        """


class RecurrentLayer(Layer):
    """Base class of mixers whose decoding state has one size for any number of tokens.

    An inference engine keeps the states by setting `external`. The layer is then called without a state, on tokens of
    several requests, and `external` calls it again for rows of requests with their states. Such a call has a state
    that holds earlier tokens and, if rows have padding, `ForwardContext.seq_lens`; no other field of the context is
    set. The layer's tensors of a state are `LayerDelta.tensors` or `LayerConv.tensors`.

    A subclass defines `mix(x, context, state)`, with the arguments and the result of `forward`.
    """

    external: ExternalStates | None = None

    def forward(self, x: Tensor, context: ForwardContext, state: Any = None) -> Tensor:
        """Mix tokens.

        Args:
            x: hidden states, (B, T, H).
            context: context of the forward pass.
            state: decoding state; the tokens of x are added to it. It must be zero before the first pass.

        Returns:
            (B, T, H).
        """
        if self.external is not None and state is None:
            return self.external(self, x)
        return self.mix(x, context, state)

    def mix(self, x: Tensor, context: ForwardContext, state: Any) -> Tensor:
        """Mix the tokens of x, with the arguments x, context and state of `forward`, and its result."""
        raise NotImplementedError


class RequestRows(NamedTuple):
    """Requests of a flat batch that a layer computes together, as the rows of a batch.

    requests: long (R,), the numbers of the requests in the flat batch.
    tokens: long (R, T), the new tokens of each request as indices in the flat batch; -1 is padding, after the tokens.
    seq_lens: long (R,), the number of new tokens of each request; None if all have T.
    """

    requests: Tensor
    tokens: Tensor
    seq_lens: Tensor | None

    def to(self, device: torch.device) -> RequestRows:
        """The rows on another device."""
        requests, tokens, seq_lens = self
        seq_lens = seq_lens if seq_lens is None else seq_lens.to(device)
        return RequestRows(requests.to(device), tokens.to(device), seq_lens)


class RequestStates(NamedTuple):
    """Where an engine keeps the states of `rows`.

    rows: the requests.
    sources: long (R,), the slot that holds each request's state before its new tokens.
    slots: long (R,), the slot for its state after them, which may be the same.
    continues: bool (R,), whether a request has earlier tokens. The state of any other request begins at zero, and its
        source may hold anything.
    """

    rows: RequestRows
    sources: Tensor
    slots: Tensor
    continues: Tensor


def rows_of_requests(bounds: Sequence[int]) -> list[RequestRows]:
    """Lay out a flat batch as rows of requests, with less than half of each batch of rows padding.

    Requests with 2 ** n to 2 ** (n + 1) - 1 new tokens share rows, so decode steps of one token have none with padding.

    Args:
        bounds: the first token of each request in the flat batch, then the end of the last request.

    Returns:
        The rows, on the CPU, of all requests that have new tokens.
    """
    groups: dict[int, list[int]] = {}
    counts = [end - start for start, end in pairwise(bounds)]
    for request, count in enumerate(counts):
        if count:
            groups.setdefault(count.bit_length(), []).append(request)
    batches = []
    for requests in groups.values():
        lengths = torch.tensor([counts[request] for request in requests])
        starts = torch.tensor([bounds[request] for request in requests])
        index = torch.arange(int(lengths.max()))
        tokens = torch.where(index < lengths[:, None], starts[:, None] + index, -1)
        padded = bool((lengths != len(index)).any())
        batches.append(RequestRows(torch.tensor(requests), tokens, lengths if padded else None))
    return batches


def run_requests(
    layer: nn.Module,
    x: Tensor,
    batches: Sequence[RequestStates],
    tensors: Sequence[Tensor],
    make_state: Callable[..., Any],
) -> Tensor:
    """Run a layer on a flat batch of requests, and update their states.

    Args:
        layer: the layer.
        x: hidden states (1, tokens, H).
        batches: the requests. Tokens that belong to none of them get zeros. No slot of one request is another's source.
        tensors: the engine's tensors of states, (slots, ...) each; updated in place.
        make_state: makes the layer's `state` of tensors (R, ...), which the layer updates in place.

    Returns:
        (1, tokens, H).
    """
    hidden = pad(x[0], (0, 0, 0, 1))  # the last row is the token -1
    out = torch.zeros_like(hidden)
    for rows, sources, slots, continues in batches:
        states = [tensor[sources] for tensor in tensors]
        for state in states:
            state.masked_fill_(~continues.view(-1, *[1] * (state.dim() - 1)), 0)
        context = ForwardContext(seq_lens=rows.seq_lens)
        out[rows.tokens] = layer(hidden[rows.tokens], context, make_state(*states))
        for tensor, state in zip(tensors, states, strict=True):
            tensor[slots] = state
    return out[None, :-1]
