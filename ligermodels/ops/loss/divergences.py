"""Divergences between a teacher's and a student's distribution over the vocabulary, and their gradients.

For a row of logits l, student's or teacher's, effective logits x = logit_scale * l, or softcap * tanh(logit_scale * l /
softcap), and q = softmax(x_student / temperature), p = softmax(x_teacher / temperature), m = beta p + (1 - beta) q:

    forward_kl = KL(p || q) = sum p log(p / q)
    reverse_kl = KL(q || p) = sum q log(q / p)
    jsd        = beta KL(p || m) + (1 - beta) KL(q || m)

(https://arxiv.org/abs/1503.02531; https://arxiv.org/abs/2306.08543; https://arxiv.org/abs/2306.13649, section 2.)
Nothing is multiplied by temperature^2. The gradients of the student's x / temperature are

    forward_kl: q - p        reverse_kl: q (log(q / p) - KL(q || p))        jsd: (1 - beta) q (log(q / m) - KL(q || m))

Draft models are trained for their acceptance rate: speculative sampling accepts a token that is drawn from q with
probability a = sum min(p, q) (https://arxiv.org/abs/2211.17192, section 3.2).

    tv  = sum |q - p| / 2 = 1 - a, the total variation distance
    l1  = sum |q - p| (DSpark, https://github.com/deepseek-ai/DeepSpec)
    nla = -log a
    lk  = w KL(p || q) + (1 - w) tv, with w = exp(-3 a), without a gradient through w

(nla, lk: LK losses, https://arxiv.org/abs/2602.23881.) The weight w is of each row, as in speculators; SpecForge takes
the mean of a over the batch. With s = sign(q - p), 0 where they are equal, the gradients are

    l1: q (s - sum q s)        tv: half of l1's        nla: tv's / a        lk: w (q - p) + (1 - w) tv's
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class DistillationOptions(NamedTuple):
    """Options of the divergence of a row, in the order of the arguments of the registered op."""

    divergence: str
    beta: float
    temperature: float
    softcap: float | None
    logit_scale: float
    teacher_softcap: float | None
    teacher_logit_scale: float


class Labels(NamedTuple):
    """A cross entropy beside the divergence of each row: losses and gradients are weighted sums of both.

    targets: int64 (M,); a negative number is no target.
    weight: of the cross entropy.
    divergence_weight: of the divergence.
    losses: float32 (M,), filled with -log q of the target, 0 without one.
    ranks: int64 (M,), filled with the number of larger logits than the target's; V without a target.
    """

    targets: Tensor
    weight: float
    divergence_weight: float
    losses: Tensor
    ranks: Tensor


class DivergenceRows(NamedTuple):
    """Numbers of each row, and memory for its results, which `divergence_in_place` fills; None for results that are not
    computed.

    losses: (M,), the dtype of the computation, filled with the divergences; 0 in rows that are not valid.
    valid: bool (M,).
    loss_weights: (M,), the dtype of the losses; None: no gradient is needed.
    accepted: (M,), the dtype of the losses, filled with the `acceptance` of each row.
    agreed: bool (M,), filled with whether both sides have the largest logit at the same class.
    teacher_lses: the log-sum-exp of each row of the teacher's logits over all its classes, for `accepted`, where it has
        more than V; None: over these V.
    overlaps: (M,), filled with the acceptance over these V classes.
    labels: a cross entropy beside the divergence; the gradient is of their weighted sum. None: the divergence's.
    """

    losses: Tensor
    valid: Tensor
    loss_weights: Tensor | None = None
    accepted: Tensor | None = None
    agreed: Tensor | None = None
    teacher_lses: Tensor | None = None
    overlaps: Tensor | None = None
    labels: Labels | None = None


def _forward_kl(log_q: Tensor, log_p: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    p = log_p.exp()
    losses = log_p.sub_(log_q).mul_(p).sum(1)
    return losses, log_q.exp_().sub_(p)


def _reverse_kl(log_q: Tensor, log_p: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    ratio = log_p.neg_().add_(log_q)
    q = log_q.exp_()
    losses = ratio.mul_(q).sum(1)
    return losses, ratio.sub_(q.mul_(losses.unsqueeze(1)))


def _jsd(log_q: Tensor, log_p: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    log_m, other = log_q + math.log1p(-beta), log_p + math.log(beta)
    torch.logaddexp(log_m, other, out=log_m)
    torch.exp(log_p, out=other)
    of_teacher = log_p.sub_(log_m).mul_(other).sum(1)
    q = torch.exp(log_q, out=other)
    of_student = log_q.sub_(log_m).mul_(q).sum(1)
    gradient = log_q.sub_(q.mul_(of_student.unsqueeze(1))).mul_(1 - beta)
    return beta * of_teacher + (1 - beta) * of_student, gradient


def _l1(log_q: Tensor, log_p: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    q = log_q.exp_()
    return _distance(q, log_p.exp_().neg_().add_(q), torch.empty_like(q))


def _tv(log_q: Tensor, log_p: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    losses, gradient = _l1(log_q, log_p, beta)
    return losses.mul_(0.5), gradient.mul_(0.5)


def _distance(q: Tensor, difference: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """The l1 of q and `difference`, q - p, and its gradient, computed in `out`; the other two are kept."""
    losses = torch.abs(difference, out=out).sum(1)
    signed = torch.sign(difference, out=out).mul_(q)
    return losses, signed.addcmul_(q, signed.sum(1, keepdim=True), value=-1)


def _nla(log_q: Tensor, log_p: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    # With r = min(p, q) / a and the part m of min(p, q) that is q's, 1, 0, or 1/2 where p = q, the gradient is
    # q sum(r m) - r m. Both come from logarithms, because a itself may be 0 in float32.
    smaller = torch.minimum(log_q, log_p)
    of_student = log_p.sub_(log_q).sign_().add_(1).mul_(0.5)
    greatest = smaller.amax(1, keepdim=True)
    r = smaller.sub_(greatest).exp_()
    total = r.sum(1, keepdim=True)
    product = r.div_(total).mul_(of_student)
    return greatest.add_(total.log_()).neg_().squeeze(1), log_q.exp_().mul_(product.sum(1, keepdim=True)).sub_(product)


def _lk(log_q: Tensor, log_p: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    kl_weight = acceptance(log_q, log_p).mul_(-3).exp_()
    l1_weight = (1 - kl_weight) / 2
    p = log_p.exp()
    kl = log_p.sub_(log_q).mul_(p).sum(1)
    q = log_q.exp_()
    gradient = p.neg_().add_(q)
    l1, l1_gradient = _distance(q, gradient, out=log_p)
    gradient.mul_(kl_weight.unsqueeze(1)).addcmul_(l1_gradient, l1_weight.unsqueeze(1))
    return kl_weight * kl + l1_weight * l1, gradient


def acceptance(log_q: Tensor, log_p: Tensor, log_mass: Tensor | None = None) -> Tensor:
    """sum(min(p, q)) of each row, (M,), in [0, 1]; it needs one further (M, V) buffer.

    Args:
        log_q: log-probabilities of the student, (M, V).
        log_p: log-probabilities of the teacher, (M, V).
        log_mass: added to the teacher's log-probabilities, (M,): the log of the probability of these V classes together
            where the teacher has more classes. None: 0.
    """
    if log_mass is None:
        return torch.minimum(log_q, log_p).exp_().sum(1).clamp_(max=1)
    smaller = log_p + log_mass.clamp(max=0).unsqueeze(1)
    return torch.minimum(log_q, smaller, out=smaller).exp_().sum(1).clamp_(max=1)


class _Formula(NamedTuple):
    """A divergence.

    compute: (log_q, log_p, beta) -> losses (M,) and gradient (M, V), from the log-probabilities of student and teacher,
        (M, V). It overwrites both.
    buffers: the number of further (M, V) buffers that it needs, the gradient included if it is in neither of the two.
    """

    compute: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
    buffers: int


DIVERGENCES = {
    "forward_kl": _Formula(_forward_kl, 1),
    "reverse_kl": _Formula(_reverse_kl, 1),
    "jsd": _Formula(_jsd, 2),
    "tv": _Formula(_tv, 1),
    "l1": _Formula(_l1, 1),
    "nla": _Formula(_nla, 1),
    "lk": _Formula(_lk, 1),
}
