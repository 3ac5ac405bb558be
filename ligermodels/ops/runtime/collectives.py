"""Exchanges between the ranks of a process group, as ops and as differentiable functions.

Ops take the name of the group, so that torch.compile and fake tensors can trace them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable

_group_named: Callable[[Any], Any] = distributed_c10d._resolve_process_group
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def start_all_gather(x: Tensor, ranks: int, group: str) -> tuple[Tensor, Callable[[], Any]]:
    """Start to gather x (n, ...) of each rank.

    Args:
        x: (n, ...), this rank's rows.
        ranks: number of ranks.
        group: name of the process group.

    Returns:
        (ranks * n, ...), and a function that waits until it is filled.
    """
    rows = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    return rows, _gather(rows, x.contiguous(), group=_group_named(group), async_op=True).wait


def start_reduce_scatter(out: Tensor, x: Tensor, group: str) -> Callable[[], Any]:
    """Start to sum x over the ranks; each rank gets its rows of the sum.

    Args:
        out: (n, ...), filled with this rank's rows of the sum.
        x: (ranks * n, ...).
        group: name of the process group.

    Returns:
        A function that waits until `out` is filled.
    """
    wait: Callable[[], Any] = _scatter(out, x.contiguous(), group=_group_named(group), async_op=True).wait
    return wait


def start_all_to_all(
    x: Tensor, sent: list[int], received: list[int], group: str
) -> tuple[Tensor, Callable[[], Any]]:  # fmt: skip
    """Start to send rows of x to each rank, and to receive rows from each.

    Args:
        x: (sum(sent), ...), the rows for rank 0 first.
        sent: number of rows for each rank.
        received: number of rows from each rank.
        group: name of the process group.

    Returns:
        (sum(received), ...), the rows of rank 0 first, and a function that waits until it is filled.
    """
    rows = x.new_empty(sum(received), *x.shape[1:])
    work = dist.all_to_all_single(rows, x.contiguous(), received, sent, group=_group_named(group), async_op=True)
    return rows, work.wait


@custom_op()
def all_gather_rows(x: Tensor, ranks: int, group: str) -> Tensor:
    """x (n, ...) of each of the `ranks` of the `group` -> (ranks * n, ...)."""
    if is_fake(x):
        return x.new_empty(ranks * x.shape[0], *x.shape[1:])
    rows, wait = start_all_gather(x, ranks, group)
    wait()
    return rows


@custom_op()
def reduce_scatter_rows(x: Tensor, ranks: int, group: str) -> Tensor:
    """This rank's rows (n, ...) of the sum of x (ranks * n, ...) over the `ranks` of the `group`."""
    rows = x.new_empty(x.shape[0] // ranks, *x.shape[1:])
    if not is_fake(x):
        start_reduce_scatter(rows, x, group)()
    return rows


@custom_op()
def all_to_all_rows(x: Tensor, ranks: int, group: str) -> Tensor:
    """x (ranks * n, ...) of each of the `ranks` of the `group`, the rows for rank 0 first -> the rows for this rank,
    those of rank 0 first."""
    if is_fake(x):
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    each = [x.shape[0] // ranks] * ranks
    rows, wait = start_all_to_all(x, each, each, group)
    wait()
    return rows


@custom_op()
def all_reduce_sum(x: Tensor, group: str) -> Tensor:
    """The sum of x over ranks, of the same shape."""
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not is_fake(x):
        dist.all_reduce(total.copy_(x), group=_group_named(group))
    return total


Move = Literal["same", "own", "gather", "scatter", "sum", "swap"]
"""How a tensor moves between ranks: not at all; this rank's rows of a tensor that all ranks have; the rows of all
ranks, one rank after another; this rank's rows of the sum over ranks; the whole sum over ranks; or each rank's rows for
this rank, one rank after another."""
_OPS = {"gather": all_gather_rows, "scatter": reduce_scatter_rows, "swap": all_to_all_rows}


class Ranks(NamedTuple):
    """Differentiable exchanges between `size` ranks of the process group named `group`; this is `rank`.

    The gradient of each exchange is an exchange too: its transpose, or its transpose for gradients that are the same on
    all ranks.
    """

    size: int
    rank: int
    group: str

    @classmethod
    def of(cls, mesh: Any) -> Ranks:
        """The ranks of a DeviceMesh of one dimension."""
        return cls(mesh.size(), mesh.get_local_rank(), mesh.get_group().group_name)

    def take(self, x: Tensor) -> Tensor:
        """This rank's rows of an x that all ranks have alike. The gradient is gathered."""
        return _Exchange.apply(x, "own", "gather", self)

    def whole(self, x: Tensor) -> Tensor:
        """The rows of all ranks, for uses that are the same on all ranks. Each rank keeps its rows of the gradient."""
        return _Exchange.apply(x, "gather", "own", self)

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all ranks, for uses that differ between ranks. The gradient is summed over ranks."""
        return _Exchange.apply(x, "gather", "scatter", self)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's rows of the sum of x over ranks. The gradient is gathered."""
        return _Exchange.apply(x, "scatter", "gather", self)

    def swap(self, x: Tensor) -> Tensor:
        """Each rank's rows for this rank, one rank after another, of an x with as many rows for each rank, one after
        another. The gradient goes back."""
        return _Exchange.apply(x, "swap", "swap", self)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over ranks, for uses that differ between ranks. The gradient is summed over ranks."""
        return _Exchange.apply(x, "sum", "sum", self)

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over ranks, for uses that are the same on all ranks. The gradient is the same on all ranks."""
        return _Exchange.apply(x, "sum", "same", self)

    def sum_gradients(self, x: Tensor) -> Tensor:
        """x itself, the same on all ranks, for uses that differ between ranks. The gradient is summed over ranks."""
        return _Exchange.apply(x, "same", "sum", self)


class _Exchange(torch.autograd.Function):
    """Moves a tensor one way, and its gradient another way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Move, backward: Move, ranks: Ranks) -> Tensor:
        ctx.backward_move, ctx.ranks = backward, ranks
        return _moved(x, forward, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor]:
        return (_moved(dy, ctx.backward_move, ctx.ranks),)


def _moved(x: Tensor, move: Move, ranks: Ranks) -> Tensor:
    if move == "same":
        return x.detach()
    if move == "own":
        return x.unflatten(0, (ranks.size, -1))[ranks.rank].clone()
    if move == "sum":
        return cast(Tensor, all_reduce_sum(x, ranks.group))
    return cast(Tensor, _OPS[move](x, ranks.size, ranks.group))
