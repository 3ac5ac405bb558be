"""Statistics of each row of logits, and gradients in place of the logits: by the Triton kernels, or in torch.

With effective logits x (head of `token_losses`), p = softmax(x) and lse = log sum exp x, the statistics of a row have
by x_j the gradients

    -log p_y: p_j - [j = y]        entropy: -p_j (log p_j + entropy)        lse: p_j        mean of w_j x_j: w_j / V

each times the slope of x_j by the logit. The gradient of a loss with label smoothing and a z-loss is their sum.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.ops.loss.sampler import NO_SAMPLER, RowSampler
from ligermodels.ops.loss.token_losses import LossOptions
from ligermodels.ops.loss.token_losses_kernels import launch_gradient, launch_rows
from ligermodels.ops.runtime.dispatch import use_kernels

VANISHED = -1000.0  # exp of it is 0, in float64 too


class RowOutputs(NamedTuple):
    """The statistics that are requested beside the losses, in the order of `RowStatistics`."""

    ranks: bool = False
    predicted: bool = False
    entropies: bool = False
    lses: bool = False
    means: bool = False


class RowStatistics(NamedTuple):
    """Statistics of each row, of the target's shape; None if not requested.

    Ignored rows have ranks and predicted classes -1, totals 1, and 0 otherwise. The log-sum-exp is maximum +
    log(total). Kernels use these two, because their sum loses the digits of a small loss beside large logits.
    """

    losses: Tensor
    ranks: Tensor | None = None  # number of classes that rank before the target, see `cross_entropy`
    predicted: Tensor | None = None  # class of the largest logit, the first one of equal logits
    entropies: Tensor | None = None  # of softmax(x)
    lses: Tensor | None = None  # log sum exp x
    means: Tensor | None = None  # mean over the classes of class_weights * x
    maxima: Tensor | None = None  # of x; requested with lses
    totals: Tensor | None = None  # sum exp(x - maximum); requested with lses

    @classmethod
    def empty(cls, target: Tensor, dtype: torch.dtype, outputs: RowOutputs) -> "RowStatistics":
        """Uninitialised statistics for targets (...).

        Args:
            target: int64 (...); gives shape and device.
            dtype: of the statistics that are not integers.
            outputs: the requested statistics.
        """
        requested = (True, *outputs, outputs.lses, outputs.lses)
        dtypes = (dtype, torch.int64, torch.int64, *[dtype] * 5)
        fields: Any = [
            target.new_empty(target.shape, dtype=field) if needed else None
            for needed, field in zip(requested, dtypes, strict=True)
        ]
        return cls(*fields)

    def pack(self) -> list[Tensor]:
        """The tensors that are not None, in order: the results of registered ops and autograd.Functions."""
        return [x for x in self if x is not None]

    @classmethod
    def unpack(cls, tensors: Iterable[Tensor], outputs: RowOutputs) -> "RowStatistics":
        """The statistics from packed tensors; maxima and totals if the tensors have them."""
        remaining = list(tensors)
        fields: Any = [remaining.pop(0) if requested else None for requested in (True, *outputs)]
        return cls(*fields, *remaining)

    def rows(self, chunk: slice) -> "RowStatistics":
        """Views of some rows, each flat."""
        fields: Any = [None if x is None else x.view(-1)[chunk] for x in self]
        return RowStatistics(*fields)

    def fill_lses(self) -> None:
        """Computes the log-sum-exps, if requested, from maxima and totals."""
        if self.lses is not None and self.maxima is not None and self.totals is not None:
            torch.add(self.maxima, self.totals.log(), out=self.lses)


class RowGradients(NamedTuple):
    """The gradients by the statistics of each row, (M,); None for 0. `losses`: by -log p_y."""

    losses: Tensor
    entropies: Tensor | None = None
    lses: Tensor | None = None
    means: Tensor | None = None

    def flat(self) -> "RowGradients":
        """Contiguous gradients (M,) from gradients (...)."""
        gradients: Any = [None if g is None else g.reshape(-1).contiguous() for g in self]
        return RowGradients(*gradients)

    def rows(self, chunk: slice) -> "RowGradients":
        """Views of some rows of flat gradients."""
        gradients: Any = [None if g is None else g[chunk] for g in self]
        return RowGradients(*gradients)


def pack_results(
    ctx: Any, rows: RowStatistics, outputs: RowOutputs, log_masses: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The results of an autograd.Function: the packed statistics, without maxima and totals, and the log masses if any.

    Args:
        ctx: the context of the autograd.Function; integers are marked non-differentiable.
        rows: the statistics; lses are dropped if they are not among the outputs.
        outputs: the requested statistics.
        log_masses: of `RowSampler`, or None.
    """
    ctx.set_materialize_grads(False)  # None marks results that the loss does not use
    ctx.mark_non_differentiable(*(x for x in (rows.ranks, rows.predicted, log_masses) if x is not None))
    packed = rows._replace(lses=rows.lses if outputs.lses else None, maxima=None, totals=None).pack()
    return tuple(packed if log_masses is None else [*packed, log_masses])


def unpack_gradients(outputs: RowOutputs, maxima: Tensor, gradients: Sequence[Tensor]) -> RowGradients:
    """The gradients that the backward pass after `pack_results` receives, (...).

    Args:
        outputs: the requested statistics.
        maxima: (...), the shape of a gradient of the losses that is None.
        gradients: by the packed results.
    """
    by = RowStatistics.unpack(gradients, outputs)
    losses = torch.zeros_like(maxima) if by.losses is None else by.losses
    return RowGradients(losses, by.entropies, by.lses, by.means)


def rows_in_place(
    logits: Tensor, target: Tensor, statistics: RowStatistics, options: LossOptions,
    loss_weights: Tensor | None = None, class_weights: Tensor | None = None, sampler: RowSampler = NO_SAMPLER,
) -> None:  # fmt: skip
    """Fills the statistics of rows of logits, and replaces the logits by the gradient of the weighted loss.

    In torch this needs `bytes_per_logit` beside each logit, and overwrites the logits in any case.

    Args:
        logits: (M, V), the last dimension contiguous.
        target: int64 (M,), checked.
        statistics: fields (M,); those that are None are not computed.
        options: the options of the loss.
        loss_weights: (M,), the dtype of the losses; None: no gradient is needed.
        class_weights: (V,), the dtype of the losses, for the means; these exclude label smoothing.
        sampler: the temperature and the kept classes, fields (M,). These exclude label smoothing and means.
    """
    if use_kernels(logits):
        launch_rows(
            logits, target, statistics, options, loss_weights=loss_weights, class_weights=class_weights,
            sampler=sampler,
        )  # fmt: skip
        return
    valid = target != options.ignore_index
    y = torch.where(valid, target, 0).unsqueeze(1)
    if statistics.ranks is not None:
        statistics.ranks.copy_(ranks_reference(logits, y, valid))
    if statistics.predicted is not None:
        statistics.predicted.copy_(logits.argmax(1).masked_fill_(~valid, -1))
    dropped = sampler.dropped(0, logits.shape[1])
    x, slope = effective(logits.to(statistics.losses.dtype), options, sampler.inverse_temperatures)
    if statistics.means is not None and class_weights is not None:
        statistics.means.copy_((x @ class_weights).div_(x.shape[1]).masked_fill_(~valid, 0.0))
    if dropped is not None:
        x.masked_fill_(dropped, -torch.inf)
    maxima = x.amax(1).clamp(min=torch.finfo(x.dtype).min)  # a rank may keep none of its classes
    x.sub_(maxima.unsqueeze(1))
    at_y, mean = x.gather(1, y).squeeze(1), x.mean(1) if options.label_smoothing else 0.0
    below = x.clamp_(min=VANISHED)  # -inf times its exp would be NaN
    exps = below.exp()
    totals = exps.sum(1)
    log_totals = totals.log()
    lses = maxima + log_totals
    smoothing, z_loss = options.label_smoothing, options.z_loss
    losses = log_totals - (1 - smoothing) * at_y - smoothing * mean + z_loss * lses.square()
    if dropped is not None:
        losses.masked_fill_(dropped.gather(1, y).squeeze(1), torch.inf)
    statistics.losses.copy_(losses.masked_fill_(~valid, 0.0))
    if statistics.entropies is not None:
        statistics.entropies.copy_((log_totals - exps.mul_(below).sum(1) / totals).masked_fill_(~valid, 0.0))
    if statistics.maxima is not None and statistics.totals is not None:
        statistics.maxima.copy_(maxima.masked_fill(~valid, 0.0))
        statistics.totals.copy_(totals.masked_fill(~valid, 1.0))
    del exps  # its memory is free for the gradient
    if loss_weights is not None:
        gradients = RowGradients((1 - smoothing) * loss_weights, lses=(smoothing + 2 * z_loss * lses) * loss_weights)
        if smoothing:
            gradients = gradients._replace(means=-smoothing * loss_weights)
        g = _gradient(below, y.squeeze(1), totals, None, gradients, None, x.shape[1])
        _write(g, slope, valid, options, sampler.inverse_temperatures, dropped, logits)


def gradient_in_place(
    logits: Tensor, target: Tensor, maxima: Tensor, totals: Tensor, gradients: RowGradients, options: LossOptions, *,
    entropies: Tensor | None = None, class_weights: Tensor | None = None, first: int = 0, num_classes: int,
    kept: Tensor | None = None, sampler: RowSampler = NO_SAMPLER,
) -> None:  # fmt: skip
    """Replaces the logits of some classes by the gradient of the statistics of their rows; by 0 in ignored rows.

    In torch this needs `bytes_per_logit` beside each logit.

    Args:
        logits: (M, n), of the classes from `first` on.
        target: int64 (M,), checked.
        maxima: of whole rows, (M,), see `RowStatistics`.
        totals: of whole rows, (M,).
        gradients: the gradients by the statistics, (M,), contiguous.
        options: the options of the loss, without label smoothing and z-loss.
        entropies: of whole rows, (M,), if these have a gradient.
        class_weights: (num_classes,), of the means.
        first: the first class of `logits`.
        num_classes: the number of all classes.
        kept: the logits, (M, n), the last dimension contiguous, if `logits` is only memory for the gradient. For the
            kernels alone.
        sampler: the temperature and the kept classes, fields (M,).
    """
    if use_kernels(logits):
        launch_gradient(
            logits if kept is None else kept, logits, target, maxima, totals, gradients, options, entropies=entropies,
            class_weights=class_weights, first=first, num_classes=num_classes, sampler=sampler,
        )  # fmt: skip
        return
    n = logits.shape[1]
    dropped = sampler.dropped(first, n)
    x, slope = effective(logits.to(maxima.dtype), options, sampler.inverse_temperatures)
    below = x.sub_(maxima.unsqueeze(1)).clamp_(min=VANISHED)
    weights = None if class_weights is None else class_weights[first : first + n]
    g = _gradient(below, target - first, totals, entropies, gradients, weights, num_classes)
    valid = target != options.ignore_index
    _write(g, slope, valid, options, sampler.inverse_temperatures, dropped, logits)


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
    """Effective logits over the temperature, in the memory of the logits, and the slope of the softcap.

    Args:
        x: logits (M, n), at least float32.
        options: `softcap` and `logit_scale` are used.
        inverse_temperatures: (M,), or None.
    """
    slope = None
    x = x.mul_(options.logit_scale)
    if options.softcap is not None:
        tanh = x.div_(options.softcap).tanh_()
        x, slope = tanh * options.softcap, tanh.square_().neg_().add_(1)
    return x if inverse_temperatures is None else x.mul_(inverse_temperatures.unsqueeze(1)), slope


def _gradient(
    below: Tensor, y: Tensor, totals: Tensor, entropies: Tensor | None, gradients: RowGradients,
    class_weights: Tensor | None, num_classes: int,
) -> Tensor:  # fmt: skip
    """The gradient by x (M, n), from below = x - maximum, which is overwritten. y: columns of the targets, some of them
    outside of [0, n). class_weights: (n,), of the means; None for ones."""
    factors = gradients.losses if gradients.lses is None else gradients.losses + gradients.lses
    if gradients.entropies is not None and entropies is not None:
        factors = factors + gradients.entropies * (totals.log() - entropies)
        g = below.exp()
        g.mul_(below.mul_(-gradients.entropies.unsqueeze(1)).add_(factors.unsqueeze(1))).div_(totals.unsqueeze(1))
    else:
        g = below.exp_().mul_((factors / totals).unsqueeze(1))
    inside = (y >= 0) & (y < g.shape[1])
    g.scatter_add_(1, torch.where(inside, y, 0).unsqueeze(1), torch.where(inside, -gradients.losses, 0.0).unsqueeze(1))
    if gradients.means is not None:
        means = (gradients.means / num_classes).unsqueeze(1)
        g.add_(means) if class_weights is None else g.addcmul_(means, class_weights)
    return g


def _write(
    g: Tensor, slope: Tensor | None, valid: Tensor, options: LossOptions, inverse_temperatures: Tensor | None,
    dropped: Tensor | None, logits: Tensor,
) -> None:  # fmt: skip
    """Replaces logits by their gradient, from the gradient g by the effective logits over the temperature; by 0 in rows
    that are ignored and for classes that are dropped."""
    if slope is not None:
        g.mul_(slope)
    if inverse_temperatures is not None:
        g.mul_(inverse_temperatures.unsqueeze(1))
    if dropped is not None:
        g.masked_fill_(dropped, 0.0)
    logits.copy_(g.mul_(options.logit_scale).masked_fill_(~valid.unsqueeze(1), 0.0))


def row_statistics_reference(
    logits: Tensor, target: Tensor, options: LossOptions, outputs: RowOutputs, class_weights: Tensor | None = None
) -> RowStatistics:
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
    return RowStatistics(
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
