"""The gradients of a head from the gradients by the statistics of its rows, by chunks of classes.

Per chunk one GEMM computes the logits, `gradient_in_place` replaces them by their gradient, and one GEMM for each
gradient that is needed follows. The gradient of the chunk's rows of the weight is complete at once. So only the
gradient of the hidden states, the smaller one, is summed over chunks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ligermodels.ops.loss.chunks import GradientSum, empty_gradients, logits_into, rows_per_chunk
from ligermodels.ops.loss.kept_logits import KeptLogits
from ligermodels.ops.loss.row_statistics import bytes_per_logit, gradient_in_place
from ligermodels.ops.loss.token_losses import LogitRows, LossOptions, RowGradients
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import custom_op, is_fake
from ligermodels.ops.runtime.tensors import as_rows

MIN_CLASSES = 128  # of a chunk, whatever they need: a tile of the GEMMs; and whole bytes of dropped bits


@custom_op()
def linear_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, maxima: Tensor, totals: Tensor,
    entropies: Tensor | None, dlosses: Tensor, dentropies: Tensor | None, dlses: Tensor | None, dmeans: Tensor | None,
    class_weights: Tensor | None, ignore_index: int, softcap: float | None, logit_scale: float, memory_budget: int,
    needs: Sequence[bool], inverse_temperatures: Tensor | None = None, dropped_bits: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """The gradients of hidden, weight and bias.

    Args:
        hidden: (..., H).
        weight: (V, H).
        bias: (V,), or None.
        target: int64 (...), checked.
        maxima: (...), as the following two see `LogitRows`.
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
        inverse_temperatures: (...), as the following see `LogitRows`.
        dropped_bits: (..., bytes), or None.

    Returns:
        The three gradients, without elements where not needed.
    """
    gradients = empty_gradients(hidden, weight, bias, needs)
    if not is_fake(hidden):
        options = LossOptions(ignore_index, softcap=softcap, logit_scale=logit_scale)
        rows = LogitRows(
            target, entropies=entropies, maxima=maxima, totals=totals, inverse_temperatures=inverse_temperatures,
            dropped_bits=dropped_bits,
        )  # fmt: skip
        row_gradients = RowGradients(dlosses, dentropies, dlses, dmeans)
        size = classes_per_chunk(as_rows(hidden), weight, options, memory_budget, needs[0])
        kept = KeptLogits.none(weight, size)
        fill_gradients(gradients, hidden, weight, bias, rows, row_gradients, class_weights, options, kept)
    return gradients


def fill_gradients(
    gradients: Sequence[Tensor], hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: LogitRows,
    row_gradients: RowGradients, class_weights: Tensor | None, options: LossOptions, kept: KeptLogits,
) -> None:  # fmt: skip
    """Fills the gradients of hidden, weight and bias by chunks of classes.

    Args:
        gradients: memory for the three gradients, see `empty_gradients`.
        hidden: (..., H).
        weight: (V, H).
        bias: (V,), or None.
        rows: of `hidden`, see `gradient_in_place`.
        row_gradients: the gradients by the statistics, (...).
        class_weights: (V,), or None.
        options: the options of the loss.
        kept: logits that the forward pass has kept, which are overwritten; the other logits are recomputed. `kept.size`
            is the number of classes of a chunk.
    """
    dx, dw, db = (g if g.numel() else None for g in gradients)
    x, V, size = as_rows(hidden), len(weight), kept.size
    row_gradients = row_gradients.flat()
    dx_sum = None if dx is None else GradientSum(dx.view(-1, dx.shape[-1]), several=size < V)
    workspace = None
    if len(kept.apart) < len(x) or size < V:
        workspace = hidden.new_empty(len(x) * size)
    for first in range(0, V, size):
        classes = slice(first, min(first + size, V))
        logits = kept.apart if workspace is None else _as_logits(workspace, len(x), classes.stop - first, size)
        blocks: list[tuple[slice, Tensor | None]] = [*kept.blocks(classes)]
        if kept.num_rows < len(x):
            rest = slice(kept.num_rows, len(x))
            logits_into(logits[rest], x[rest], weight[classes], None if bias is None else bias[classes])
            blocks.append((rest, None))
        for chunk, block in blocks:
            gradient_in_place(
                logits[chunk], rows.chunk(chunk), row_gradients.chunk(chunk), options, class_weights=class_weights,
                first=first, num_classes=V, kept=block,
            )  # fmt: skip
        if dx_sum is not None:
            dx_sum.add(logits.t(), weight[classes])
        if dw is not None:
            torch.mm(logits.t(), x, out=dw[classes])
        if db is not None:
            db[classes] = logits.sum(0, dtype=torch.promote_types(logits.dtype, torch.float32))
    if dx_sum is not None:
        dx_sum.close()


def _as_logits(workspace: Tensor, num_rows: int, num_classes: int, size: int) -> Tensor:
    """Memory for logits (num_rows, num_classes) in a workspace for `size` classes. Rows as wide as the workspace are
    aligned on CUDA; GEMMs of the CPU may read the gaps between them."""
    if workspace.is_cuda:
        return workspace.view(-1, size)[:, :num_classes]
    return workspace[: num_rows * num_classes].view(-1, num_classes)


def gradients_from_kept(
    kept: KeptLogits, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: LogitRows, row_gradients: RowGradients,
    class_weights: Tensor | None, options: LossOptions, needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """The gradients of hidden, weight and bias, from kept logits as far as there are any.

    Args:
        kept: the kept logits, which are overwritten; the gradient of weight is in the memory of `kept.dw`.
        hidden: (..., H), and the following arguments as `fill_gradients` takes them.
        weight: (V, H).
        bias: (V,), or None.
        rows: of `hidden`.
        row_gradients: the gradients by the statistics, (...).
        class_weights: (V,), or None.
        options: the options of the loss.
        needs: whether the gradients of hidden, weight and bias are needed.
    """
    dx, dw, db = empty_gradients(hidden, weight, bias, (needs[0], needs[1] and not kept.inside, needs[2]))
    gradients = [dx, kept.dw if kept.inside else dw, db]
    fill_gradients(gradients, hidden, weight, bias, rows, row_gradients, class_weights, options, kept)
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
