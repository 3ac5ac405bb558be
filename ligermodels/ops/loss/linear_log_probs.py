"""Log-probabilities of tokens from hidden states, by chunks of rows, for reinforcement learning and preference losses.

The log-probability is minus the cross entropy; `linear_statistics` has the formulas.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.arguments import check_flags
from ligermodels.errors import InputError
from ligermodels.ops.loss.linear_head import checked_head
from ligermodels.ops.loss.linear_statistics import linear_statistics
from ligermodels.ops.loss.row_statistics import effective_logits, ranks_reference
from ligermodels.ops.loss.sampler import checked_sampler, dropped_reference, inverse_temperatures
from ligermodels.ops.loss.token_losses import LossOptions, RowOutputs, check_targets


class TokenLogProbs(NamedTuple):
    """Results of `linear_log_probs` for each token, each of the target's shape; None if not requested."""

    log_probs: Tensor
    entropy: Tensor | None
    lse: Tensor | None
    predicted: Tensor | None
    rank: Tensor | None
    log_kept_mass: Tensor | None = None


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: Tensor | float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    return_entropy: bool = False,
    return_lse: bool = False,
    return_predicted: bool = False,
    return_rank: bool = False,
    return_log_kept_mass: bool = False,
    entropy_in_loss: bool = False,
    memory_budget: int = 2**30,
    num_targets: int | None = None,
) -> Tensor | TokenLogProbs:
    """Log-probabilities log softmax(x)[target] of x = hidden @ weight.T + bias, without the logits in memory.

    With a temperature and top-k, top-p or min-p they are those of a sampler: over the classes that it keeps, by the
    rules of transformers' warpers and in their order (temperature, top-k, top-p, min-p; see `sampler`). So they, the
    entropy and lse are of softmax(x / temperature) over the kept classes; a target that is not kept has
    log-probability -inf. The gradient takes the kept classes as constant: it is that of log_softmax over logits in
    which the others are masked by -inf. So mask rows of -inf in a loss.

    `log_probs`, `entropy` and `lse` are differentiable by hidden, weight and bias, with any gradient of each token; a
    gradient is computed only if its operand requires it. If only `hidden` requires one and is not float16 (where
    gradients of logits underflow without the loss scale), the forward pass keeps the gradients of the log-probabilities
    by `hidden`, (..., H), rounded before each is multiplied: two matrix products in all. A loss that also uses the
    entropy or lse recomputes the logits instead, with four products, or three with `entropy_in_loss`. So detach results
    that are only logged; in a compiled graph every requested result counts as used. If `weight` requires a gradient,
    there are three products, and a fourth one for rows whose logits the forward pass cannot keep for the backward pass:
    it keeps them, on GPUs and not in compiled graphs, within `memory_budget` and in the memory of the weight's
    gradient (`kept_logits`).

    Args:
        hidden: hidden states, (..., H), any floating dtype and strides.
        weight: (V, H), the dtype of `hidden`; under autocast both are cast to its dtype. It may be a DTensor that is
            sharded by classes, over ranks with the same hidden states and targets.
        target: tokens, int64 (...), in [0, V) or `ignore_index`.
        bias: (V,), the dtype and sharding of `weight`; by default none.
        ignore_index: the target of ignored rows, which have log-probability, entropy and log-sum-exp 0, and a gradient
            of exact zeros. Default: -100.
        softcap: positive: x becomes softcap * tanh(x / softcap). Default: no cap.
        logit_scale: positive factor of the logits, before the softcap. Default: 1.
        temperature: positive, divides the logits after the softcap: a number, or floating, of the target's shape, for
            each row its own, without a gradient. Default: 1.
        top_k: keep the k largest logits of a row, and those equal to the k-th; None or 0 (default) keeps all.
        top_p: in [0, 1]: keep the fewest most probable classes with a total probability of at least top_p. Of classes
            with equal logits the last ones are kept. Default: None, all.
        min_p: in [0, 1]: drop classes less probable than min_p times the highest probability. Default: None, no class.
        return_entropy: also return the entropy of softmax(x).
        return_lse: also return log sum exp x.
        return_predicted: also return the class of the largest logit, the first one of equal logits, int64, -1 for
            ignored rows.
        return_rank: also return the number of classes that rank before the target, int64, -1 for ignored rows; 0
            exactly where the predicted class is the target.
        return_log_kept_mass: also return the log of the probability, by softmax(x / temperature), of the kept classes
            together, without a gradient; 0 for ignored rows. log_probs + log_kept_mass are the log-probabilities over
            all classes.
        entropy_in_loss: whether the loss will use the entropy or lse. It changes no result, only when the gradients are
            computed.
        memory_budget: bytes for the logits of a chunk and everything computed from them; a chunk has at least one row.
            If `weight` requires a gradient, logits that are kept for the backward pass count too, up to all of them.
            Default: 1 GiB.
        num_targets: the number of targets that are not ignored, if the host knows it: the GEMMs then skip ignored rows,
            and a copy of the other hidden states is kept. On the CPU it is counted.

    Returns:
        The log-probabilities, (...), float32 (float64 for float64 `hidden`); with any of the `return_` flags a
        `TokenLogProbs`.

    Raises:
        InputError: shapes, dtypes, devices or options do not fit, or, on the CPU, a target is out of range or
            the temperature of a row with a target is not positive and finite. On CUDA these fail a device-side
            assertion.

    Examples:
        >>> hidden = torch.randn(2, 16, 64, requires_grad=True)
        >>> weight, tokens = torch.randn(1000, 64), torch.randint(1000, (2, 16))
        >>> log_probs = ops.linear_log_probs(hidden, weight, tokens, logit_scale=1 / 0.7)
        >>> (-log_probs.mean()).backward()
    """
    check_flags(
        "linear_log_probs", return_entropy=return_entropy, return_lse=return_lse, return_predicted=return_predicted,
        return_rank=return_rank, return_log_kept_mass=return_log_kept_mass, entropy_in_loss=entropy_in_loss,
    )  # fmt: skip
    if entropy_in_loss and not (return_entropy or return_lse):
        raise InputError("linear_log_probs: entropy_in_loss goes with return_entropy or return_lse")
    options = LossOptions(ignore_index, softcap=softcap, logit_scale=logit_scale)
    sampled = checked_sampler("linear_log_probs", top_k, top_p, min_p)
    head = checked_head(
        "linear_log_probs", hidden, weight, target, bias, options, memory_budget=memory_budget, num_targets=num_targets
    )
    outputs = RowOutputs(return_rank, return_predicted, return_entropy, return_lse)
    temperatures = inverse_temperatures("linear_log_probs", temperature, target, ignore_index, head.loss_weights.dtype)
    if temperatures is not None and head.selection is not None:
        temperatures = head.selection.take(temperatures)
    rows = linear_statistics(
        head, options, outputs, keep=not entropy_in_loss, inverse_temperatures=temperatures, sampled=sampled
    )
    log_probs = 0 - head.restore(rows.losses, 0)  # an ignored row has 0, not -0
    if not any(outputs) and not return_log_kept_mass:
        return log_probs
    log_masses = torch.zeros_like(rows.losses) if rows.log_masses is None else rows.log_masses
    return TokenLogProbs(
        log_probs,
        head.restore(rows.entropies, 0),
        head.restore(rows.lses, 0),
        head.restore(rows.predicted, -1),
        head.restore(rows.ranks, -1),
        head.restore(torch.where(head.target == ignore_index, 0.0, log_masses), 0) if return_log_kept_mass else None,
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
    temperature: Tensor | float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    return_entropy: bool = False,
    return_lse: bool = False,
    return_predicted: bool = False,
    return_rank: bool = False,
    return_log_kept_mass: bool = False,
    entropy_in_loss: bool = False,
    memory_budget: int = 0,
    num_targets: int | None = None,
) -> Tensor | TokenLogProbs:
    """The specification of `linear_log_probs`, in plain torch, with all the logits.

    Args:
        hidden: (..., H).
        weight: (V, H).
        target: int64 (...).
        bias: (V,), or None.
        ignore_index: the target of ignored rows.
        softcap: positive, or None.
        logit_scale: positive.
        temperature: positive, a number or of the target's shape.
        top_k: 1 or more; None or 0 keeps all.
        top_p: in [0, 1], or None.
        min_p: in [0, 1], or None.
        return_entropy: whether to return the entropy.
        return_lse: whether to return the log-sum-exp.
        return_predicted: whether to return the predicted class.
        return_rank: whether to return the rank.
        return_log_kept_mass: whether to return the log of the kept mass.
        entropy_in_loss: not used.
        memory_budget: not used.
        num_targets: not used.
    """
    check_targets(target, weight.shape[0], ignore_index)
    sampled = checked_sampler("linear_log_probs_reference", top_k, top_p, min_p)
    logits, valid = torch.nn.functional.linear(hidden, weight, bias), target != ignore_index
    x = effective_logits(logits, valid, LossOptions(ignore_index, softcap=softcap, logit_scale=logit_scale))
    y = torch.where(valid, target, 0).unsqueeze(-1)
    x = x / (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)
    every = torch.logsumexp(x, -1)
    if sampled is not None:
        x = x.masked_fill(dropped_reference(x.detach(), sampled), -torch.inf)
    log_p = torch.log_softmax(x, -1)
    log_probs = torch.where(valid, log_p.gather(-1, y).squeeze(-1), 0.0)
    if not (return_entropy or return_lse or return_predicted or return_rank or return_log_kept_mass):
        return log_probs
    finite = log_p.masked_fill(log_p.isneginf(), 0.0)  # 0 times -inf would be NaN
    lse = torch.logsumexp(x, -1)
    return TokenLogProbs(
        log_probs,
        torch.where(valid, -(log_p.exp() * finite).sum(-1), 0.0) if return_entropy else None,
        torch.where(valid, lse, 0.0) if return_lse else None,
        torch.where(valid, logits.argmax(-1), -1) if return_predicted else None,
        ranks_reference(logits, y, valid) if return_rank else None,
        torch.where(valid, lse - every, 0.0).detach() if return_log_kept_mass else None,
    )
