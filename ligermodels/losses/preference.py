"""Objectives over pairs of a chosen and a rejected sequence, from per-token log-probabilities.

All losses take log_probs (2B, T), the B chosen sequences and then, in the same order, the B rejected sequences (TRL's
layout), and mask, bool (2B, T): the tokens of the completions. r is the log-ratio of a sequence, log pi(y|x) - log
pi_ref(y|x), summed over its tokens. Computed in float32, float64 for float64.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.losses.loss_types import CPO_LOSS_TYPES, LOSS_TYPES, SCORES, Pairs, logistic
from ligermodels.losses.sequences import (
    check_choice,
    check_finite,
    check_positive,
    check_tokens,
    check_used,
    given,
    lengths,
    masked,
    per_item,
    reduced,
    reference_sums,
    sequence_log_probs,
)
from ligermodels.ops.runtime.checks import check_tensor


class PreferenceLoss(NamedTuple):
    """The loss, () or with reduction "none" (B,), and the implicit rewards of both sequences, (B,), without a
    gradient."""

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def dpo_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float | None = None,
    discopop_tau: float | None = None,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float | None = None,
    num_nll_tokens: Tensor | float | None = None,
    reduction: str = "mean",
) -> PreferenceLoss:
    """Direct preference optimisation and its relatives, under TRL's names.

    Args:
        log_probs: of the policy, floating (2B, T): B chosen sequences, then the B rejected sequences.
        ref_log_probs: of the reference, (2B, T), or their sums over the mask, (2B,), if computed beforehand; no
            gradient.
        mask: bool (2B, T), the tokens of the completions.
        beta: positive, how strongly the policy is held to the reference; tau in IPO's paper, 1 / eta in SPPO's.
            Default: 0.1.
        loss_type: with s the log-sigmoid and m = beta (r_chosen - r_rejected),
            "sigmoid"      (default) -s(m), DPO, https://arxiv.org/abs/2305.18290; with label_smoothing conservative
                           DPO, https://ericmitchell.ai/cdpo.pdf
            "sigmoid_norm" the same, r divided by the number of tokens, https://arxiv.org/abs/2411.15124
            "hinge"        relu(1 - m), https://arxiv.org/abs/2309.06657
            "ipo"          (r_chosen - r_rejected - 1 / (2 beta))^2, https://arxiv.org/abs/2310.12036, r divided by the
                           number of tokens, as its authors confirmed to TRL and the paper does not say
            "robust"       DPO made unbiased under label_smoothing, https://arxiv.org/abs/2403.00409
            "exo_pair"     KL(softmax(beta r) || (1 - e, e)), e = label_smoothing, https://arxiv.org/abs/2402.00856
            "nca_pair"     noise-contrastive alignment of two, https://arxiv.org/abs/2402.05369
            "bco_pair"     -s(beta r_chosen) - s(-beta r_rejected), https://arxiv.org/abs/2404.04656, without its shift
                           by the running mean of rewards
            "sppo_hard"    SPPO, https://arxiv.org/abs/2405.00675, the chosen winning with probability 1
            "aot", "aot_unpaired"  DPO over sorted margins, or sorted log-ratios, https://arxiv.org/abs/2406.05882
            "apo_zero", "apo_down" anchored preference optimisation, https://arxiv.org/abs/2408.06266, plus 1
            "discopop"     DPO blended with exp(-m) by sigmoid(m / discopop_tau), https://arxiv.org/abs/2406.08414
            "sft"          the chosen's negative log-likelihood, averaged over the tokens of all pairs
        label_smoothing: in [0, 0.5), the probability that the labels of a pair are swapped; above 0 for "exo_pair".
            Default: 0.
        discopop_tau: positive, for "discopop". Default: 0.05.
        f_divergence_type: "reverse_kl" (default), "forward_kl", "js_divergence" or "alpha_divergence": the compared
            log-ratios become f'(exp(r)), https://arxiv.org/abs/2309.16240; for the types that use only their
            difference.
        f_alpha_divergence_coef: alpha in f'(u) = (1 - u^-alpha) / alpha, in (0, 1), as in the paper. TRL 1.16 computes
            what this loss computes for 1 - alpha. Default: 0.5, which is the same in both.
        num_nll_tokens: divisor of the chosen's summed negative log-likelihood, in place of its number of tokens in
            these pairs; for a batch in several parts, times the fraction of the batch's pairs in this part.
        reduction: "mean" (default), or "none": the loss of each pair, (B,); for "aot..." of each sorted value.

    Returns:
        `PreferenceLoss`: the loss, and the rewards beta r, up to a constant beta f'(exp(r)).

    Raises:
        InputError: shapes do not fit, a value is out of range, or the loss type does not use an option.

    Examples:
        >>> log_probs = -torch.rand(4, 10, requires_grad=True)  # two pairs
        >>> mask = torch.ones(4, 10, dtype=torch.bool)
        >>> dpo_loss(log_probs, -torch.rand(4, 10), mask, beta=0.1).loss.backward()
    """
    return _direct_loss(
        "dpo_loss", log_probs, ref_log_probs, mask, beta=beta, loss_type=loss_type, label_smoothing=label_smoothing,
        discopop_tau=discopop_tau, f_divergence_type=f_divergence_type, f_alpha_divergence_coef=f_alpha_divergence_coef,
        num_nll_tokens=num_nll_tokens, reduction=reduction,
    )  # fmt: skip


def _direct_loss(
    name: str, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, *, beta: float, loss_type: str,
    label_smoothing: float | None, reduction: str, discopop_tau: float | None = None,
    f_divergence_type: str = "reverse_kl", f_alpha_divergence_coef: float | None = None,
    num_nll_tokens: Tensor | float | None = None,
) -> PreferenceLoss:  # fmt: skip
    """`dpo_loss` with the same arguments; error messages name the loss `name`."""
    check_tokens(name, log_probs, mask)
    _check_even(name, log_probs)
    check_choice(name, "loss_type", loss_type, LOSS_TYPES)
    check_choice(name, "f_divergence_type", f_divergence_type, SCORES)
    check_positive(name, beta=beta, **given(discopop_tau=discopop_tau))
    check_finite(name, **given(f_alpha_divergence_coef=f_alpha_divergence_coef, num_nll_tokens=num_nll_tokens))
    smoothing = _checked_label_smoothing(name, label_smoothing)
    chosen_type = LOSS_TYPES[loss_type]
    divergence = None if f_divergence_type == "reverse_kl" else f_divergence_type
    check_used(
        name, loss_type, chosen_type.options,
        label_smoothing=smoothing or None, discopop_tau=discopop_tau, f_divergence_type=divergence,
    )  # fmt: skip
    if loss_type == "exo_pair" and not smoothing:
        raise InputError(f"{name}: loss_type 'exo_pair' needs label_smoothing above 0; its paper takes 0.001")
    if f_alpha_divergence_coef is not None and f_divergence_type != "alpha_divergence":
        raise InputError(f"{name}: f_alpha_divergence_coef is of f_divergence_type 'alpha_divergence' alone")
    alpha = 0.5 if f_alpha_divergence_coef is None else f_alpha_divergence_coef
    if not 0 < alpha < 1:
        raise InputError(f"{name}: f_alpha_divergence_coef must be in (0, 1), got {alpha}")

    sums = sequence_log_probs(log_probs, mask)
    ref_sums = reference_sums(name, ref_log_probs, mask).to(sums.dtype)
    (policy_chosen, policy_rejected), (ref_chosen, ref_rejected) = sums.chunk(2), ref_sums.chunk(2)
    ratios = sums - ref_sums
    scores = SCORES[f_divergence_type](ratios, alpha)
    score, average = scores.chunk(2), (scores / lengths(mask)).chunk(2)
    chosen, rejected = ratios.chunk(2)
    pairs = Pairs(
        chosen, rejected, score[0] - score[1], average[0] - average[1], policy_chosen - policy_rejected,
        ref_chosen - ref_rejected, _nll(name, log_probs, mask, num_nll_tokens), beta, smoothing,
        0.05 if discopop_tau is None else discopop_tau,
    )  # fmt: skip
    rewards = (beta * scores.detach()).chunk(2)
    return PreferenceLoss(reduced(name, chosen_type.losses(pairs), reduction), *rewards)


def cpo_loss(
    log_probs: Tensor,
    mask: Tensor,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float | None = None,
    cpo_alpha: float = 1.0,
    num_nll_tokens: Tensor | float | None = None,
    reduction: str = "mean",
) -> PreferenceLoss:
    """Contrastive preference optimisation (https://arxiv.org/abs/2401.08417).

    `dpo_loss` without a reference, plus cpo_alpha times the chosen's negative log-likelihood, averaged over the tokens
    of all pairs.

    Args:
        log_probs: of the policy, floating (2B, T): B chosen sequences, then the B rejected sequences.
        mask: bool (2B, T), the tokens of the completions.
        beta: positive factor of the difference of log-probabilities. Default: 0.1.
        loss_type: "sigmoid" (default), "hinge" or "ipo", see `dpo_loss`.
        label_smoothing: in [0, 0.5), the probability that the labels of a pair are swapped. Default: 0.
        cpo_alpha: weight of the negative log-likelihood. Default: 1.
        num_nll_tokens: divisor of the chosen's summed negative log-likelihood, in place of its number of tokens in
            these pairs; for a batch in several parts, times the fraction of the batch's pairs in this part.
        reduction: "mean" (default), or "none": the loss of each pair, (B,).

    Returns:
        `PreferenceLoss`: the loss, and the rewards beta log pi(y|x).

    Raises:
        InputError: shapes do not fit, a value is out of range, or the loss type does not use an option.
    """
    check_tokens("cpo_loss", log_probs, mask)
    check_choice("cpo_loss", "loss_type", loss_type, CPO_LOSS_TYPES)
    check_finite("cpo_loss", cpo_alpha=cpo_alpha, **given(num_nll_tokens=num_nll_tokens))
    found = _direct_loss(
        "cpo_loss", log_probs, log_probs.new_zeros(len(log_probs)), mask, beta=beta, loss_type=loss_type,
        label_smoothing=label_smoothing, reduction="none",
    )  # fmt: skip
    losses = found.loss + cpo_alpha * _nll("cpo_loss", log_probs, mask, num_nll_tokens)
    return found._replace(loss=reduced("cpo_loss", losses, reduction))


def simpo_loss(
    log_probs: Tensor,
    mask: Tensor,
    *,
    beta: float = 2.0,
    simpo_gamma: float = 0.5,
    label_smoothing: float | None = None,
    reduction: str = "mean",
) -> PreferenceLoss:
    """SimPO (https://arxiv.org/abs/2405.14734): -log sigmoid(beta (a_chosen - a_rejected) - simpo_gamma).

    a is the mean log-probability of a sequence.

    Args:
        log_probs: of the policy, floating (2B, T): B chosen sequences, then the B rejected sequences.
        mask: bool (2B, T), the tokens of the completions.
        beta: positive factor of the margin. Default: 2.
        simpo_gamma: the target margin. Default: 0.5.
        label_smoothing: in [0, 0.5), the probability that the labels of a pair are swapped. Default: 0.
        reduction: "mean" (default), or "none": the loss of each pair, (B,).

    Returns:
        `PreferenceLoss`: the loss, and the rewards beta a.

    Raises:
        InputError: shapes do not fit, or a value is out of range.
    """
    chosen, rejected = _average_pairs("simpo_loss", log_probs, mask, beta)
    check_finite("simpo_loss", simpo_gamma=simpo_gamma)
    margin = beta * (chosen - rejected) - simpo_gamma
    losses = logistic(margin, _checked_label_smoothing("simpo_loss", label_smoothing))
    return PreferenceLoss(reduced("simpo_loss", losses, reduction), beta * chosen.detach(), beta * rejected.detach())


def orpo_loss(
    log_probs: Tensor,
    mask: Tensor,
    *,
    beta: float = 0.1,
    nll_mask: Tensor | None = None,
    num_nll_tokens: Tensor | float | None = None,
    reduction: str = "mean",
) -> PreferenceLoss:
    """ORPO (https://arxiv.org/abs/2403.07691): likelihood and odds ratio in one loss, without a reference.

    The chosen's negative log-likelihood, averaged over the tokens of all pairs, less beta (lambda in the paper) times
    log sigmoid of the log odds ratio, with odds = p / (1 - p) and log p the mean log-probability of a sequence.

    Args:
        log_probs: of the policy, floating (2B, T): B chosen sequences, then the B rejected sequences.
        mask: bool (2B, T), the tokens of the completions.
        beta: positive weight of the odds ratio. Default: 0.1.
        nll_mask: bool (2B, T), the tokens of the likelihood; the paper and TRL also count the prompt. Rows of rejected
            sequences have no effect. Default: `mask`.
        num_nll_tokens: divisor of the chosen's summed negative log-likelihood, in place of its number of tokens in
            these pairs; for a batch in several parts, times the fraction of the batch's pairs in this part.
        reduction: "mean" (default), or "none": the loss of each pair, (B,).

    Returns:
        `PreferenceLoss`: the loss, and the rewards beta log p.

    Raises:
        InputError: shapes do not fit, or a value is out of range.
    """
    chosen, rejected = _average_pairs("orpo_loss", log_probs, mask, beta)
    if nll_mask is not None:
        check_tensor("orpo_loss", "nll_mask", nll_mask, mask.shape, mask.device, torch.bool)
    check_finite("orpo_loss", **given(num_nll_tokens=num_nll_tokens))
    nll = _nll("orpo_loss", log_probs, mask if nll_mask is None else nll_mask, num_nll_tokens)
    losses = nll - beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    return PreferenceLoss(reduced("orpo_loss", losses, reduction), beta * chosen.detach(), beta * rejected.detach())


def _log_odds(log_p: Tensor) -> Tensor:
    """log(p / (1 - p)), finite: p is at most 1 less the epsilon of its dtype."""
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)
    return log_p - torch.log(-torch.expm1(log_p))


def _average_pairs(loss: str, log_probs: Tensor, mask: Tensor, beta: float) -> tuple[Tensor, ...]:
    """Mean log-probabilities of the chosen and the rejected, (B,) each, after the checks."""
    check_tokens(loss, log_probs, mask)
    _check_even(loss, log_probs)
    check_positive(loss, beta=beta)
    return sequence_log_probs(log_probs, mask, average=True).chunk(2)


def _nll(loss: str, log_probs: Tensor, mask: Tensor, num_tokens: Tensor | float | None) -> Tensor:
    """(B,); the mean is the negative log-likelihood of the chosen sequences, averaged over all their tokens.

    Args:
        loss: the name of the loss, for error messages.
        log_probs: (2B, T).
        mask: bool (2B, T).
        num_tokens: divisor in place of the number of tokens.
    """
    (chosen, _), (mask, _) = log_probs.chunk(2), mask.chunk(2)
    total = -masked(chosen, mask).sum(1) * len(chosen)
    if num_tokens is None:
        return total / mask.sum().clamp(min=1)
    return per_item(total, num_tokens, f"{loss}: num_nll_tokens")


def _check_even(loss: str, log_probs: Tensor) -> None:
    if len(log_probs) % 2 or not len(log_probs):
        raise InputError(
            f"{loss}: log_probs must be of pairs, the chosen rows and then the rejected; got {len(log_probs)}"
        )


def _checked_label_smoothing(loss: str, label_smoothing: float | None) -> float:
    check_finite(loss, **given(label_smoothing=label_smoothing))
    if not 0 <= (label_smoothing or 0.0) < 0.5:
        raise InputError(f"{loss}: label_smoothing must be in [0, 0.5), got {label_smoothing}")
    return label_smoothing or 0.0
