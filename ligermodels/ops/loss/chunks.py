"""A linear head by chunks of rows: the logits of a chunk, the gradients summed over chunks, and the size of chunks."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ligermodels.ops.loss.cutoffs import bytes_for_cutoffs
from ligermodels.ops.loss.gradient_sum import GradientSum
from ligermodels.ops.loss.linear_head import SKIP_BELOW as SKIP_BELOW  # for `layers.targets`
from ligermodels.ops.loss.row_statistics import bytes_per_logit
from ligermodels.ops.loss.token_losses import LossOptions
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.tensors import empty_gradient

ROW_MULTIPLE = 128  # chunks are whole GEMM tiles
COLUMN_MULTIPLE = 16  # on CUDA the stride of logits is a multiple of this, so that rows are aligned for odd V


class ChunkedHead:
    """The logits of a head, a chunk of rows at a time in one workspace, and the gradients summed over the chunks."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, size: int, gradients: Sequence[Tensor] | None = None
    ) -> None:
        """
        Args:
            hidden: (..., H).
            weight: (V, H).
            bias: (V,), or None.
            size: the number of rows of a chunk.
            gradients: contiguous memory for the gradients of hidden, weight and bias, see `empty_gradients`; without
                elements for a gradient that is not needed. Default: None, no gradients.
        """
        self.x = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        self.weight, self.bias, self.size = weight, bias, size
        self.workspace = empty_logits(size, weight)
        dx, dw, db = (g if g.numel() else None for g in gradients) if gradients else (None, None, None)
        self.dx = None if dx is None else dx.view(self.x.shape)
        self.dw = None if dw is None else GradientSum(dw, several=size < len(self.x))
        self.db = None if db is None else GradientSum(db, several=True)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """The rows of each chunk, and their logits (rows, V), x @ weight.T + bias, valid until the next chunk."""
        for start in range(0, len(self.x), self.size):
            chunk = slice(start, min(start + self.size, len(self.x)))
            x = self.x[chunk]
            yield chunk, logits_into(self.workspace[: len(x)], x, self.weight, self.bias)

    def add_gradients(self, chunk: slice, dlogits: Tensor) -> None:
        """Computes the gradients that are needed from the gradient of a chunk's logits."""
        if self.dx is not None:
            torch.mm(dlogits, self.weight, out=self.dx[chunk])
        if self.dw is not None:
            self.dw.add(dlogits, self.x[chunk])
        if self.db is not None:
            self.db.add(dlogits)

    def close(self) -> None:
        """Rounds the summed gradients into their memory, after the last chunk."""
        for total in (self.dw, self.db):
            if total is not None:
                total.close()


def logits_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The logits x @ weight.T + bias in given memory.

    Args:
        out: (M, n).
        x: (M, H).
        weight: (n, H).
        bias: (n,), or None.
    """
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def empty_logits(num_rows: int, weight: Tensor) -> Tensor:
    """Memory for logits (num_rows, V) of a weight (V, H)."""
    columns = padded(len(weight)) if weight.is_cuda else len(weight)  # CPU GEMMs may read gaps between rows
    return weight.new_empty(num_rows, columns)[:, : len(weight)]


def empty_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]) -> list[Tensor]:
    """Memory for the gradients of hidden, weight and bias.

    Args:
        hidden: (..., H).
        weight: (V, H).
        bias: (V,), or None.
        needs: whether each of the three is needed; if not, its tensor has no elements.
    """
    return [empty_gradient(x, need, hidden) for x, need in zip((hidden, weight, bias), needs, strict=True)]


def bytes_beside(weight: Tensor, options: LossOptions, *, ranks: bool = False, filtered: bool = False) -> int:
    """Bytes that statistics need for each row beside its logits.

    Args:
        weight: (V, H), the dtype of the logits.
        options: `softcap` is used.
        ranks: whether ranks are computed.
        filtered: whether a sampler drops classes.
    """
    per_logit = 0 if use_kernels(weight) else bytes_per_logit(weight.dtype, options, ranks)
    return len(weight) * (max(per_logit, bytes_for_cutoffs(weight.dtype)) if filtered else per_logit)


def padded(num_classes: int) -> int:
    """The number of columns of a row of logits in memory."""
    return -(-num_classes // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def chunk_rows(
    num_rows: int, weight: Tensor, beside: int, memory_budget: int, need_weight: bool, teacher_item: int = 0
) -> int:
    """The number of rows of a chunk, see `rows_per_chunk`.

    Args:
        num_rows: the number of all rows.
        weight: (V, H), the dtype of the logits.
        beside: bytes that a row needs beside its logits.
        memory_budget: bytes for a chunk.
        need_weight: whether the weight's gradient is summed over the chunks.
        teacher_item: bytes of a teacher's logit, for distillation.
    """
    (V, H), item = weight.shape, weight.element_size()
    widened = need_weight and item < 4
    if widened and not weight.is_cuda:  # on the CPU GradientSum casts its operands
        beside = max(beside, (V + H) * 4)
    return rows_per_chunk(
        num_rows, padded(V) * (item + teacher_item) + beside, V * H * item if widened else 0, memory_budget
    )


def rows_per_chunk(num_rows: int, bytes_per_row: int, bytes_of_sum: int, memory_budget: int) -> int:
    """The number of rows of a chunk: as many as the budget allows, at least one, spread evenly over the chunks.

    In multiples of ROW_MULTIPLE if there are as many.

    Args:
        num_rows: the number of all rows.
        bytes_per_row: of a chunk.
        bytes_of_sum: of the float32 sum of the weight's gradient over several chunks (`GradientSum`). A single chunk
            needs no sum and may use its memory. It is part of the budget if it is at most half of it, else it is added.
        memory_budget: bytes for a chunk and the sum.
    """
    if num_rows * bytes_per_row <= memory_budget + bytes_of_sum:
        return max(num_rows, 1)
    if 2 * bytes_of_sum <= memory_budget:
        memory_budget -= bytes_of_sum
    rows = max(memory_budget // bytes_per_row, 1)
    if rows >= ROW_MULTIPLE:
        rows -= rows % ROW_MULTIPLE
    chunks = -(-num_rows // rows)
    return min(rows, -(-num_rows // (chunks * ROW_MULTIPLE)) * ROW_MULTIPLE)
