"""Class weights and token scaling: losses put together from several numbers of each row.

With w the class weights (1 by default), s = label_smoothing, and x, y and lse as at the head of `token_losses`, each
row has

    loss = scale * (token_weight * ((1 - s) * w_y * (lse - x_y) + s * mean_j(w_j * (lse - x_j))) / D
                    + token_weight * z_loss * lse^2 / T)

where scale is 1, or with token_scaling exp(x_y - lse), the probability of the target, without a gradient (dynamic
fine-tuning, https://arxiv.org/abs/2508.05629). For the reduction "mean", D is the sum of token_weight * w_y over the
rows not ignored, as in torch, and T that of token_weight: the z-loss is not weighted by class, as in Liger-Kernel. For
the other reductions D and T are 1.

Where one weight is enough, the kernels compute the loss of a row as a whole. Else they give lse - x_y, lse and
mean_j(w_j * x_j), each with any gradient, and the sum is taken here.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from ligermodels.ops.loss.token_losses import LossOptions, LossWeights, RowNumbers


class LossTerms(NamedTuple):
    """What a loss is made of. class_weights: (V,), of the losses' dtype. sharded: whether classes are, over ranks."""

    options: LossOptions
    class_weights: Tensor | None
    token_scaling: bool
    return_z_loss: bool
    sharded: bool = False

    @property
    def together(self) -> bool:
        """Whether the kernels compute the loss of a row, which one weight then multiplies."""
        if self.sharded:
            return False
        options = self.options
        differ = self.class_weights is not None and (options.label_smoothing or options.z_loss)
        return not (differ or self.token_scaling)

    @property
    def of_kernels(self) -> LossOptions:
        """The options of the rows' numbers: without terms that are added here."""
        return self.options if self.together else self.options._replace(label_smoothing=0.0, z_loss=0.0)

    @property
    def needs_lse(self) -> bool:
        apart = not self.together and (self.options.label_smoothing or self.options.z_loss)
        return bool(self.return_z_loss or apart)

    def mean_weights(self, num_classes: int, like: Tensor) -> Tensor | None:
        """The class weights of the means that are needed, if any; ones have the device of `like`, and its dtype."""
        if self.together or not self.options.label_smoothing:
            return None
        if self.class_weights is not None:
            return self.class_weights
        return torch.ones(num_classes, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)

    def losses(self, found: RowNumbers, weights: LossWeights) -> tuple[Tensor, Tensor | None]:
        """Each row's loss, times its weight, and, if asked for, its part that is the z-loss, without a gradient."""
        if self.together:
            return found.losses * weights.of_target, self.z_losses(found, weights)
        smoothing = self.options.label_smoothing
        losses = found.losses * weights.of_target * (1 - smoothing)
        if smoothing:
            mean = 1.0 if self.class_weights is None else self.class_weights.mean()
            losses = losses + smoothing * weights.of_smoothing * (
                mean * cast(Tensor, found.lses) - cast(Tensor, found.means)
            )
        if self.options.z_loss:
            losses = losses + self._of_z_loss(found, weights)
        z_losses = self.z_losses(found, weights)
        if self.token_scaling:
            scale = torch.exp(-found.losses.detach())
            losses, z_losses = losses * scale, None if z_losses is None else z_losses * scale
        return losses, z_losses

    def z_losses(self, found: RowNumbers, weights: LossWeights) -> Tensor | None:
        """Each row's z-loss, times its weight, without a gradient and without token scaling, if asked for."""
        return self._of_z_loss(found, weights).detach() if self.return_z_loss else None

    def _of_z_loss(self, found: RowNumbers, weights: LossWeights) -> Tensor:
        return weights.of_z_loss * self.options.z_loss * cast(Tensor, found.lses).square()

    def results(
        self, loss: Tensor, z_losses: Tensor | None, reduction: str, found: RowNumbers
    ) -> Tensor | tuple[Tensor, ...]:
        """The loss, or a tuple of it and of what is asked for: ranks, z-loss and predicted classes, in this order."""
        others = [found.ranks] if self.options.return_rank else []
        if z_losses is not None:
            others.append(z_losses if reduction == "none" else z_losses.sum())
        if self.options.return_predicted:
            others.append(cast(Tensor, found.predicted))
        return (loss, *others) if others else loss
