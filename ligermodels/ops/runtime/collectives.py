"""Exchanges of rows between the ranks of a group, which is given by its name."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ligermodels.ops.runtime.library import custom_op, is_fake

_group_named: Callable[[Any], Any] = distributed_c10d._resolve_process_group
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def start_all_gather(x: Tensor, ranks: int, group: str) -> tuple[Tensor, Callable[[], Any]]:
    """x (n, ...) of each rank -> (ranks * n, ...), there once the function has been called that comes with it."""
    found = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    return found, _gather(found, x.contiguous(), group=_group_named(group), async_op=True).wait


def start_reduce_scatter(out: Tensor, x: Tensor, group: str) -> Callable[[], Any]:
    """The sum over ranks of x (ranks * n, ...) -> `out`, on each its (n, ...), once the function has been called."""
    wait: Callable[[], Any] = _scatter(out, x.contiguous(), group=_group_named(group), async_op=True).wait
    return wait


@custom_op()
def all_gather_rows(x: Tensor, ranks: int, group: str) -> Tensor:
    """x (n, ...) of each rank -> (ranks * n, ...)."""
    if is_fake(x):
        return x.new_empty(ranks * x.shape[0], *x.shape[1:])
    found, wait = start_all_gather(x, ranks, group)
    wait()
    return found


@custom_op()
def reduce_scatter_rows(x: Tensor, ranks: int, group: str) -> Tensor:
    """The sum over ranks of x (ranks * n, ...) -> on each its (n, ...)."""
    found = x.new_empty(x.shape[0] // ranks, *x.shape[1:])
    if not is_fake(x):
        start_reduce_scatter(found, x, group)()
    return found
