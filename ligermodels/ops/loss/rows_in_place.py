"""What the losses need of each row of logits, and its gradient in place of the logits: by the kernels, or in torch."""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.ops.loss.token_losses import LossOptions, RowNumbers, ranks_reference
from ligermodels.ops.loss.token_losses_kernels import launch_rows
from ligermodels.ops.runtime.dispatch import use_kernels

VANISHED = -1000.0  # exp of it is 0, in float64 too


class RowWeights(NamedTuple):
    """The factors of losses, entropies, lses and means, (M,), in the sum that is differentiated; None for 0."""

    losses: Tensor
    entropies: Tensor | None = None
    lses: Tensor | None = None
    means: Tensor | None = None


def rows_in_place(
    logits: Tensor, target: Tensor, found: RowNumbers, weights: RowWeights | None, options: LossOptions,
    class_weights: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills `found` from logits (M, V). Given weights, the gradient of the weighted sum of losses, entropies, lses and
    means takes the place of the logits. Means, without label smoothing, are of class_weights, (V,), of losses' dtype.

    With p = softmax(x), H its entropy and lse = log sum exp x: dH/dx_j = p_j (lse - H - x_j), and dlse/dx_j = p_j.
    In torch this holds what `bytes_in_torch` says beside the logits."""
    losses, ranks, predicted, entropies, lses, means = found
    of_losses, of_entropies, of_lses, of_means = weights or (None, None, None, None)
    if use_kernels(logits):
        launch_rows(
            logits, target, losses, ranks, options, predicted=predicted, entropies=entropies, lses=lses,
            means=means, loss_weights=of_losses, entropy_weights=of_entropies, lse_weights=of_lses,
            mean_weights=of_means, class_weights=class_weights,
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
    if entropies is not None or of_entropies is not None:
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
    expected = None  # of x - maximum
    if below is not None:
        expected = torch.bmm(x.unsqueeze(1), below.unsqueeze(2)).view(-1) / total
    if entropies is not None and expected is not None:
        entropies.copy_((log_sum - expected).masked_fill_(~valid, 0.0))
    if lses is not None:
        lses.copy_(lse.masked_fill(~valid, 0.0))
    if of_losses is None:
        return

    c = of_losses * options.logit_scale
    factor = (1 + 2 * options.z_loss * lse) / total * c
    if of_lses is not None:
        factor += of_lses * options.logit_scale / total
    if of_entropies is not None and below is not None and expected is not None:
        of_entropy = of_entropies * options.logit_scale / total
        factor += of_entropy * expected
        x.mul_(below.mul_(-of_entropy.unsqueeze(1)).add_(factor.unsqueeze(1)))
    else:
        x.mul_(factor.unsqueeze(1))
    if options.label_smoothing:
        x.sub_((options.label_smoothing / x.shape[1] * c).unsqueeze(1))
    x.scatter_add_(1, y, ((options.label_smoothing - 1) * c).unsqueeze(1))
    if of_means is not None and class_weights is not None:
        of_mean = of_means * (options.logit_scale / x.shape[1])
        x.addcmul_(of_mean.unsqueeze(1), class_weights)
    if capped is not None:
        x.mul_(capped.square_().neg_().add_(1))
    logits.copy_(x.masked_fill_(~valid.unsqueeze(1), 0.0))


def bytes_in_torch(V: int, dtype: torch.dtype, options: LossOptions, with_entropy: bool) -> int:
    """Bytes that `rows_in_place` needs in torch for a row of V logits beside these: a float32 copy if they are 16-bit,
    and as much again for a softcap, and for an entropy."""
    item, wide = dtype.itemsize, max(dtype.itemsize, 4)
    copies = (wide > item) + (options.softcap is not None) + with_entropy
    return V * max(copies * wide, 16 if options.return_rank else 0)
