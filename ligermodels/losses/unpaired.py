"""Objectives over single sequences that are labelled desirable or not, from per-token log-probabilities."""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.losses.sequences import (
    check_choice,
    check_positive,
    check_tokens,
    reduced,
    reference_sums,
    sequence_log_probs,
)
from ligermodels.ops.runtime.checks import check_tensor


class UnpairedLoss(NamedTuple):
    """The loss, () or with reduction "none" (B,), and the implicit rewards, (B,), without a gradient."""

    loss: Tensor
    rewards: Tensor


def kto_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    label: Tensor,
    kl: Tensor | None = None,
    *,
    beta: float = 0.1,
    loss_type: str = "kto",
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reduction: str = "mean",
) -> UnpairedLoss:
    """KTO (https://arxiv.org/abs/2402.01306, equation 7), over single sequences with a label.

    weight * (1 - sigmoid(+-beta (r - kl))), with r the log-ratio of a sequence, log pi(y|x) - log pi_ref(y|x), and the
    sign plus for desirable sequences and minus for the others.

    Args:
        log_probs: of the policy, floating (B, T).
        ref_log_probs: of the reference, (B, T), or their sums over the mask, (B,); no gradient.
        mask: bool (B, T), the tokens of the completions.
        label: bool (B,), whether a sequence is desirable.
        kl: (), the estimate of KL(pi || pi_ref): the mean, over all ranks, of the log-ratios of completions of other
            prompts (`sequence_log_probs`). A negative value counts as 0; no gradient. Needed for "kto", and only there.
        beta: positive, how strongly the policy is held to the reference. Default: 0.1.
        loss_type: "kto" (default), or "apo_zero_unpaired", with 0 in place of kl (https://arxiv.org/abs/2408.06266,
            equation 7, unpaired).
        desirable_weight: positive factor of the losses of desirable sequences. Default: 1.
        undesirable_weight: positive factor of the losses of the other sequences. Default: 1.
        reduction: "mean" (default) over all B, or "none": (B,).

    Returns:
        The loss, and the rewards beta r, float32 (float64 for float64 `log_probs`).

    Raises:
        InputError: shapes or values do not fit, or kl is missing or not used.

    Examples:
        >>> log_probs = -torch.rand(4, 10, requires_grad=True)
        >>> mask, label = torch.ones(4, 10, dtype=torch.bool), torch.tensor([True, True, False, False])
        >>> kto_loss(log_probs, -torch.rand(4, 10), mask, label, kl=torch.tensor(0.1)).loss.backward()
    """
    check_tokens("kto_loss", log_probs, mask)
    check_tensor("kto_loss", "label", label, log_probs.shape[:1], log_probs.device, torch.bool)
    check_choice("kto_loss", "loss_type", loss_type, ("kto", "apo_zero_unpaired"))
    check_positive("kto_loss", beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    if (kl is None) == (loss_type == "kto"):
        raise InputError("kto_loss: loss_type 'kto' needs kl, and 'apo_zero_unpaired' takes none")
    sums = sequence_log_probs(log_probs, mask)
    ratios = sums - reference_sums("kto_loss", ref_log_probs, mask).to(sums.dtype)
    anchor: Tensor | float = 0.0
    if kl is not None:
        check_tensor("kto_loss", "kl", kl, (), log_probs.device)
        anchor = kl.detach().to(sums.dtype).clamp(min=0)
    margin = beta * (ratios - anchor)
    losses = torch.where(label, desirable_weight * torch.sigmoid(-margin), undesirable_weight * torch.sigmoid(margin))
    return UnpairedLoss(reduced("kto_loss", losses, reduction), beta * ratios.detach())
