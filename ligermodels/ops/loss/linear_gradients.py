"""The gradients of a head from the gradients by the statistics of its rows, by chunks of classes.

Per chunk one GEMM computes the logits, `gradient_in_place` replaces them by their gradient, and one GEMM for each
gradient that is needed follows. The gradient of the chunk's rows of the weight is complete at once. So only the
gradient of the hidden states, the smaller one, is summed over chunks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ligermodels.ops.loss.chunks import empty_gradients, rows_per_chunk
from ligermodels.ops.loss.gradient_sum import GradientSum
from ligermodels.ops.loss.row_statistics import RowGradients, bytes_per_logit, gradient_in_place
from ligermodels.ops.loss.token_losses import LossOptions
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import custom_op, is_fake
from ligermodels.ops.runtime.tensors import as_rows

MIN_CLASSES = 128  # of a chunk, whatever they need: a tile of the GEMMs


@custom_op()
def linear_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, maxima: Tensor, totals: Tensor,
    entropies: Tensor | None, dlosses: Tensor, dentropies: Tensor | None, dlses: Tensor | None, dmeans: Tensor | None,
    class_weights: Tensor | None, ignore_index: int, softcap: float | None, logit_scale: float, memory_budget: int,
    needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """The gradients of hidden, weight and bias.

    Args:
        hidden: (..., H).
        weight: (V, H).
        bias: (V,), or None.
        target: int64 (...), checked.
        maxima: (...), as the following two see `RowStatistics`.
        totals: (...).
        entropies: (...), if these have a gradient.
        dlosses: (...), the gradient by -log p_y.
        dentropies: (...), the gradient by the entropies, or None.
        dlses: (...), the gradient by the log-sum-exps, or None.
        dmeans: (...), the gradient by the means, or None.
        class_weights: (V,), of the means.
        ignore_index: the target of ignored rows.
        softcap: positive, or None.
        logit_scale: positive.
        memory_budget: bytes for a chunk.
        needs: whether the gradients of hidden, weight and bias are needed.

    Returns:
        The three gradients, without elements where not needed.
    """
    gradients = empty_gradients(hidden, weight, bias, needs)
    if is_fake(hidden):
        return gradients
    dx, dw, db = (g if need else None for g, need in zip(gradients, needs, strict=True))
    options = LossOptions(ignore_index, softcap=softcap, logit_scale=logit_scale)
    row_gradients = RowGradients(dlosses, dentropies, dlses, dmeans).flat()
    maxima, totals = maxima.view(-1), totals.view(-1)
    entropies = None if entropies is None else entropies.view(-1)
    x, y, V = as_rows(hidden), target.flatten(), len(weight)
    size = classes_per_chunk(x, weight, options, memory_budget, needs[0])
    dx_sum = None if dx is None else GradientSum(dx.view(-1, dx.shape[-1]), several=size < V)
    workspace = hidden.new_empty(len(x) * size)
    for first in range(0, V, size):
        classes = slice(first, min(first + size, V))
        n = classes.stop - first
        # Rows as wide as the workspace are aligned on CUDA. CPU GEMMs may read the gaps between them.
        logits = workspace.view(-1, size)[:, :n] if hidden.is_cuda else workspace[: len(x) * n].view(-1, n)
        if bias is None:
            torch.mm(x, weight[classes].t(), out=logits)
        else:
            torch.addmm(bias[classes], x, weight[classes].t(), out=logits)
        gradient_in_place(
            logits, y, maxima, totals, row_gradients, options, entropies=entropies, class_weights=class_weights,
            first=first, num_classes=V,
        )  # fmt: skip
        if dx_sum is not None:
            dx_sum.add(logits.t(), weight[classes])
        if dw is not None:
            torch.mm(logits.t(), x, out=dw[classes])
        if db is not None:
            db[classes] = logits.sum(0, dtype=torch.promote_types(logits.dtype, torch.float32))
    if dx_sum is not None:
        dx_sum.close()
    return gradients


def classes_per_chunk(x: Tensor, weight: Tensor, options: LossOptions, memory_budget: int, need_hidden: bool) -> int:
    """The number of classes of a chunk, see `rows_per_chunk`.

    Args:
        x: (T, H).
        weight: (V, H).
        options: `softcap` is used.
        memory_budget: bytes for a chunk.
        need_hidden: whether the gradient of x is summed over chunks.
    """
    (T, H), item = x.shape, x.element_size()
    widened = need_hidden and item < 4
    beside = 0 if use_kernels(x) else T * bytes_per_logit(x.dtype, options)
    if widened and not x.is_cuda:  # on the CPU GradientSum casts its operands
        beside = max(beside, (T + H) * 4)
    size = rows_per_chunk(len(weight), T * item + beside, T * H * item if widened else 0, memory_budget)
    return max(size, min(len(weight), MIN_CLASSES))
