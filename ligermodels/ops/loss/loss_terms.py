"""Losses with class weights or token scaling, summed from several statistics of each row.

With w the class weights (1 by default), s = label_smoothing, and x, y and lse as at the head of `token_losses`, a row
has the loss

    scale * (token_weight * ((1 - s) * w_y * (lse - x_y) + s * mean_j(w_j * (lse - x_j))) / D
             + token_weight * z_loss * lse^2 / T)

where scale is 1, or with token_scaling exp(x_y - lse), the probability of the target, without a gradient (dynamic
fine-tuning, https://arxiv.org/abs/2508.05629). For the reduction "mean", D is the sum of token_weight * w_y over the
rows that are not ignored, as in torch, and T the sum of token_weight: the z-loss is not weighted by class, as in
Liger-Kernel. For the other reductions D and T are 1.

Where one weight for the whole loss of a row is enough, the kernels compute this loss. Otherwise they compute lse - x_y,
lse and mean_j(w_j * x_j), each differentiable, and this file sums the terms.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from ligermodels.ops.loss.token_losses import LogitRows, LossOptions, RowOutputs, normalised


class LossWeights(NamedTuple):
    """The weight of each term of each row's loss; the reduced loss is the sum of weight * term over rows and terms.

    float32 (float64 for float64 losses), the target's shape. Weights are 0 for ignored rows, and for all rows if the
    divisor of the mean is 0.
    """

    nll: Tensor  # of -log p_y: token weight * class weight
    smoothing: Tensor  # of the mean over classes: token weight, over the same divisor
    z_loss: Tensor  # of the z-loss: token weight, over the sum of token weights


def term_weights(weights: Tensor, target: Tensor, class_weights: Tensor | None, reduction: str) -> LossWeights:
    """The weights of the terms of the loss.

    Args:
        weights: the `loss_weights` (...); with class weights not `divided`.
        target: int64 (...), checked.
        class_weights: (V,), the dtype of the weights, or None for ones.
        reduction: "mean", "sum" or "none".
    """
    if class_weights is None:
        return LossWeights(weights, weights, weights)
    products = weights * class_weights[target.clamp(0, len(class_weights) - 1)]  # ignored rows have no class
    if reduction != "mean":
        return LossWeights(products, weights, weights)
    return LossWeights(normalised(products, products), normalised(weights, products), normalised(weights, weights))


def has_one_weight(options: LossOptions, class_weights: Tensor | None, token_scaling: bool) -> bool:
    """Whether one weight for the whole loss of a row is enough.

    Args:
        options: the options of the loss.
        class_weights: (V,), or None.
        token_scaling: whether a row's loss is multiplied by the probability of its target.
    """
    return not token_scaling and (class_weights is None or not (options.label_smoothing or options.z_loss))


class LossTerms(NamedTuple):
    """The terms of a loss, and whether the kernels compute its rows as a whole (`fused`)."""

    options: LossOptions
    class_weights: Tensor | None  # (V,), the dtype of the losses
    token_scaling: bool
    fused: bool

    @property
    def separate(self) -> bool:
        """Whether label smoothing or a z-loss is added here."""
        return not self.fused and bool(self.options.label_smoothing or self.options.z_loss)

    @property
    def kernel_options(self) -> LossOptions:
        """The options of the kernels, without the terms that are added here."""
        return self.options if self.fused else self.options._replace(label_smoothing=0.0, z_loss=0.0)

    def outputs(self, return_rank: bool, return_z_loss: bool, return_predicted: bool) -> RowOutputs:
        """The statistics that the terms and the results need.

        Args:
            return_rank: whether the ranks are returned.
            return_z_loss: whether the z-loss is returned.
            return_predicted: whether the predicted classes are returned.
        """
        means = not self.fused and bool(self.options.label_smoothing)
        return RowOutputs(return_rank, return_predicted, lses=return_z_loss or self.separate, means=means)

    def mean_weights(self, num_classes: int, x: Tensor) -> Tensor | None:
        """The class weights of the means, (num_classes,), on the device of x; None if no means are needed."""
        if self.fused or not self.options.label_smoothing:
            return None
        if self.class_weights is not None:
            return self.class_weights
        return torch.ones(num_classes, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)

    def losses(self, rows: LogitRows, weights: LossWeights) -> Tensor:
        """The weighted loss of each row; the reduced loss is their sum."""
        smoothing = 0.0 if self.fused else self.options.label_smoothing
        losses = rows.losses * weights.nll * (1 - smoothing)
        if smoothing:
            mean_weight = 1.0 if self.class_weights is None else self.class_weights.mean()
            means = mean_weight * cast(Tensor, rows.lses) - cast(Tensor, rows.means)
            losses = losses + smoothing * weights.smoothing * means
        if not self.fused and self.options.z_loss:
            losses = losses + weighted_z_losses(rows, weights, self.options)
        return self._scaled(losses, rows)

    def z_losses(self, rows: LogitRows, weights: LossWeights) -> Tensor:
        """The weighted z-loss of each row, without a gradient."""
        return self._scaled(weighted_z_losses(rows, weights, self.options).detach(), rows)

    def _scaled(self, losses: Tensor, rows: LogitRows) -> Tensor:
        return losses * torch.exp(-rows.losses.detach()) if self.token_scaling else losses


def weighted_z_losses(rows: LogitRows, weights: LossWeights, options: LossOptions) -> Tensor:
    """The z-loss of each row, weighted.

    Args:
        rows: statistics with lses.
        weights: the weights of the terms.
        options: `z_loss` is used.
    """
    return weights.z_loss * options.z_loss * cast(Tensor, rows.lses).square()
