"""Expert parallelism: each rank has some of a mixture's experts. Tokens are sent to their experts and back.

Each rank has its own tokens. It sorts its rows (a token and one of its choices) by expert, sends them to the ranks that
have the experts, and receives the results in the same order. Experts have no capacity limit, so the numbers of rows are
known only after routing: each layer synchronises with the device once.

Each rank has its own loss. The tokens of all ranks contribute to the gradient of an expert's weights, while gradients
of other parameters are averaged over ranks. To make both a mean, gradients are divided by the number of ranks on their
way to the experts, and multiplied by it on their way back to the tokens.

A class with such experts declares `expert_parallel`, the names of the parameters with a row per expert.
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
"""Rows (R, H), sorted by expert, and the offsets (E,) where the rows of each expert end -> (R, H)."""


def on_ranks(rows: Tensor, offsets: Tensor, experts: Experts, mesh: Any) -> Tensor:
    """Compute the outputs of experts that are divided evenly over ranks.

    Args:
        rows: (R, H), this rank's rows, sorted by expert.
        offsets: int32 (E,), the offsets where the rows of each of the E experts of all ranks end.
        experts: computes the experts of this rank.
        mesh: a DeviceMesh of one dimension.

    Returns:
        (R, H), in the order of `rows`.
    """
    ranks, group = mesh.size(), mesh.get_group()
    counts = offsets.diff(prepend=offsets.new_zeros(1))
    theirs = torch.empty_like(counts)  # for each rank in turn, the number of its rows for each expert of this rank
    if rows.is_meta:  # no counts; `mesh.load` is the number of rows that a rank receives, relative to an equal share
        sent, received = [len(rows)], [round(len(rows) * getattr(mesh, "load", 1.0))]
    else:
        dist.all_to_all_single(theirs, counts, group=group)
        sent, received = torch.stack([counts, theirs]).view(2, ranks, -1).sum(2).tolist()  # waits for the device
    rows = _exchange(rows, sent, received, group, gradient_scale=float(ranks))
    own = torch.arange(len(offsets), device=rows.device) % (len(offsets) // ranks)
    expert = own.repeat_interleave(theirs, output_size=sum(received))
    order, inverse, ends = ops.sort_by_expert(expert[:, None], len(offsets) // ranks)
    rows = ops.gather_rows(rows, order, inverse)
    # Kernels reject empty tensors, and weights need a gradient. So a rank without rows computes a row of zeros.
    missing = int(sum(received) == 0)
    rows = experts(F.pad(rows, (0, 0, 0, missing)), ends + missing)[: sum(received)]
    rows = ops.gather_rows(rows, inverse, order)
    return _exchange(rows, received, sent, group, gradient_scale=1 / ranks)


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: Any, gradient_scale: float) -> Tensor:
    """Send rows (sum(sent), H), `sent[i]` of them to rank i, and return the received rows (sum(received), H).

    Rows of rank 0 come first. Gradients go back the same way, multiplied by `gradient_scale`."""
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
    output = rows.new_empty(sum(received), rows.shape[1])
    if not rows.is_meta:
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
    return output
