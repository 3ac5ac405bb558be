"""Logits that the forward pass of a head keeps for the backward pass, which recomputes only the others.

The backward pass of `linear_statistics` needs the logits again. It goes by chunks of classes, so that each chunk
completes some rows of the weight's gradient. Two kinds of memory are free for logits from the forward pass until then:

- The part of the memory budget that a chunk of the backward pass does not need.
- The memory of the weight's gradient (V, H). It has room for H rows of logits: the block (H, n) of a chunk of n classes
  has as many elements as the chunk's rows (n, H) of the gradient, which replace it after its last use.

A kept row saves a quarter of the work of a trained head, which is four GEMMs per row without it. For 8192 rows of H =
4096 and V = 151936 the default budget keeps 78 % of the rows.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.ops.loss.chunks import ROW_MULTIPLE, ChunkedHead, chunk_rows, empty_logits, logits_into, padded
from ligermodels.ops.loss.row_statistics import RowOutputs, RowStatistics, rows_in_place
from ligermodels.ops.loss.token_losses import LossOptions
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import is_fake

CLASS_MULTIPLE = 128  # chunks of classes are whole GEMM tiles
LEAST_KEPT = 0.1  # of the rows; below that the other gradients' chunks have better use of the memory


class KeptLogits(NamedTuple):
    """The logits of the first rows: some in memory of their own, the next ones in that of the weight's gradient."""

    apart: Tensor  # (A, V)
    inside: int  # number of rows in the memory of dw, at most H
    dw: Tensor  # (V, H), or without elements
    size: int  # number of classes of a chunk of the backward pass

    @property
    def num_rows(self) -> int:
        """The number of rows with kept logits."""
        return len(self.apart) + self.inside

    def blocks(self, classes: slice) -> Iterator[tuple[slice, Tensor]]:
        """The kept logits (rows, n) of a chunk of n classes, with their rows."""
        if len(self.apart):
            yield slice(0, len(self.apart)), self.apart[:, classes]
        if self.inside:
            n = classes.stop - classes.start
            block = self.dw[classes].view(-1)[: self.inside * n].view(self.inside, n)
            yield slice(len(self.apart), self.num_rows), block

    def store(self, chunk: slice, logits: Tensor) -> None:
        """Copies those logits (rows, V) of a chunk of rows that are kept in the memory of dw."""
        begin, end = max(chunk.start, len(self.apart)), min(chunk.stop, self.num_rows)
        if begin >= end:
            return
        for first in range(0, logits.shape[1], self.size):
            classes = slice(first, min(first + self.size, logits.shape[1]))
            *_, (_, block) = self.blocks(classes)
            block[begin - len(self.apart) : end - len(self.apart)] = logits[
                begin - chunk.start : end - chunk.start, classes
            ]


class KeptRows(NamedTuple):
    """The numbers of rows of `KeptLogits`, and the number of classes of a chunk."""

    apart: int
    inside: int
    size: int


def rows_to_keep(hidden: Tensor, weight: Tensor, memory_budget: int, needs: Sequence[bool]) -> KeptRows | None:
    """How many rows keep their logits; None if keeping them is not worth it or not possible.

    In torch, without the kernels, statistics overwrite the logits. Compiled graphs and dispatch modes (selective
    activation checkpointing) see only registered ops, which cannot return logits and overwrite them later.

    Args:
        hidden: (..., H).
        weight: (V, H).
        memory_budget: bytes for kept logits, a chunk in the backward and the float32 sum of the gradient of hidden.
        needs: whether the gradients of hidden, weight and bias are needed.
    """
    if torch.compiler.is_compiling() or not any(needs) or is_fake(hidden) or torch._C._len_torch_dispatch_stack():
        return None
    if not use_kernels(hidden):
        return None
    (*rows, H), V, item = hidden.shape, len(weight), hidden.element_size()
    T = math.prod(rows)
    bytes_per_row = padded(V) * item
    if T * bytes_per_row <= memory_budget:
        return KeptRows(T, 0, V) if T else None
    of_sum = T * H * item if needs[0] and item < 4 else 0
    size = max(memory_budget // 4 // (T * item) // CLASS_MULTIPLE, 1) * CLASS_MULTIPLE
    apart = min(max(memory_budget - of_sum - size * T * item, 0) // bytes_per_row, T)
    if apart >= ROW_MULTIPLE:
        apart -= apart % ROW_MULTIPLE
    inside = min(H, T - apart) if needs[1] else 0
    return KeptRows(apart, inside, min(size, V)) if apart + inside >= LEAST_KEPT * T else None


def statistics_keeping_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weights: Tensor | None,
    options: LossOptions, outputs: RowOutputs, memory_budget: int, rows: KeptRows,
) -> tuple[RowStatistics, KeptLogits]:  # fmt: skip
    """The statistics of each row of a head, by the kernels, and the logits of some rows.

    Args:
        hidden: (..., H).
        weight: (V, H).
        bias: (V,), or None.
        target: int64 (...), contiguous, checked.
        class_weights: (V,), of the means, or None.
        options: the options of the loss.
        outputs: the requested statistics.
        memory_budget: bytes for a chunk.
        rows: `rows_to_keep`.
    """
    statistics = RowStatistics.empty(target, torch.promote_types(hidden.dtype, torch.float32), outputs)
    x, y = hidden.reshape(-1, hidden.shape[-1]).contiguous(), target.view(-1)
    dw = weight.new_empty(weight.shape if rows.inside else 0)
    kept = KeptLogits(weight.new_empty(rows.apart, 0), rows.inside, dw, rows.size)
    if rows.apart < len(x):  # first, because their chunks need the memory of the logits that are kept apart
        size = chunk_rows(len(x) - rows.apart, weight, 0, memory_budget, need_weight=False)
        head = ChunkedHead(x[rows.apart :], weight, bias, size)
        for chunk in head.chunks():
            logits = head.logits(chunk)
            chunk = slice(chunk.start + rows.apart, chunk.stop + rows.apart)
            rows_in_place(logits, y[chunk], statistics.rows(chunk), options, None, class_weights)
            kept.store(chunk, logits)
        del head, logits
    if rows.apart:
        chunk, apart = slice(0, rows.apart), empty_logits(rows.apart, weight)
        logits_into(apart, x[chunk], weight, bias)
        rows_in_place(apart, y[chunk], statistics.rows(chunk), options, None, class_weights)
        kept = kept._replace(apart=apart)
    statistics.fill_lses()
    return statistics, kept
