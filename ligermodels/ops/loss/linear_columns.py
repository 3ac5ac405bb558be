"""The gradients of the numbers of rows whose log-sum-exps are known, by chunks of classes.

Per chunk one GEMM for the logits, whose gradient takes their place, and one GEMM for each gradient that is needed. That
of the weight's rows is complete at once, so that only the gradient of the hidden states, the smaller one, is summed
over chunks.
"""

import torch
from torch import Tensor

from ligermodels.ops.loss.chunks import rows_per_chunk, rows_with_targets
from ligermodels.ops.loss.columns_in_place import Gradients, columns_in_place
from ligermodels.ops.loss.gradient_sum import GradientSum
from ligermodels.ops.loss.rows_in_place import bytes_per_logit
from ligermodels.ops.loss.token_losses import LossOptions
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import custom_op, is_fake
from ligermodels.ops.runtime.tensors import as_rows, empty_gradient

COLUMNS = 128  # a chunk's at least, whatever they need: a tile of the GEMMs


@custom_op()
def linear_columns(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, maxima: Tensor, totals: Tensor,
    entropies: Tensor | None, of_losses: Tensor, of_entropies: Tensor | None, of_lses: Tensor | None,
    of_means: Tensor | None, class_weights: Tensor | None, ignore_index: int, softcap: float | None,
    logit_scale: float, memory_budget: int, num_targets: int, need_hidden: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of hidden, weight and bias, empty if not needed, from those of the numbers of each row.

    maxima, totals: see `RowResults`; entropies where these have a gradient; all of target's shape, as are gradients.
    class_weights: (V,), of the means. Targets have been checked."""
    dw, db = (empty_gradient(t, need, hidden) for t, need in ((weight, need_weight), (bias, need_bias)))
    if is_fake(hidden):
        return empty_gradient(hidden, need_hidden, hidden), dw, db
    options = LossOptions(ignore_index, softcap=softcap, logit_scale=logit_scale)
    chosen = rows_with_targets(target.reshape(-1), num_targets, ignore_index)

    def take(numbers: Tensor) -> Tensor:
        numbers = numbers.reshape(-1)
        return numbers.contiguous() if chosen is None else numbers[chosen]

    x = as_rows(hidden) if chosen is None else as_rows(hidden)[chosen]
    targets, maximum, total, of_loss = (take(t) for t in (target, maxima, totals, of_losses))
    entropy, *others = (None if t is None else take(t) for t in (entropies, of_entropies, of_lses, of_means))
    T, V, H = len(x), *weight.shape
    size = columns_per_chunk(T, V, H, hidden, options, of_entropies is not None, memory_budget, need_hidden)
    dx = GradientSum(x, several=size < V) if need_hidden else None
    workspace = hidden.new_empty(T, size)
    for first in range(0, V, size):
        some = slice(first, min(first + size, V))
        n = some.stop - first
        # CPU GEMMs may read the gaps between rows that are wider than the chunk.
        logits = workspace[:, :n] if hidden.is_cuda else workspace.view(-1)[: T * n].view(T, n)
        if bias is None:
            torch.mm(x, weight[some].t(), out=logits)
        else:
            torch.addmm(bias[some], x, weight[some].t(), out=logits)
        columns_in_place(
            logits, first, targets, maximum, total, entropy, Gradients(of_loss, *others), options, class_weights, V
        )
        if dx is not None:
            dx.add(logits.t(), weight[some])
        if need_weight:
            torch.mm(logits.t(), x, out=dw[some])
        if need_bias:
            db[some] = logits.sum(0, dtype=torch.promote_types(logits.dtype, torch.float32))
    if dx is None:
        return hidden.new_empty(0), dw, db
    if chosen is None:
        return dx.close().view(hidden.shape), dw, db
    whole = hidden.new_zeros(hidden.shape)
    whole.view(-1, H)[chosen] = dx.close()
    return whole, dw, db


def columns_per_chunk(
    T: int, V: int, H: int, hidden: Tensor, options: LossOptions, with_entropy: bool, memory_budget: int, need_sum: bool
) -> int:  # fmt: skip
    """Classes per chunk, see `rows_per_chunk`. need_sum: whether the gradient of hidden is summed over chunks."""
    item, wide = hidden.dtype.itemsize, max(hidden.dtype.itemsize, 4)
    beside = 0 if use_kernels(hidden) else T * bytes_per_logit(hidden.dtype, options, with_entropy)
    if need_sum and not hidden.is_cuda and wide > item:  # see GradientSum
        beside = max(beside, (T + H) * wide)
    size = rows_per_chunk(V, T * item + beside, T * H * item if need_sum and wide > item else 0, memory_budget)
    return max(size, min(V, COLUMNS))
