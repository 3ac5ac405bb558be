"""What the losses need of each row of logits, and its gradient in place of the logits: by the kernels, or in torch."""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.ops.loss.token_losses import LossOptions, ranks_reference
from ligermodels.ops.loss.token_losses_kernels import launch_rows
from ligermodels.ops.runtime.dispatch import use_kernels

VANISHED = -1000.0  # exp of it is 0, in float64 too


class RowResults(NamedTuple):
    """Numbers of each row, (M,): its loss, and what else is asked for, None (or empty) for what is not. Ignored rows
    have 0, totals of 1, and -1 for ranks and predicted classes. The log-sum-exp is the maximum + log(total); apart they
    keep the digits of a small difference of great logits."""

    losses: Tensor
    ranks: Tensor  # as in `cross_entropy`
    predicted: Tensor | None = None  # the class of the greatest logit, the first of equal ones
    entropies: Tensor | None = None  # of softmax(x), where x are the effective logits
    maxima: Tensor | None = None  # of x
    totals: Tensor | None = None  # sum exp (x - maximum)
    means: Tensor | None = None  # of class_weights * x over the classes


def rows_in_place(
    logits: Tensor, target: Tensor, found: RowResults, loss_weights: Tensor | None, options: LossOptions,
    class_weights: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills `found` from logits (M, V). Given loss_weights, (M,), the gradient of loss_weights * losses takes the place
    of the logits. Means, without label smoothing, are of class_weights, (V,), of losses' dtype.

    In torch this holds what `bytes_in_torch` says beside the logits."""
    losses, ranks, predicted, entropies, maxima, totals, means = found
    if use_kernels(logits):
        launch_rows(
            logits, target, losses, ranks, options, predicted=predicted, entropies=entropies,
            maxima=maxima, totals=totals, means=means, loss_weights=loss_weights, class_weights=class_weights,
        )  # fmt: skip
        return
    valid = target != options.ignore_index
    y = torch.where(valid, target, 0).unsqueeze(1)
    if options.return_rank:
        ranks.copy_(ranks_reference(logits, y, valid))
    if predicted is not None:
        predicted.copy_(logits.argmax(1).masked_fill_(~valid, -1))

    x = logits.to(losses.dtype).mul_(options.logit_scale)
    capped = None
    if options.softcap is not None:
        capped = x.div_(options.softcap).tanh_()
        x = capped * options.softcap
    if means is not None and class_weights is not None:
        means.copy_((x @ class_weights).div_(x.shape[1]).masked_fill_(~valid, 0.0))
    maximum = x.amax(1, keepdim=True)
    x.sub_(maximum)
    at_y = x.gather(1, y).squeeze(1)
    mean = x.mean(1) if options.label_smoothing else 0.0
    below = None  # x - maximum
    if entropies is not None:
        below = x.clamp_(min=VANISHED)  # -inf times its exp would be NaN
        x = below.exp()
    else:
        x.exp_()
    total = x.sum(1)
    log_sum = total.log()
    lse = maximum.squeeze(1) + log_sum
    loss = (1 - options.label_smoothing) * (log_sum - at_y) + options.z_loss * lse.square()
    if options.label_smoothing:
        loss += options.label_smoothing * (log_sum - mean)
    losses.copy_(loss.masked_fill_(~valid, 0.0))
    if entropies is not None and below is not None:
        expected = torch.bmm(x.unsqueeze(1), below.unsqueeze(2)).view(-1) / total  # of x - maximum
        entropies.copy_((log_sum - expected).masked_fill_(~valid, 0.0))
    if maxima is not None and totals is not None:
        maxima.copy_(maximum.squeeze(1).masked_fill_(~valid, 0.0))
        totals.copy_(total.masked_fill(~valid, 1.0))
    if loss_weights is None:
        return

    c = loss_weights * options.logit_scale
    x.mul_(((1 + 2 * options.z_loss * lse) / total * c).unsqueeze(1))
    if options.label_smoothing:
        x.sub_((options.label_smoothing / x.shape[1] * c).unsqueeze(1))
    x.scatter_add_(1, y, ((options.label_smoothing - 1) * c).unsqueeze(1))
    if capped is not None:
        x.mul_(capped.square_().neg_().add_(1))
    logits.copy_(x.masked_fill_(~valid.unsqueeze(1), 0.0))


def bytes_in_torch(V: int, dtype: torch.dtype, options: LossOptions, with_entropy: bool) -> int:
    """Bytes that `rows_in_place` needs in torch for a row of V logits beside these."""
    return V * max(bytes_per_logit(dtype, options, with_entropy), 16 if options.return_rank else 0)


def bytes_per_logit(dtype: torch.dtype, options: LossOptions, with_entropy: bool) -> int:
    """Bytes beside a logit that torch needs for its gradient: those of a float32 copy if it is 16-bit, and as many for
    a softcap, and for an entropy."""
    wide = max(dtype.itemsize, 4)
    return ((wide > dtype.itemsize) + (options.softcap is not None) + with_entropy) * wide
