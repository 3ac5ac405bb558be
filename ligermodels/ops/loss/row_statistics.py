"""Statistics of each row of logits, and gradients in place of the logits: by the Triton kernels, or in torch.

With effective logits x (head of `token_losses`), p = softmax(x) and lse = log sum exp x, the statistics of a row have
by x_j the gradients

    -log p_y: p_j - [j = y]        entropy: -p_j (log p_j + entropy)        lse: p_j        mean of w_j x_j: w_j / V

each times the slope of x_j by the logit. The gradient of a loss with label smoothing and a z-loss is their sum.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.ops.loss.sampler import dropped_classes
from ligermodels.ops.loss.token_losses import UNUSED, LogitRows, LossOptions, RowGradients, RowOutputs
from ligermodels.ops.loss.token_losses_kernels import launch_gradient, launch_rows
from ligermodels.ops.runtime.dispatch import set_batch_invariant, use_kernels

VANISHED = -1000.0  # exp of it is 0, in float64 too


def rows_in_place(logits: Tensor, rows: LogitRows, options: LossOptions, class_weights: Tensor | None = None) -> None:
    """Fills the statistics of rows of logits, and replaces the logits by the gradient of the weighted loss.

    In torch this needs `bytes_per_logit` beside each logit, and overwrites the logits in any case.

    Args:
        logits: (M, V), the last dimension contiguous.
        rows: the targets, checked; the weights, if the gradient is needed; memory (M,) for the requested statistics;
            and the sampler, which excludes label smoothing and means.
        options: the options of the loss.
        class_weights: (V,), the dtype of the losses, for the means; these exclude label smoothing.
    """
    if use_kernels(logits):
        launch_rows(logits, rows, options, class_weights)
    elif set_batch_invariant.value and len(logits) > 1:
        # Torch sums a single long row by several threads, and several rows by one each.
        for row in range(len(logits)):
            only = slice(row, row + 1)
            rows_in_place(logits[only], rows.chunk(only), options, class_weights)
    elif options.are_plain and rows.have_losses_alone:
        _plain_losses(logits, rows, options)
    else:
        _statistics(logits, rows, options, class_weights)


def _plain_losses(logits: Tensor, rows: LogitRows, options: LossOptions) -> None:
    """-log p_y, and its gradient p_j - [j = y] times the weight of the row."""
    ignored = (rows.target == options.ignore_index).unsqueeze(1)
    y = rows.target.unsqueeze(1).masked_fill(ignored, 0)
    x = logits.to(rows.losses.dtype)
    x.sub_(x.amax(1, keepdim=True))
    p = x.exp()
    totals = p.sum(1, keepdim=True)
    losses = totals.log() - x.gather(1, y)
    rows.losses.copy_(losses.masked_fill_(ignored, 0.0).squeeze(1))
    if rows.weights is not None:
        weights = rows.weights.unsqueeze(1)
        gradient = p.mul_(weights / totals).scatter_add_(1, y, -weights)
        logits.copy_(gradient.masked_fill_(ignored, 0.0))


def _statistics(logits: Tensor, rows: LogitRows, options: LossOptions, class_weights: Tensor | None) -> None:
    """All statistics of rows, by any options."""
    V, smoothing, z_loss = logits.shape[1], options.label_smoothing, options.z_loss
    valid = rows.target != options.ignore_index
    y = torch.where(valid, rows.target, 0).unsqueeze(1)
    if rows.ranks is not None or rows.predicted is not None:
        _fill_indices(logits, rows, y, valid)
    x, slope = effective(logits.to(rows.losses.dtype), options, rows.inverse_temperatures)
    if rows.means is not None and class_weights is not None:
        rows.means.copy_((x @ class_weights).div_(V).masked_fill_(~valid, 0.0))
    if rows.dropped_bits is not None:
        x.masked_fill_(dropped_classes(rows.dropped_bits, 0, V), -torch.inf)
    maxima = x.amax(1).clamp(min=torch.finfo(x.dtype).min)  # a rank may keep none of its classes
    x.sub_(maxima.unsqueeze(1))
    at_y, mean = x.gather(1, y).squeeze(1), x.mean(1) if smoothing else 0.0
    below = x.clamp_(min=VANISHED)  # -inf times its exp would be NaN
    totals = below.exp().sum(1)
    log_totals = totals.log()
    lses = maxima + log_totals
    losses = log_totals - (1 - smoothing) * at_y - smoothing * mean + z_loss * lses.square()
    if rows.dropped_bits is not None:
        losses.masked_fill_(at_y.isneginf(), torch.inf)  # NaN where all classes are dropped
    rows.losses.copy_(losses.masked_fill_(~valid, 0.0))
    if rows.entropies is not None:
        rows.entropies.copy_((log_totals - below.exp().mul_(below).sum(1) / totals).masked_fill_(~valid, 0.0))
    if rows.maxima is not None and rows.totals is not None:
        rows.maxima.copy_(maxima.masked_fill(~valid, 0.0))
        rows.totals.copy_(totals.masked_fill(~valid, 1.0))
    if rows.weights is not None:
        w = rows.weights
        gradients = RowGradients(
            (1 - smoothing) * w, lses=(smoothing + 2 * z_loss * lses) * w, means=-smoothing * w if smoothing else None
        )
        _write_gradient(logits, below, slope, rows._replace(totals=totals), gradients, options, None, 0, V)


def _fill_indices(logits: Tensor, rows: LogitRows, y: Tensor, valid: Tensor) -> None:
    """Fills the requested ranks of the classes y (M, 1) and predicted classes; -1 in rows that are not valid (M,)."""
    if rows.ranks is not None:
        rows.ranks.copy_(ranks_reference(logits, y, valid))
    if rows.predicted is not None:
        rows.predicted.copy_(logits.argmax(1).masked_fill_(~valid, -1))


def gradient_in_place(
    logits: Tensor, rows: LogitRows, gradients: RowGradients, options: LossOptions, *,
    class_weights: Tensor | None = None, first: int = 0, num_classes: int, kept: Tensor | None = None,
) -> None:  # fmt: skip
    """Replaces the logits of some classes by the gradient of the statistics of their rows; by 0 in ignored rows.

    In torch this needs `bytes_per_logit` beside each logit.

    Args:
        logits: (M, n), of the classes from `first` on.
        rows: the targets, checked; maxima and totals of whole rows, (M,), and entropies if these have a gradient; and
            the sampler.
        gradients: the gradients by the statistics, (M,), contiguous.
        options: the options of the loss, without label smoothing and z-loss.
        class_weights: (num_classes,), of the means.
        first: the first class of `logits`.
        num_classes: the number of all classes.
        kept: the logits, (M, n), the last dimension contiguous, if `logits` is only memory for the gradient. In torch
            they are overwritten.
    """
    source = logits if kept is None else kept
    if use_kernels(logits):
        launch_gradient(source, logits, rows, gradients, options, class_weights, first, num_classes)
        return
    x, slope = effective(source.to(rows.maxima.dtype), options, rows.inverse_temperatures)
    below = x.sub_(rows.maxima.unsqueeze(1)).clamp_(min=VANISHED)
    weights = None if class_weights is None else class_weights[first : first + logits.shape[1]]
    _write_gradient(logits, below, slope, rows, gradients, options, weights, first, num_classes)


def _write_gradient(
    logits: Tensor, below: Tensor, slope: Tensor | None, rows: LogitRows, gradients: RowGradients, options: LossOptions,
    class_weights: Tensor | None, first: int, num_classes: int,
) -> None:  # fmt: skip
    """Replaces logits (M, n) by their gradient, from below = x - maximum, which is overwritten.

    slope: of x by the scaled logits, see `effective`. class_weights: (n,), of the means; None for ones."""
    factors = gradients.losses if gradients.lses is None else gradients.losses + gradients.lses
    if gradients.entropies is None or rows.entropies is None:
        g = below.exp_().mul_((factors / rows.totals).unsqueeze(1))
    else:
        factors = factors + gradients.entropies * (rows.totals.log() - rows.entropies)
        g = below.exp()
        g.mul_(below.mul_(-gradients.entropies.unsqueeze(1)).add_(factors.unsqueeze(1)))
        g.div_(rows.totals.unsqueeze(1))
    y = rows.target - first
    inside = (y >= 0) & (y < g.shape[1])
    g.scatter_add_(1, torch.where(inside, y, 0).unsqueeze(1), torch.where(inside, -gradients.losses, 0.0).unsqueeze(1))
    if gradients.means is not None:
        means = (gradients.means / num_classes).unsqueeze(1)
        g.add_(means) if class_weights is None else g.addcmul_(means, class_weights)
    if slope is not None:
        g.mul_(slope)
    if rows.dropped_bits is not None:
        g.masked_fill_(dropped_classes(rows.dropped_bits, first, g.shape[1]), 0.0)
    ignored = (rows.target == options.ignore_index).unsqueeze(1)
    logits.copy_(g.mul_(options.logit_scale).masked_fill_(ignored, 0.0))


def pack_results(ctx: Any, rows: LogitRows, outputs: RowOutputs) -> tuple[Tensor, ...]:
    """The results of an autograd.Function: the packed statistics, without maxima and totals, and the log masses if any.

    Args:
        ctx: the context of the autograd.Function; integers and log masses are marked non-differentiable.
        rows: the statistics; lses are dropped if they are not among the outputs.
        outputs: the requested statistics.
    """
    ctx.set_materialize_grads(False)  # None marks results that the loss does not use
    ctx.mark_non_differentiable(*(x for x in (rows.ranks, rows.predicted, rows.log_masses) if x is not None))
    lses = rows.lses if outputs.lses else None
    results = rows._replace(lses=lses, maxima=UNUSED, totals=UNUSED).pack()
    return tuple(results if rows.log_masses is None else [*results, rows.log_masses])


def unpack_gradients(outputs: RowOutputs, rows: LogitRows, gradients: Sequence[Tensor | None]) -> RowGradients:
    """The gradients that the backward pass after `pack_results` receives, (...).

    Args:
        outputs: the requested statistics.
        rows: the rows that were packed.
        gradients: by the packed results; None for 0.
    """
    by = LogitRows.unpack(rows.target, gradients[: 1 + sum(outputs)], outputs)
    losses = torch.zeros_like(rows.maxima) if by.losses is None else by.losses
    return RowGradients(losses, by.entropies, by.lses, by.means)


def bytes_per_logit(dtype: torch.dtype, options: LossOptions, ranks: bool = False) -> int:
    """Bytes that torch needs for each logit beside the logit itself.

    One buffer of at least float32 for exponentials, one for the copy of a 16-bit logit, one for the slope of a softcap.

    Args:
        dtype: of the logits.
        options: `softcap` is used.
        ranks: whether ranks are computed; they need booleans and a cast of these to int32.
    """
    wide = max(dtype.itemsize, 4)
    return max((1 + (wide > dtype.itemsize) + (options.softcap is not None)) * wide, 8 if ranks else 0)


def effective(x: Tensor, options: LossOptions, inverse_temperatures: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Effective logits over the temperature, in the memory of the logits, and their slope by the scaled logits.

    Args:
        x: logits (M, n), at least float32.
        options: `softcap` and `logit_scale` are used.
        inverse_temperatures: (M,), or None.

    Returns:
        (M, n); and the slope, (M, n) or (M, 1), or None for 1.
    """
    x, slope = x.mul_(options.logit_scale), None
    if options.softcap is not None:
        tanh = x.div_(options.softcap).tanh_()
        x, slope = tanh * options.softcap, tanh.square_().neg_().add_(1)
    if inverse_temperatures is not None:
        factors = inverse_temperatures.unsqueeze(1)
        x, slope = x.mul_(factors), factors if slope is None else slope.mul_(factors)
    return x, slope


def row_statistics_reference(
    logits: Tensor, target: Tensor, options: LossOptions, outputs: RowOutputs, class_weights: Tensor | None = None
) -> LogitRows:
    """The requested statistics in plain torch, differentiable.

    Args:
        logits: (..., V).
        target: int64 (...), checked.
        options: the options of the loss.
        outputs: the requested statistics, without entropies.
        class_weights: (V,), of the means, if these are requested.
    """
    valid = target != options.ignore_index
    x = effective_logits(logits, valid, options)
    y = torch.where(valid, target, 0).unsqueeze(-1)
    log_p = torch.log_softmax(x, dim=-1)
    losses = -(1 - options.label_smoothing) * log_p.gather(-1, y).squeeze(-1)
    if options.label_smoothing:
        losses = losses - options.label_smoothing * log_p.mean(-1)
    if options.z_loss:
        losses = losses + options.z_loss * torch.logsumexp(x, dim=-1).square()
    return LogitRows(
        target,
        torch.where(valid, losses, 0.0),
        ranks_reference(logits, y, valid) if outputs.ranks else None,
        torch.where(valid, logits.argmax(-1), -1) if outputs.predicted else None,
        lses=torch.where(valid, torch.logsumexp(x, -1), 0.0) if outputs.lses else None,
        means=None if class_weights is None else (x * class_weights).mean(-1),
    )


def effective_logits(logits: Tensor, valid: Tensor, options: LossOptions) -> Tensor:
    """Logits (..., V) scaled and softcapped, at least float32; 0 in rows that are not valid (...), even if NaN.

    Args:
        logits: (..., V).
        valid: bool (...).
        options: `softcap` and `logit_scale` are used.
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)) * options.logit_scale
    if options.softcap is not None:
        x = options.softcap * torch.tanh(x / options.softcap)
    return x.masked_fill(~valid.unsqueeze(-1), 0.0)


def ranks_reference(logits: Tensor, y: Tensor, valid: Tensor) -> Tensor:
    """The number of classes that rank before class y (..., 1) in logits (..., V); -1 in rows not valid (...)."""
    at_y = logits.gather(-1, y)
    before = (logits > at_y) | ((logits == at_y) & (torch.arange(logits.shape[-1], device=y.device) < y))
    return torch.where(valid, before.sum(-1, dtype=torch.int32).long(), -1)
