"""Expert parallelism: each rank of a group has some of a mixture's experts, and tokens travel to theirs and back.

The ranks have tokens of their own. Each sorts its rows (a token and one of its choices) by expert, sends them to the
ranks that have the experts, and gets the results back in the same order. No expert has a capacity, so that the numbers
of rows that ranks exchange are known only when the routers have chosen: each layer waits for the device once.

The gradient of an expert's weights comes of the tokens of all ranks, each of which has a loss of its own; that of other
parameters is averaged over ranks. So that both are means, gradients are divided by the number of ranks on their way to
the experts, and multiplied by it on their way back to the tokens.

A module that has such experts names the parameters of which each rank has some rows, by `expert_parallel`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ligermodels import ops
from ligermodels.ops.runtime.library import once_differentiable

Experts = Callable[[Tensor, Tensor], Tensor]
"""Rows (R, H), sorted by expert, and the offsets (E,) at which those of each expert end -> (R, H)."""


def on_ranks(rows: Tensor, offsets: Tensor, experts: Experts, mesh: Any) -> Tensor:
    """`experts(rows, offsets)` where this rank has a part of the experts: its `experts` take those of its own alone.

    Args:
        rows: (R, H), sorted by expert, on each rank its own.
        offsets: int32 (E,), of all experts, of which the ranks have equal parts.
        mesh: a DeviceMesh of one dimension.
    """
    ranks, group = mesh.size(), mesh.get_group()
    counts = offsets.diff(prepend=offsets.new_zeros(1))
    theirs = torch.empty_like(counts)  # from each rank in turn, how many rows come for each expert of this one
    if rows.is_meta:  # there are no counts; a mesh may say which `load`, relative to an equal part, comes to a rank
        sent, received = [len(rows)], [round(len(rows) * getattr(mesh, "load", 1.0))]
    else:
        dist.all_to_all_single(theirs, counts, group=group)
        sent, received = torch.stack([counts, theirs]).view(2, ranks, -1).sum(2).tolist()  # waits for the device
    rows = _exchange(rows, sent, received, group, gradient_scale=float(ranks))
    own = torch.arange(len(offsets), device=rows.device) % (len(offsets) // ranks)
    which = own.repeat_interleave(theirs, output_size=sum(received))
    order, inverse, ends = ops.sort_by_expert(which[:, None], len(offsets) // ranks)
    rows = ops.gather_rows(rows, order, inverse)
    # Kernels take no empty tensor, and weights need a gradient: where no row comes, one of zeros, which is dropped.
    missing = int(sum(received) == 0)
    rows = experts(F.pad(rows, (0, 0, 0, missing)), ends + missing)[: sum(received)]
    rows = ops.gather_rows(rows, inverse, order)
    return _exchange(rows, received, sent, group, gradient_scale=1 / ranks)


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: Any, gradient_scale: float) -> Tensor:
    """Of rows (sum(sent), H) the first to the first rank, and so on -> (sum(received), H), from each rank in turn."""
    return cast(Tensor, _Exchange.apply(rows, sent, received, group, gradient_scale))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any, scale: float) -> Tensor:
        ctx.sent, ctx.received, ctx.group, ctx.scale = sent, received, group, scale
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _all_to_all(dy, ctx.received, ctx.sent, ctx.group).mul_(ctx.scale), None, None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    found = rows.new_empty(sum(received), rows.shape[1])
    if not rows.is_meta:
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found
