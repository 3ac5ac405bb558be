"""A linear head by chunks of rows: the logits of a chunk, the gradients summed over chunks, and the size of chunks.

Gradients of parameters are summed in float32, rounded once, and kept from the forward to the backward pass.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ligermodels.ops.linear.batch_invariant import batch_invariant_into
from ligermodels.ops.loss.row_statistics import bytes_per_logit
from ligermodels.ops.loss.token_losses import LossOptions
from ligermodels.ops.runtime.devices import num_sms
from ligermodels.ops.runtime.dispatch import set_batch_invariant, tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import is_fake
from ligermodels.ops.runtime.tensors import empty_gradient

ROW_MULTIPLE = 128  # chunks are whole GEMM tiles
COLUMN_MULTIPLE = 16  # on CUDA the stride of logits is a multiple of this, so that rows are aligned for odd V
FIRST_ROWS = 1024  # rows that are rounded first, through a copy
SCALE_BLOCK = 8192  # elements that a program scales at a time
ALIGNED = 16  # the two parts of the sum meet at a multiple of this many rows, for the GEMMs


def chunks_of_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, size: int, gradients: Sequence[Tensor] | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """The rows of each chunk and their logits (rows, V), hidden @ weight.T + bias, in one workspace.

    Given memory for gradients, the loop over the chunks replaces the logits of each by their gradient, in place. After
    the last chunk the gradients of the head are complete: the loop must not end before.

    Args:
        hidden: (..., H).
        weight: (V, H).
        bias: (V,), or None.
        size: the number of rows of a chunk.
        gradients: contiguous memory for the gradients of hidden, weight and bias, see `empty_gradients`; without
            elements for a gradient that is not needed. Default: None, no gradients.
    """
    x, workspace = hidden.reshape(-1, hidden.shape[-1]).contiguous(), empty_logits(size, weight)
    dx, *parameters = gradients or [weight.new_empty(0)]
    sums = [GradientSum(g, several=size < len(x) or g.dim() == 1) for g in parameters if g.numel()]
    for start in range(0, len(x), size):
        chunk = slice(start, min(start + size, len(x)))
        logits = logits_into(workspace[: chunk.stop - start], x[chunk], weight, bias)
        yield chunk, logits  # from here on these are their gradient
        if dx.numel():
            torch.mm(logits, weight, out=dx.view(x.shape)[chunk])
        for total in sums:
            total.add(logits, x[chunk])
    for total in sums:
        total.close()


def logits_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The logits x @ weight.T + bias in given memory.

    Args:
        out: (M, n).
        x: (M, H).
        weight: (n, H).
        bias: (n,), or None.
    """
    if set_batch_invariant.value:
        return batch_invariant_into(out, x, weight, bias)
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


def bytes_beside(weight: Tensor, options: LossOptions, *, ranks: bool = False) -> int:
    """Bytes that statistics need for each row beside its logits.

    Args:
        weight: (V, H), the dtype of the logits.
        options: `softcap` is used.
        ranks: whether ranks are computed.
    """
    return 0 if use_kernels(weight) else len(weight) * bytes_per_logit(weight.dtype, options, ranks)


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
    bytes_of_sum = V * H * item if need_weight and item < 4 else 0
    if bytes_of_sum and not weight.is_cuda:  # on the CPU GradientSum casts its operands
        beside = max(beside, (V + H) * 4)
    return rows_per_chunk(num_rows, padded(V) * (item + teacher_item) + beside, bytes_of_sum, memory_budget)


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


class GradientSum:
    """The sum over chunks of rows of g.T @ x, (V, H), for a weight, or of the rows of g, (V,), for a bias.

    With several chunks and a 16-bit parameter, the sum is float32 until `close`. Half of it is stored in the memory of
    the final gradient, so that it needs only the memory of the gradient once more, and rounding needs none. This saves
    2 bytes per element of the head's weight, 1 GB for 128k classes and H = 4096.
    """

    def __init__(self, gradient: Tensor, *, several: bool) -> None:
        """
        Args:
            gradient: memory of the result, contiguous, of the parameter's shape and dtype.
            several: whether there may be more than one chunk.
        """
        wide = torch.promote_types(gradient.dtype, torch.float32)
        self._gradient, self._empty = gradient, True
        self._wide = _wide_parts(gradient, wide) if several and wide != gradient.dtype else []

    def add(self, g: Tensor, x: Tensor | None = None) -> None:
        """Adds a chunk: g (M, V), and for a weight x (M, H)."""
        for part, total in self._wide or [(slice(None), self._gradient)]:
            _add(total, g[:, part], x, beta=0 if self._empty else 1)
        self._empty = False

    def close(self) -> Tensor:
        """Returns the gradient, zeros if nothing was added. `add` must not be called afterwards."""
        if self._empty:
            return self._gradient.zero_()
        for part, total in self._wide:
            _round(self._gradient, part, total)
        return self._gradient


def _wide_parts(gradient: Tensor, wide: torch.dtype) -> list[tuple[slice, Tensor]]:
    """The rows of a gradient in two parts, and memory of a wider dtype for the sum of each: for the first part, in the
    memory of the gradient. Only the second part, of all rows, for gradients that are small."""
    inside = len(gradient) // 2 // ALIGNED * ALIGNED if gradient.dim() == 2 else 0
    shared = gradient[: 2 * inside].view(-1).view(wide).view(inside, *gradient.shape[1:])
    rest = gradient.new_empty((len(gradient) - inside, *gradient.shape[1:]), dtype=wide)
    parts = [(slice(0, inside), shared), (slice(inside, len(gradient)), rest)]
    return parts if inside else parts[1:]


def _add(total: Tensor, g: Tensor, x: Tensor | None, *, beta: int) -> None:
    """total = beta * total + g.T @ x, or for a total (V,) the sum of the rows of g; with beta 0 of a total that is
    uninitialised."""
    if x is None or total.dim() == 1:
        rows_sum = g.sum(0, dtype=total.dtype)
        total.copy_(total + rows_sum if beta else rows_sum)
    elif total.dtype == g.dtype:
        torch.addmm(total, g.t(), x, beta=beta, out=total)
    elif total.is_cuda:
        torch.addmm(total, g.t(), x, beta=beta, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, g.t().to(total.dtype), x.to(total.dtype), beta=beta, out=total)


def _round(gradient: Tensor, rows: slice, total: Tensor) -> None:
    """gradient[rows] = total, where total may be in the memory of the first rows of the gradient.

    Row r of a sum in this memory is stored where rows 2r and 2r + 1 of the gradient belong. So pieces of doubling
    length can be rounded in order: each overwrites only rows of the sum that have been rounded."""
    if rows.stop == len(gradient):  # these are in memory of their own
        gradient[rows] = total
        return
    first = min(FIRST_ROWS, len(total))
    gradient[:first] = total[:first].to(gradient.dtype)
    ends = [first]
    while ends[-1] < len(total):
        ends.append(min(2 * ends[-1], len(total)))
    for start, end in pairwise(ends):
        gradient[start:end] = total[start:end]


def keep_gradients(ctx: Any, inputs: Sequence[Tensor | None], gradients: list[Tensor], needs: Sequence[bool]) -> None:
    """Saves the gradients that a forward pass has computed, and its inputs, for `kept_gradients`.

    Args:
        ctx: the context of the autograd.Function.
        inputs: the tensors from which a repeated backward pass recomputes the gradients.
        gradients: the gradients for a loss gradient of 1.
        needs: whether the forward pass computed each gradient; if it computed none, the backward pass does.
    """
    # A compiled graph keeps the gradients as saved tensors and may not write into them. Eagerly they are returned once,
    # without a second copy: autograd's own saved tensors would stay alive through the backward pass.
    ctx.functional = any(needs) and torch.compiler.is_compiling()
    ctx.save_for_backward(*(gradients if ctx.functional else inputs))
    ctx.gradients = gradients if any(needs) and not ctx.functional else None


def kept_gradients(ctx: Any, grad: Tensor) -> list[Tensor] | None:
    """The kept gradients times `grad`, a scalar; None if the backward pass has to compute them from the inputs."""
    if ctx.functional:
        return [g * grad for g in ctx.saved_tensors]
    if ctx.gradients is None:
        return None
    gradients: list[Tensor] = ctx.gradients
    ctx.gradients = None
    for g in gradients:
        scale_(g, grad)
    return gradients


@kernel
def _scale_kernel(x, factor, n, BLOCK: tl.constexpr):
    """x *= factor, without touching x if the factor is 1, as it usually is."""
    f = tl.load(factor).to(tl.float32)
    if f != 1.0:
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
            i = first + tl.arange(0, BLOCK)
            value = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32) * f
            tl.store(x + i, value.to(x.dtype.element_ty), mask=i < n)


def scale_(x: Tensor, factor: Tensor) -> None:
    """x *= factor in place, for a contiguous x, without a wait for the device."""
    if is_fake(x):
        return
    if use_kernels(x):
        programs = min(-(-x.numel() // SCALE_BLOCK), 8 * num_sms(x.device))  # few, which usually end at once
        with torch.cuda.device_of(x):
            _scale_kernel[(programs,)](x, factor, x.numel(), BLOCK=SCALE_BLOCK, num_warps=8)
    elif x.is_cuda or factor != 1:
        x.mul_(factor)
