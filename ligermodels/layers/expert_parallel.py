"""Expert parallelism: each rank has some of a mixture's experts. Tokens are sent to their experts and back.

Each rank has its own tokens. A token is sent once to a rank, however many of its experts are there. That rank sums the
weighted results of its own experts, so one row comes back, and the rows of all ranks are summed. With no more ranks
than experts per token, almost every token has experts on every rank, and all tokens are gathered on all ranks
(`_everywhere`): their exchange starts before the router has chosen. With more ranks, tokens are sent to the ranks of
their experts alone (`_where_chosen`): the numbers of rows are known only after routing.

Experts have no capacity limit, so a rank waits for the number of its rows: one number per layer, while the tokens are
on their way. Exchanges run beside the computations between their start and `Pending.get`, in both passes: the router
and the shared expert.

Each rank has its own loss. The tokens of all ranks contribute to the gradient of an expert's weights, while gradients
of other parameters are averaged over ranks. To make both a mean, gradients are divided by the number of ranks on their
way to the experts, and multiplied by it on their way back to the tokens.

A class with such experts declares `expert_parallel`, the names of the parameters with a row per expert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import ops
from ligermodels.layers.context import ForwardContext
from ligermodels.ops.runtime.collectives import Ranks, all_gather_rows, start_all_gather, start_all_to_all
from ligermodels.ops.runtime.library import once_differentiable
from ligermodels.ops.runtime.tensors import AsyncHostCopy

Experts = Callable[[Tensor, Tensor], Tensor]
"""Rows (R, H), sorted by expert, and the offsets (E,) where the rows of each expert end -> (R, H)."""


class Transfer(NamedTuple):
    """An exchange between ranks. `start`: rows -> a buffer that is filled meanwhile, and a function that waits for it.
    `finish`: filled buffer -> result."""

    start: Callable[[Tensor], tuple[Tensor, Callable[[], Any]]]
    finish: Callable[[Tensor], Tensor] = lambda buffer: buffer

    def __call__(self, x: Tensor) -> Tensor:
        buffer, wait = self.start(x)
        wait()
        return self.finish(buffer)


class Pending:
    """An exchange that has started. Its gradient is another exchange: it starts in the backward pass of `get` and ends
    in the backward pass of the start, so the backward pass of the computations between them runs beside it.

    Args:
        x: the rows to exchange.
        transfer: the exchange.
        gradient: the exchange of the result's gradient.
    """

    def __init__(self, x: Tensor, transfer: Transfer, gradient: Transfer) -> None:
        self.transfer, self.gradient = transfer, gradient
        self.started: tuple[Tensor, Callable[[], Any]] | None = None
        self._mark: Tensor | None = _Start.apply(x, self)

    def get(self) -> Tensor:
        """The result; call it once."""
        mark, self._mark = self._mark, None  # no cycle: the graph refers to this object
        return cast(Tensor, _Finish.apply(mark, self))

    def finished(self, transfer: Transfer) -> Tensor:
        """The result of the exchange that was started last."""
        assert self.started is not None
        (buffer, wait), self.started = self.started, None
        wait()
        return transfer.finish(buffer)


class _Start(torch.autograd.Function):
    """Starts an exchange. Returns a number that orders the backward pass: the buffer changes until the end."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: Pending) -> Tensor:
        ctx.pending = pending
        pending.started = pending.transfer.start(x)
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor]:
        return (ctx.pending.finished(ctx.pending.gradient),)


class _Finish(torch.autograd.Function):
    """Waits for the exchange that `_Start` started."""

    @staticmethod
    def forward(ctx: Any, mark: Tensor, pending: Pending) -> Tensor:
        ctx.pending = pending
        return pending.finished(pending.transfer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor]:
        ctx.pending.started = ctx.pending.gradient.start(dy)
        return (dy.new_zeros(()),)


class Transfers(NamedTuple):
    """Exchanges of (N, ...) of this rank's tokens with the M tokens that this rank computes for, of all ranks.

    there: (N, ...) -> (M, ...), copies.
    back: (M, ...) -> (N, ...), the sums over the ranks that computed for a token.
    ranks: the ranks.
    """

    there: Transfer
    back: Transfer
    ranks: Ranks

    def send(self, x: Tensor) -> Pending:
        """Start to send x (N, ...) to the ranks that compute for it: (M, ...)."""
        start, finish = self.back
        return Pending(x, self.there, Transfer(start, lambda buffer: finish(buffer).mul_(self.ranks.size)))

    def sum(self, x: Tensor) -> Pending:
        """Start to send results (M, ...) back to their tokens, and to sum them: (N, ...)."""
        start, finish = self.there
        return Pending(x, self.back, Transfer(lambda dy: start(dy / self.ranks.size), finish))


class ExpertExchange:
    """The exchange of the tokens of one call of a mixture. Make it before the router chooses; then call `sum_of`.

    Args:
        tokens: (N, H), this rank's tokens. Ranks may have different numbers of them.
        top_k: experts per token.
        mesh: a DeviceMesh of one dimension; experts are divided evenly over its ranks.
        context: context of the forward pass. Ranks compare their numbers of tokens once per context. Default: None,
            they do so in each call.
    """

    def __init__(self, tokens: Tensor, top_k: int, mesh: Any, context: ForwardContext | None = None) -> None:
        self.ranks, self._tokens = Ranks.of(mesh), tokens
        self._load = getattr(mesh, "load", 1.0)  # of a plan, without processes: rows relative to an equal share
        self._early: Transfers | None = None
        if self.ranks.size <= top_k:
            self._early = _everywhere(len(tokens), _most_tokens(tokens, self.ranks, context), self.ranks)
            self._sent = self._early.send(tokens)

    def sum_of(self, experts: Tensor, weights: Tensor, num_experts: int, compute: Experts) -> Pending:
        """Start to sum the weighted outputs of the experts of each token.

        Args:
            experts: long (N, k), the chosen experts.
            weights: (N, k), their weights, float32 or float64.
            num_experts: number E of experts of all ranks.
            compute: computes the experts of this rank.

        Returns:
            The sums (N, H), once they have arrived.
        """
        own = num_experts // self.ranks.size
        transfers, sent = self._early, None if self._early is None else self._sent
        if transfers is None:
            transfers = _where_chosen(experts // own, self.ranks, self._load)
            sent = transfers.send(self._tokens)
        assert sent is not None
        # The numbers of this rank's experts become 0 to own - 1. Other experts and padding get larger numbers.
        experts = transfers.there(experts.int() + 1) - 1
        experts = torch.where(experts < 0, num_experts, (experts - self.ranks.rank * own) % num_experts)
        order, inverse, offsets = ops.sort_by_expert(experts, own)
        last = None if experts.is_meta else AsyncHostCopy(offsets[-1])
        weights = transfers.send(weights).get()
        tokens = sent.get()
        count = round(weights.numel() / self.ranks.size * self._load) if last is None else last.get()
        chosen = ops.ChosenRows(order[:count].int(), inverse.view_as(experts).int())  # kept for the backward pass
        # Kernels reject empty tensors, and weights need a gradient. So a rank without rows computes a row of zeros.
        missing = int(count == 0)
        rows = F.pad(ops.take_rows(tokens, chosen), (0, 0, 0, missing)) if missing else ops.take_rows(tokens, chosen)
        rows = compute(rows, offsets + missing if missing else offsets)[:count]
        return transfers.sum(ops.sum_rows(rows, weights, chosen))


def _most_tokens(tokens: Tensor, ranks: Ranks, context: ForwardContext | None) -> int:
    """The largest number of tokens of a rank. Ranks agree on it in the first mixture of a pass, and count all tokens of
    the pass, even if the first mixture is given the needed tokens only: later mixtures may be given all of them.

    Raises:
        RuntimeError: a mixture has more tokens than the pass, on each rank where it has.
    """
    count = len(tokens)
    if tokens.is_meta:
        return count
    agreed = {} if context is None else context.agreed
    if ranks.group not in agreed:
        needed = None if context is None else context.needed
        own = count if needed is None else max(count, needed.rows * needed.length)
        counts = all_gather_rows(torch.tensor([own], device=tokens.device), ranks.size, ranks.group)
        agreed[ranks.group] = own, int(counts.max())  # waits for the device
    own, most = agreed[ranks.group]
    if count > own:
        raise RuntimeError(f"expert parallelism: a mixture has {count} tokens, more than the {own} of the pass")
    return most


def _everywhere(count: int, most: int, ranks: Ranks) -> Transfers:
    """Every rank gets the tokens of all ranks; fewer than `most` are filled up with zeros."""

    def gather(x: Tensor) -> tuple[Tensor, Callable[[], Any]]:
        x = F.pad(x, (0, 0, 0, most - count)) if most > count else x
        if x.is_meta:
            return x.new_empty(ranks.size * most, *x.shape[1:]), _nothing
        return start_all_gather(x, ranks.size, ranks.group)

    def total(buffer: Tensor) -> Tensor:
        return buffer.unflatten(0, (ranks.size, most)).sum(0)[:count]  # adds in float32

    equal = [most] * ranks.size
    return Transfers(Transfer(gather), Transfer(partial(_all_to_all, equal, equal, ranks), total), ranks)


def _where_chosen(chosen: Tensor, ranks: Ranks, load: float) -> Transfers:
    """Each token goes to the ranks `chosen` (N, k). The host waits for the numbers of tokens that ranks exchange."""
    count, size = len(chosen), ranks.size
    is_sent = torch.zeros(count, size, dtype=torch.bool, device=chosen.device).scatter_(1, chosen, True)
    by_rank = is_sent.t().flatten()
    if chosen.is_meta:  # the mean for ranks that are chosen at random
        mean = count * (1 - (1 - 1 / size) ** chosen.shape[1])
        sent, received = [round(mean)] * size, [round(min(mean * load, count))] * size
    else:
        counts = is_sent.sum(0)
        buffer, wait = start_all_to_all(counts, [1] * size, [1] * size, ranks.group)
        wait()
        sent, received = torch.stack([counts, buffer]).tolist()
    places = (~by_rank).to(torch.uint8).argsort(stable=True)[: sum(sent)]  # rank * N + token, in this order
    rows = torch.where(by_rank, by_rank.cumsum(0) - 1, -1).unflatten(0, (size, count)).t()
    pairs = ops.ChosenRows(places % max(count, 1) * size + places // max(count, 1), rows)

    def start(x: Tensor) -> tuple[Tensor, Callable[[], Any]]:
        return _all_to_all(sent, received, ranks, x[pairs.choices // size])

    back = Transfer(partial(_all_to_all, received, sent, ranks), lambda buffer: ops.sum_rows(buffer, None, pairs))
    return Transfers(Transfer(start), back, ranks)


def _all_to_all(
    sent: list[int], received: list[int], ranks: Ranks, x: Tensor
) -> tuple[Tensor, Callable[[], Any]]:  # fmt: skip
    if x.is_meta:
        return x.new_empty(sum(received), *x.shape[1:]), _nothing
    return start_all_to_all(x, sent, received, ranks.group)


def _nothing() -> None:
    pass
