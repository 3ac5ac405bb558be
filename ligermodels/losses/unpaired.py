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
from ligermodels.ops.runtime.tensors import check_tensor


class UnpairedLoss(NamedTuple):
    """The loss, () or with reduction "none" (B,), and the implicit rewards, (B,), detached."""

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
    """KTO, https://arxiv.org/abs/2402.01306, equation 7: weight * (1 - sigmoid(+-beta (r - kl))), with r a sequence's
    log-ratio, log pi(y|x) - log pi_ref(y|x), plus for desirable sequences and minus for the others.

    log_probs, mask: (B, T), mask bool: the tokens of the completions. ref_log_probs: the reference's, (B, T), or their
        sums over the mask, (B,); they get no gradient. label: (B,), bool, whether a sequence is desirable.
    kl: (), the estimate of KL(pi || pi_ref): the mean, over all ranks, of the log-ratios of completions to prompts that
        are not theirs (`sequence_log_probs`). A negative one counts as 0. It gets no gradient.
    loss_type: "kto", or "apo_zero_unpaired", which compares with 0 in place of kl
        (https://arxiv.org/abs/2408.06266, equation 7, unpaired) and takes none.
    reduction: "mean", over all B, or "none": (B,), in the order of the rows.
    Returns the loss, and the rewards beta r, both in float32 (float64 for float64).
    Raises InputError if shapes or values do not fit, or kl is missing or not used.
    """
    check_tokens("kto_loss", log_probs, mask)
    check_tensor("kto_loss", "label", label, log_probs.shape[:1], log_probs.device, torch.bool)
    check_choice("kto_loss", "loss_type", loss_type, ("kto", "apo_zero_unpaired"))
    check_positive("kto_loss", beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    if (kl is None) == (loss_type == "kto"):
        raise InputError("kto_loss: loss_type 'kto' needs kl, and 'apo_zero_unpaired' takes none")
    ratios = sequence_log_probs(log_probs, mask) - reference_sums("kto_loss", ref_log_probs, mask)
    anchor: Tensor | float = 0.0
    if kl is not None:
        check_tensor("kto_loss", "kl", kl, (), log_probs.device)
        anchor = kl.detach().clamp(min=0)
    margin = beta * (ratios - anchor)
    losses = torch.where(label, desirable_weight * torch.sigmoid(-margin), undesirable_weight * torch.sigmoid(margin))
    return UnpairedLoss(reduced("kto_loss", losses, reduction), beta * ratios.detach())
