"""The gradient of some columns of logits in their place, from numbers of whole rows: by a kernel, or in torch.

With effective logits x, p = softmax(x) and lse = log sum exp x, the numbers of a row have by x_j the gradients

    -log p_y: p_j - [j = y]        entropy: -p_j (log p_j + entropy)        lse: p_j        mean of w_j x_j: w_j / V

each times the slope of x_j by the given logit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.ops.loss.rows_in_place import VANISHED
from ligermodels.ops.loss.token_losses import LossOptions
from ligermodels.ops.loss.token_losses_kernels import launch_gradient
from ligermodels.ops.runtime.dispatch import use_kernels


class Gradients(NamedTuple):
    """The gradients of the numbers of each row, (M,): of -log p_y, entropies, lses and means; None for 0."""

    losses: Tensor
    entropies: Tensor | None = None
    lses: Tensor | None = None
    means: Tensor | None = None


def columns_in_place(
    logits: Tensor, first: int, target: Tensor, maxima: Tensor, totals: Tensor, entropies: Tensor | None,
    gradients: Gradients, options: LossOptions, class_weights: Tensor | None, num_classes: int,
) -> None:  # fmt: skip
    """Replaces logits (M, n), those of the classes from `first` on, by their gradient; by zeros in ignored rows.

    maxima, totals, entropies, (M,): of the whole rows, see `RowResults`; entropies where these have a gradient.
    class_weights: (num_classes,), of the means. In torch this holds `bytes_per_logit` beside each logit."""
    if use_kernels(logits):
        launch_gradient(
            logits, logits, target, maxima, totals, gradients.losses, options, entropies=entropies,
            entropy_weights=gradients.entropies, lse_weights=gradients.lses, mean_weights=gradients.means,
            class_weights=class_weights, first=first, num_classes=num_classes,
        )  # fmt: skip
        return
    of_losses, of_entropies, of_lses, of_means = gradients
    x = logits.to(maxima.dtype).mul_(options.logit_scale)
    slope = None
    if options.softcap is not None:
        slope = x.div_(options.softcap).tanh_()
        x = slope * options.softcap
        slope.square_().neg_().add_(1)
    below = x.sub_(maxima.unsqueeze(1)).clamp_(min=VANISHED)  # -inf times its exp would be NaN
    factor = of_losses if of_lses is None else of_losses + of_lses
    if of_entropies is not None and entropies is not None:
        g = torch.exp(below)
        factor = factor + of_entropies * (totals.log() - entropies)
        g.mul_(below.mul_(-of_entropies.unsqueeze(1)).add_(factor.unsqueeze(1))).div_(totals.unsqueeze(1))
    else:
        g = below.exp_().mul_((factor / totals).unsqueeze(1))
    inside = (target >= first) & (target < first + logits.shape[1])
    place = torch.where(inside, target - first, 0).unsqueeze(1)
    g.scatter_add_(1, place, torch.where(inside, -of_losses, 0.0).unsqueeze(1))
    if of_means is not None and class_weights is not None:
        some = class_weights[first : first + logits.shape[1]]
        g.addcmul_((of_means / num_classes).unsqueeze(1), some)
    if slope is not None:
        g.mul_(slope)
    g.mul_(options.logit_scale)
    logits.copy_(g.masked_fill_((target == options.ignore_index).unsqueeze(1), 0.0))
