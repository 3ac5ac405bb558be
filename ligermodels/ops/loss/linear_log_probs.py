"""Log-probabilities of given tokens straight from hidden states, by chunks of rows: what reinforcement learning and
preference losses are made of.

With effective logits x as at the head of `token_losses`, p = softmax(x) and lse = log sum exp x, each row has

    log_prob = x_y - lse        entropy = -sum p log p = lse - sum p x        lse

    d log_prob / dx_j = [j = y] - p_j        d entropy / dx_j = p_j (lse - entropy - x_j)        d lse / dx_j = p_j

The log-probability is minus the cross entropy, so that all of it is one pass of `linear_rows`. What the gradients are
multiplied by is known only in the backward pass. If the head is trained, that pass recomputes the logits: four GEMMs in
all. If only the hidden states need a gradient, the forward pass computes that of each row's log-probability, and the
backward pass multiplies it by the row's factor: two GEMMs, whatever the loss.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.ops.loss.chunks import checked_head, linear_rows
from ligermodels.ops.loss.token_losses import LossOptions, check_targets, effective_logits, ranks_reference
from ligermodels.ops.runtime.library import once_differentiable


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
    memory_budget: int = 2**30,
    num_targets: int | None = None,
) -> Tensor | TokenLogProbs:
    """log softmax(x)[target] of x = hidden @ weight.T + bias, scaled and softcapped, without the logits in memory.

    hidden: (..., H), any floating dtype and strides. weight: (V, H) and bias: (V,), of hidden's dtype (under autocast
        all three are cast to its dtype).
    target: (...), int64, in [0, V) or ignore_index: such rows have log-probability, entropy and log-sum-exp 0, and a
        gradient of exact zeros.
    softcap: x becomes softcap * tanh(x / softcap). logit_scale: multiplied into the logits first; 1 / temperature.
    return_entropy: also the entropy of softmax(x); return_lse: log sum exp x.
    return_predicted: also the class of the greatest logit, the first of equal ones, int64, -1 for ignored rows.
    return_rank: as in `cross_entropy`; it is 0 exactly where the prediction is the target.
    memory_budget, num_targets: as in `linear_cross_entropy`.
    Returns the log-probabilities, (...), float32 (float64 for float64 hidden) as are entropy and lse; with any of the
    return_... a `TokenLogProbs`.
    log_probs, entropy and lse are differentiable by hidden, weight and bias, with any gradient of each token; a
    gradient is computed exactly if its own operand requires it. If only hidden does, and it is not float16 (where the
    gradients of logits underflow without the loss scale), its gradients of the log-probabilities are kept from the
    forward pass, (..., H), and rounded before each is multiplied; a loss that uses the entropy or lse too recomputes
    the logits instead. So detach what is only logged; in a compiled graph whatever is asked for counts as used.
    Raises InputError if shapes, dtypes, devices or options do not fit, or, on the CPU, for a target out of range; on
    CUDA such a target fails a device-side assertion.
    """
    options = LossOptions(ignore_index, softcap=softcap, logit_scale=logit_scale, return_rank=return_rank)
    head = checked_head(
        "linear_log_probs", hidden, weight, target, bias, None, "none", options, memory_budget, num_targets
    )
    asked = (return_entropy, return_lse, return_predicted, return_rank)
    log_probs, *others = _LinearLogProbs.apply(*head, options, asked, memory_budget)
    if not any(asked):
        return log_probs
    return TokenLogProbs(log_probs, *(x if wanted else None for x, wanted in zip(others, asked, strict=True)))


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


class _LinearLogProbs(torch.autograd.Function):
    """Log-probabilities, entropies, log-sum-exps, predicted classes and ranks; empty where not asked for."""

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, target, loss_weights, num_targets, needs, options, asked, memory_budget
    ):  # fmt: skip
        return_entropy, return_lse, return_predicted, _ = asked
        kept = needs == (True, False, False) and hidden.dtype != torch.float16
        # log_prob is minus the loss.
        losses, rank, predicted, entropy, lse, dx, _, _ = linear_rows(
            hidden, weight, bias, target, -loss_weights, None, None, *options, return_predicted, return_entropy,
            return_lse, memory_budget, num_targets, kept, False, False,
        )  # fmt: skip
        ctx.save_for_backward(hidden, weight, bias, target, dx if kept else None)
        ctx.options = (*options._replace(return_rank=False), False, False, False, memory_budget, num_targets)
        ctx.asked = (return_entropy, return_lse)
        ctx.set_materialize_grads(False)  # None tells what the loss does not use
        ctx.mark_non_differentiable(
            predicted, rank, *(x for x, used in ((entropy, return_entropy), (lse, return_lse)) if not used)
        )
        return 0 - losses, entropy, lse, predicted, rank  # an ignored row has 0, not -0

    @staticmethod
    @once_differentiable
    def backward(ctx, of_log_probs, of_entropy, of_lse, *_):
        *inputs, target, dx = ctx.saved_tensors
        # A compiled graph has zeros for None, also for what was not asked for.
        of_entropy, of_lse = (g if used else None for g, used in zip((of_entropy, of_lse), ctx.asked, strict=True))
        if of_log_probs is None:
            of_log_probs = torch.zeros_like(target, dtype=torch.promote_types(inputs[0].dtype, torch.float32))
        if dx is not None and of_entropy is None and of_lse is None:
            return ((dx * of_log_probs.unsqueeze(-1)).to(dx.dtype),)
        return linear_rows(*inputs, target, -of_log_probs, of_entropy, of_lse, *ctx.options, *ctx.needs_input_grad[:3])[
            5:
        ]
