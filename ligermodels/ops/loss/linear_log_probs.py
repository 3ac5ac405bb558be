"""Log-probabilities of given tokens straight from hidden states, by chunks of rows: what reinforcement learning and
preference losses are made of.

The log-probability is minus the cross entropy, so that all of it is one pass of `linear_numbers`, which has the
formulas.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.loss.chunks import checked_head
from ligermodels.ops.loss.linear_numbers import linear_numbers
from ligermodels.ops.loss.token_losses import LossOptions, check_targets, effective_logits, ranks_reference


class TokenLogProbs(NamedTuple):
    """What `linear_log_probs` gives of each token, each of target's shape; None for what was not asked for."""

    log_probs: Tensor
    entropy: Tensor | None
    lse: Tensor | None
    predicted: Tensor | None
    rank: Tensor | None


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    return_lse: bool = False,
    return_predicted: bool = False,
    return_rank: bool = False,
    entropy_in_loss: bool = False,
    memory_budget: int = 2**30,
    num_targets: int | None = None,
) -> Tensor | TokenLogProbs:
    """log softmax(x)[target] of x = hidden @ weight.T + bias, scaled and softcapped, without the logits in memory.

    hidden: (..., H), any floating dtype and strides. weight: (V, H) and bias: (V,), of hidden's dtype (under autocast
        all three are cast to its dtype); they may be sharded by classes, as in `linear_cross_entropy`.
    target: (...), int64, in [0, V) or ignore_index: such rows have log-probability, entropy and log-sum-exp 0, and a
        gradient of exact zeros.
    softcap: x becomes softcap * tanh(x / softcap). logit_scale: multiplied into the logits first; 1 / temperature.
    return_entropy: also the entropy of softmax(x); return_lse: log sum exp x.
    return_predicted: also the class of the greatest logit, the first of equal ones, int64, -1 for ignored rows.
    return_rank: as in `cross_entropy`; it is 0 exactly where the prediction is the target.
    entropy_in_loss: whether the loss will use the entropy or lse. It changes no result, only what is computed when: see
        below.
    memory_budget, num_targets: as in `linear_cross_entropy`.
    Returns the log-probabilities, (...), float32 (float64 for float64 hidden) as are entropy and lse; with any of the
    return_... a `TokenLogProbs`.
    log_probs, entropy and lse are differentiable by hidden, weight and bias, with any gradient of each token; a
    gradient is computed exactly if its own operand requires it. If only hidden does, and it is not float16 (where the
    gradients of logits underflow without the loss scale), its gradients of the log-probabilities are kept from the
    forward pass, (..., H), and rounded before each is multiplied: two matrix products in all. A loss that uses the
    entropy or lse too recomputes the logits instead, four products, or three if `entropy_in_loss` says so before. So
    detach what is only logged; in a compiled graph whatever is asked for counts as used.
    Raises InputError if shapes, dtypes, devices or options do not fit, or, on the CPU, for a target out of range; on
    CUDA such a target fails a device-side assertion.
    """
    if entropy_in_loss and not (return_entropy or return_lse):
        raise InputError("linear_log_probs: entropy_in_loss goes with return_entropy or return_lse")
    options = LossOptions(
        ignore_index, softcap=softcap, logit_scale=logit_scale, return_rank=return_rank,
        return_predicted=return_predicted,
    )  # fmt: skip
    head = checked_head(
        "linear_log_probs", hidden, weight, target, bias, None, "none", options, memory_budget, num_targets
    )
    found = linear_numbers(
        head, options, memory_budget, return_entropy=return_entropy, return_lse=return_lse, keep=not entropy_in_loss
    )
    log_probs = 0 - found.losses  # an ignored row has 0, not -0
    if not (return_entropy or return_lse or return_predicted or return_rank):
        return log_probs
    return TokenLogProbs(
        log_probs,
        found.entropies if return_entropy else None,
        found.lses if return_lse else None,
        found.predicted if return_predicted else None,
        found.ranks if return_rank else None,
    )


def linear_log_probs_reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    return_lse: bool = False,
    return_predicted: bool = False,
    return_rank: bool = False,
    entropy_in_loss: bool = False,
    memory_budget: int = 0,
    num_targets: int | None = None,
) -> Tensor | TokenLogProbs:
    """The specification of `linear_log_probs`, in plain torch, with all the logits; the same arguments."""
    check_targets(target, weight.shape[0], ignore_index)
    logits, valid = torch.nn.functional.linear(hidden, weight, bias), target != ignore_index
    x = effective_logits(logits, valid, LossOptions(ignore_index, softcap=softcap, logit_scale=logit_scale))
    y = torch.where(valid, target, 0).unsqueeze(-1)
    log_p = torch.log_softmax(x, -1)
    log_probs = torch.where(valid, log_p.gather(-1, y).squeeze(-1), 0.0)
    if not (return_entropy or return_lse or return_predicted or return_rank):
        return log_probs
    finite = log_p.clamp(min=torch.finfo(log_p.dtype).min)  # 0 times -inf would be NaN
    return TokenLogProbs(
        log_probs,
        torch.where(valid, -(log_p.exp() * finite).sum(-1), 0.0) if return_entropy else None,
        torch.where(valid, torch.logsumexp(x, -1), 0.0) if return_lse else None,
        torch.where(valid, logits.argmax(-1), -1) if return_predicted else None,
        ranks_reference(logits, y, valid) if return_rank else None,
    )
