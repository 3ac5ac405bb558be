"""Targets: the shift from labels to them, and the tokens that have one, with which alone a training pass ends."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.layers.on_host import OnHost
from ligermodels.layers.packing import document_of
from ligermodels.ops.linear_cross_entropy import SKIP_BELOW

IGNORE_INDEX = -100


def shift_labels(labels: Tensor, ahead: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """targets[b, t] = labels[b, t + ahead], and -100 where that is past the row's end or in another document.

    Args:
        labels: (B, T) long, aligned with the inputs.
        ahead: 1 for the language-model head; 2 + i for Medusa head i.
        cu_seqlens: int32 (n + 1,), bounds of packed documents over the flattened B * T tokens.
    """
    length = labels.shape[1]
    targets = F.pad(labels[:, ahead:], (0, min(ahead, length)), value=IGNORE_INDEX)
    if cu_seqlens is None:
        return targets
    place = torch.arange(labels.numel(), device=labels.device)
    end = cu_seqlens[document_of(cu_seqlens, labels.numel()) + 1]
    return targets.masked_fill((place + ahead >= end).view_as(labels), IGNORE_INDEX)


class TargetRows:
    """The tokens that have a target in any of several losses, and how many each loss has, on their way from the device.

    Past the keys and values of the last block the other tokens have no bearing on loss or gradients, and are left out:
    `hidden_states(target_rows=...)` gives the `rows` alone, and `take` and `put_back` go from tensors of all tokens to
    those of the rows and back.

    Asked for before a forward pass, the counts are there when its last block needs them: the device has long begun that
    pass then, while its queue is full, and nothing waits that had something to do.
    """

    def __init__(self, targets: Tensor, *, every_token: bool = False) -> None:
        """targets: long (K, B, T), those of K losses. `every_token`: none is to be left out."""
        self._shape, self._every_token = targets.shape[1:], every_token
        self._known: OnHost | None = None
        self._rows: Tensor | None = None
        # A graph, compiled or captured, is the same for any number of targets.
        if not (torch.compiler.is_compiling() or (targets.is_cuda and torch.cuda.is_current_stream_capturing())):
            valid = (targets != IGNORE_INDEX).flatten(1)
            self._any = valid.any(0)
            self._known = OnHost(torch.cat([valid, self._any[None]]).sum(1))

    @property
    def counts(self) -> list[int] | None:
        """How many targets each loss has, (K,), for `num_targets` in `ops`; None where those cannot use it."""
        return None if self._known is None else self._known.get()[:-1]

    @property
    def rows(self) -> Tensor | None:
        """Indices of the tokens that have a target, of the flattened B * T: long (n,), rising. None where all tokens
        are taken: where so many have one, or none has, and where that is not known."""
        if self._rows is None and self._known is not None and not self._every_token:
            count = self._known.get()[-1]
            if 0 < count < SKIP_BELOW * self._any.numel():
                self._rows = self._any.argsort(descending=True, stable=True)[:count]
        return self._rows

    def take(self, x: Tensor) -> Tensor:
        """x (..., B, T) -> (..., 1, n), of the rows; x itself where all tokens are taken."""
        return x if self.rows is None else x.flatten(-2).index_select(-1, self.rows).unsqueeze(-2)

    def put_back(self, x: Tensor, other: float) -> Tensor:
        """What `take` gives -> (..., B, T), with `other` for tokens that are not among the rows."""
        if self.rows is None:
            return x
        whole = x.new_full((*x.shape[:-2], self._shape.numel()), other)
        return whole.index_copy(-1, self.rows, x.squeeze(-2)).unflatten(-1, self._shape)


def take_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """x (B, T, H) -> (1, n, H), those `rows` of the flattened B * T tokens; x itself where that is None.

    rows: long (n,), none of them twice, for which the gradient is a copy; that of torch's own indexing is a sum.
    """
    return x if rows is None else _TakeRows.apply(x, rows)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.flatten(0, 1).index_select(0, rows)[None]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        dx = dy.new_zeros(ctx.shape)
        dx.flatten(0, 1).index_copy_(0, rows, dy[0])
        return dx, None
