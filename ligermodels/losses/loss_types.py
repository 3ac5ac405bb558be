"""The loss types of `dpo_loss`, and its f-divergences, as functions of log-ratios."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_EXPONENT = 80.0  # exp of it is finite in float32


class Pairs(NamedTuple):
    """The inputs of a loss type for B pairs, each (B,); `average_...`: log-ratios divided by their number of tokens."""

    chosen: Tensor  # log-ratios
    rejected: Tensor
    score_margin: Tensor  # f'(exp(r)) of chosen less rejected, for reverse KL the difference of log-ratios
    average_score_margin: Tensor
    policy_margin: Tensor  # of log-probabilities
    reference_margin: Tensor
    nll: Tensor  # of the chosen
    beta: float
    label_smoothing: float
    discopop_tau: float


def logistic(margin: Tensor, label_smoothing: float) -> Tensor:
    """-log sigmoid(margin), expected over labels that are wrong with probability label_smoothing."""
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def _robust(p: Pairs) -> Tensor:
    margin, flipped = p.beta * p.score_margin, p.label_smoothing
    return (flipped * F.logsigmoid(-margin) - (1 - flipped) * F.logsigmoid(margin)) / (1 - 2 * flipped)


def _exo_pair(p: Pairs) -> Tensor:
    log_q, log_q_flipped = F.logsigmoid(p.beta * p.score_margin), F.logsigmoid(-p.beta * p.score_margin)
    of_chosen = log_q.exp() * (log_q - math.log1p(-p.label_smoothing))
    return of_chosen + log_q_flipped.exp() * (log_q_flipped - math.log(p.label_smoothing))


def _nca_pair(p: Pairs) -> Tensor:
    chosen, rejected = p.beta * p.chosen, p.beta * p.rejected
    return -F.logsigmoid(chosen) - (F.logsigmoid(-chosen) + F.logsigmoid(-rejected)) / 2


def _discopop(p: Pairs) -> Tensor:
    margin = p.beta * p.score_margin
    share = torch.sigmoid(margin / p.discopop_tau)
    return (1 - share) * -F.logsigmoid(margin) + share * torch.exp((-margin).clamp(max=MAX_EXPONENT))


class LossType(NamedTuple):
    losses: Callable[[Pairs], Tensor]
    options: tuple[str, ...] = ()


LABELS, DIVERGENCE = ("label_smoothing",), ("f_divergence_type",)
LOSS_TYPES = {
    "sigmoid": LossType(lambda p: logistic(p.beta * p.score_margin, p.label_smoothing), LABELS + DIVERGENCE),
    "sigmoid_norm": LossType(
        lambda p: logistic(p.beta * p.average_score_margin, p.label_smoothing), LABELS + DIVERGENCE
    ),
    "hinge": LossType(lambda p: torch.relu(1 - p.beta * p.score_margin), DIVERGENCE),
    "ipo": LossType(lambda p: (p.average_score_margin - 1 / (2 * p.beta)).square(), DIVERGENCE),
    "robust": LossType(_robust, LABELS + DIVERGENCE),
    "exo_pair": LossType(_exo_pair, LABELS + DIVERGENCE),
    "nca_pair": LossType(_nca_pair),
    "bco_pair": LossType(lambda p: -F.logsigmoid(p.beta * p.chosen) - F.logsigmoid(-p.beta * p.rejected)),
    "sppo_hard": LossType(lambda p: (p.chosen - 0.5 / p.beta).square() + (p.rejected + 0.5 / p.beta).square()),
    "aot": LossType(
        lambda p: logistic(
            p.beta * (p.policy_margin.sort().values - p.reference_margin.sort().values), p.label_smoothing
        ),
        LABELS,
    ),
    "aot_unpaired": LossType(
        lambda p: logistic(p.beta * (p.chosen.sort().values - p.rejected.sort().values), p.label_smoothing), LABELS
    ),
    "apo_zero": LossType(lambda p: torch.sigmoid(-p.beta * p.chosen) + torch.sigmoid(p.beta * p.rejected)),
    "apo_down": LossType(lambda p: torch.sigmoid(p.beta * p.chosen) + torch.sigmoid(-p.beta * (p.chosen - p.rejected))),
    "discopop": LossType(_discopop, ("discopop_tau", *DIVERGENCE)),
    "sft": LossType(lambda p: p.nll),
}
CPO_LOSS_TYPES = ("sigmoid", "hinge", "ipo")


def _alpha_score(r: Tensor, alpha: float) -> Tensor:
    """(1 - exp(r)^-alpha) / alpha, with the exponent clamped against overflow."""
    return -torch.expm1((-alpha * r).clamp(max=MAX_EXPONENT)) / alpha


SCORES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda r, alpha: r,
    "forward_kl": lambda r, alpha: _alpha_score(r, 1.0),
    "js_divergence": lambda r, alpha: math.log(2) + F.logsigmoid(r),
    "alpha_divergence": _alpha_score,
}
"""f'(exp(r)) of each f-divergence, up to a constant that cancels between chosen and rejected."""
