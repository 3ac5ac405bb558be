"""Logits that the forward pass of a head keeps for the backward pass, which recomputes only the others.

The backward pass of `linear_statistics` needs the logits again. It goes by chunks of classes, so that each chunk
completes some rows of the weight's gradient. Two kinds of memory are free for logits from the forward pass until then:

- The part of the memory budget that a chunk of the backward pass does not need.
- The memory of the weight's gradient (V, H). It has room for H rows of logits: the block (H, n) of a chunk of n classes
  has as many elements as the chunk's rows (n, H) of the gradient, which replace it after its last use.

A kept row saves one of the four GEMMs of a trained head. For 8192 rows of H = 4096 and V = 151936 in bfloat16 the
default budget keeps 78 % of the rows. On an H100 that took 51.7 ms in place of 60.3, and 45.8 ms with all rows kept.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ligermodels.ops.loss.chunks import (
    ROW_MULTIPLE,
    bytes_beside,
    chunks_of_logits,
    empty_logits,
    logits_into,
    padded,
    rows_per_chunk,
)
from ligermodels.ops.loss.cutoffs import bytes_for_cutoffs, fill_dropped
from ligermodels.ops.loss.row_statistics import rows_in_place
from ligermodels.ops.loss.sampler import SamplerOptions, empty_sampler
from ligermodels.ops.loss.token_losses import LogitRows, LossOptions, RowOutputs
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import is_fake

if TYPE_CHECKING:
    from ligermodels.ops.runtime.class_shards import ClassShard

CLASS_MULTIPLE = 128  # chunks of classes are whole GEMM tiles
LEAST_KEPT = 0.1  # of the rows; below that the other gradients' chunks have better use of the memory


class KeptLogits(NamedTuple):
    """The logits of the first rows, in memory of their own, and of the next rows, in the weight gradient's memory."""

    apart: Tensor  # (A, V)
    inside: int  # number of rows in the memory of dw, at most H
    dw: Tensor  # (V, H), or without elements
    size: int  # number of classes of a chunk of the backward pass

    @classmethod
    def none(cls, weight: Tensor, size: int) -> "KeptLogits":
        """No kept logits, of a weight (V, H); chunks have `size` classes."""
        return cls(weight.new_empty(0, len(weight)), 0, weight.new_empty(0), size)

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

    def __bool__(self) -> bool:
        return self.apart + self.inside > 0


NO_ROWS = KeptRows(0, 0, CLASS_MULTIPLE)


def rows_to_keep(hidden: Tensor, num_classes: int, memory_budget: int, needs: Sequence[bool]) -> KeptRows:
    """How many rows keep their logits: none if it is not worth it or not possible.

    In torch, without the kernels, statistics overwrite the logits. Compiled graphs and dispatch modes (selective
    activation checkpointing) see only registered ops, which cannot return logits and overwrite them later.

    Args:
        hidden: (..., H).
        num_classes: V; with sharded classes the largest number of a rank.
        memory_budget: bytes for kept logits, a chunk of the backward pass and the float32 sum of hidden's gradient.
        needs: whether the gradients of hidden, weight and bias are needed.
    """
    if torch.compiler.is_compiling() or not any(needs) or is_fake(hidden) or torch._C._len_torch_dispatch_stack():
        return NO_ROWS
    if not use_kernels(hidden):
        return NO_ROWS
    (*shape, H), item = hidden.shape, hidden.element_size()
    T, bytes_per_row = math.prod(shape), padded(num_classes) * item
    if T * bytes_per_row <= memory_budget:
        return KeptRows(T, 0, num_classes)
    of_sum = T * H * item if needs[0] and item < 4 else 0
    size = max(memory_budget // 4 // (T * item) // CLASS_MULTIPLE, 1) * CLASS_MULTIPLE
    apart = min(max(memory_budget - of_sum - size * T * item, 0) // bytes_per_row, T)
    if apart >= ROW_MULTIPLE:
        apart -= apart % ROW_MULTIPLE
    inside = min(H, T - apart) if needs[1] else 0
    return KeptRows(apart, inside, min(size, num_classes)) if apart + inside >= LEAST_KEPT * T else NO_ROWS


def statistics_and_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weights: Tensor | None,
    options: LossOptions, outputs: RowOutputs, memory_budget: int, kept_rows: KeptRows,
    inverse_temperatures: Tensor | None, sampled: SamplerOptions | None, shard: "ClassShard | None" = None,
) -> tuple[LogitRows, KeptLogits | None]:  # fmt: skip
    """The statistics of each row of a head, and the logits of some rows. Not for compiled graphs.

    Args:
        hidden: (..., H).
        weight: (V, H).
        bias: (V,), or None.
        target: int64 (...), contiguous, checked.
        class_weights: (V,), of the means, or None.
        options: the options of the loss.
        outputs: the requested statistics.
        memory_budget: bytes for a chunk.
        kept_rows: `rows_to_keep`.
        inverse_temperatures: (...), or None.
        sampled: the classes that a sampler keeps; None for all.
        shard: the classes of `weight`, if those of a row are sharded over ranks.
    """
    num_classes = len(weight) if shard is None else shard.most  # chunks are equal on all ranks
    rows = LogitRows.empty(target, torch.promote_types(hidden.dtype, torch.float32), outputs)
    rows = empty_sampler(rows, inverse_temperatures, len(weight), filtered=sampled is not None)
    x = hidden.reshape(-1, hidden.shape[-1]).contiguous()
    kept = KeptLogits(
        weight.new_empty(kept_rows.apart, 0), kept_rows.inside,
        weight.new_empty(weight.shape if kept_rows.inside else 0), kept_rows.size,
    )  # fmt: skip

    def fill(logits: Tensor, chunk: LogitRows) -> None:
        if sampled is not None:
            fill_dropped(logits, chunk, options, sampled, shard)
        rows_in_place(logits, chunk, options, class_weights)

    with torch.cuda.device_of(hidden):
        if kept_rows.apart < len(x):  # first, because their chunks need the memory of the logits that are kept apart
            beside = bytes_beside(weight, options)
            if sampled is not None:
                beside = max(beside, len(weight) * bytes_for_cutoffs(weight.dtype))
            bytes_per_row = beside // len(weight) * num_classes + padded(num_classes) * x.element_size()
            size = rows_per_chunk(len(x) - kept_rows.apart, bytes_per_row, 0, memory_budget)
            for chunk, logits in chunks_of_logits(x[kept_rows.apart :], weight, bias, size):
                chunk = slice(chunk.start + kept_rows.apart, chunk.stop + kept_rows.apart)
                fill(logits, rows.chunk(chunk))
                kept.store(chunk, logits)
            del logits
        if kept_rows.apart:
            apart = logits_into(empty_logits(kept_rows.apart, weight), x[: kept_rows.apart], weight, bias)
            fill(apart, rows.chunk(slice(0, kept_rows.apart)))
            kept = kept._replace(apart=apart)
    rows.fill_lses()
    return rows, kept if kept.num_rows else None
