"""Objectives of policy optimisation over sampled completions, from per-token log-probabilities."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.arguments import check_flag
from ligermodels.errors import InputError
from ligermodels.losses.sequences import (
    check_choice,
    check_finite,
    check_positive,
    check_rows_or_sequences,
    check_tokens,
    check_used,
    given,
    lengths,
    masked,
    per_item,
)

OP = "grpo_loss"
LEVELS = ("token", "sequence")


class GRPOLoss(NamedTuple):
    """The loss, (), and metrics, (), without a gradient.

    kl: the mean over tokens of the estimated divergence from the reference; None without a reference.
    clip_ratio: the fraction of tokens, or of sequences with sequence-level ratios, with a ratio beyond a bound in the
        direction of their advantage; clip_ratio_low and clip_ratio_high: for each bound. None without bounds.
    """

    loss: Tensor
    kl: Tensor | None
    clip_ratio_low: Tensor | None
    clip_ratio_high: Tensor | None
    clip_ratio: Tensor | None


Options = Mapping[str, Any]
Surrogate = Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor | None, Tensor | None]]


def _clipped(ratio: Tensor, advantages: Tensor, log_probs: Tensor, options: Options) -> Any:
    low, high = 1 - options["epsilon"], 1 + options["epsilon_high"]
    bounded = ratio if options["delta"] is None else ratio.clamp(max=options["delta"])
    losses = -torch.minimum(bounded * advantages, ratio.clamp(low, high) * advantages)
    return losses, (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)


def _cispo(ratio: Tensor, advantages: Tensor, log_probs: Tensor, options: Options) -> Any:
    highest = options["epsilon_high"]
    clipped = (ratio > highest) & (advantages > 0)
    return -ratio.detach().clamp(max=highest) * advantages * log_probs, torch.zeros_like(clipped), clipped


def _sapo(ratio: Tensor, advantages: Tensor, log_probs: Tensor, options: Options) -> Any:
    temperature = torch.full_like(advantages, options["sapo_temperature_neg"])
    temperature.masked_fill_(advantages > 0, options["sapo_temperature_pos"])
    return -4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * advantages, None, None


def _by_sequences(losses: Tensor, mask: Tensor, options: Options) -> Tensor:
    return losses / (lengths(mask) * len(mask)).unsqueeze(1)


def _by_tokens(losses: Tensor, mask: Tensor, options: Options) -> Tensor:
    return losses / mask.sum().clamp(min=1)


def _by_items(losses: Tensor, mask: Tensor, options: Options) -> Tensor:
    items = options["num_items_in_batch"]
    if items is None:
        return _by_tokens(losses, mask, options)
    items = items.to(losses.device) if isinstance(items, Tensor) else items
    return per_item(losses, items, f"{OP}: num_items_in_batch")


def _by_places(losses: Tensor, mask: Tensor, options: Options) -> Tensor:
    return losses / (len(mask) * options["max_completion_length"])


class _LossType(NamedTuple):
    """A loss type of `grpo_loss`.

    surrogate: (ratio, advantages, log_probs, options) -> the loss of each token; bool, clipped low; bool, clipped high.
    divided: (losses of tokens, mask, options) -> terms of the loss, whose sum is the loss.
    options: the options that it uses, with their defaults.
    """

    surrogate: Surrogate
    divided: Callable[[Tensor, Tensor, Options], Tensor]
    options: dict[str, float | None]


CLIPPING = {"epsilon": 0.2, "epsilon_high": None, "delta": None}
LOSS_TYPES = {
    "grpo": _LossType(_clipped, _by_sequences, CLIPPING),
    "bnpo": _LossType(_clipped, _by_tokens, CLIPPING),
    "dr_grpo": _LossType(_clipped, _by_places, {**CLIPPING, "max_completion_length": None}),
    "dapo": _LossType(_clipped, _by_items, {**CLIPPING, "num_items_in_batch": None}),
    "cispo": _LossType(_cispo, _by_items, {"epsilon_high": None, "num_items_in_batch": None}),
    "sapo": _LossType(_sapo, _by_sequences, {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}),
}


def grpo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    *,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    beta: float = 0.0,
    use_bias_correction_kl: bool = False,
    epsilon: float | None = None,
    epsilon_high: float | None = None,
    delta: float | None = None,
    sapo_temperature_pos: float | None = None,
    sapo_temperature_neg: float | None = None,
    max_completion_length: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
) -> GRPOLoss:
    """Group relative policy optimisation (https://arxiv.org/abs/2402.03300) and its relatives, under TRL's names.

    Computed in float32, float64 for float64 `log_probs`. Only `log_probs` get a gradient.

    Args:
        log_probs: of the policy, (B, T), of the completions' tokens.
        advantages: (B,), or (B, T) for each token. Weights of tokens, such as corrections for the sampler, multiply
            them.
        mask: bool (B, T), the tokens that count.
        old_log_probs: of the policy that sampled, (B, T). Default: `log_probs`, detached.
        ref_log_probs: of the reference, (B, T); needed for beta above 0.
        loss_type: with ratio = exp(log_probs - old_log_probs), A the advantage, and L = -min(min(ratio, delta) A,
            clip(ratio, 1 - epsilon, 1 + epsilon_high) A),
            "grpo"    L averaged over a sequence's tokens, then over sequences
            "bnpo"    L averaged over the tokens of this batch
            "dr_grpo" the sum of L over B * max_completion_length; https://arxiv.org/abs/2503.20783
            "dapo"    (default) the sum of L over num_items_in_batch; https://arxiv.org/abs/2503.14476
            "cispo"   -min(ratio, epsilon_high) A log_probs, the ratio without gradient, over num_items_in_batch;
                      https://arxiv.org/abs/2506.13585, with the bound of https://arxiv.org/abs/2510.13786: epsilon_high
                      is the bound itself, must be given, and is 5 there
            "sapo"    -4 / tau sigmoid(tau (ratio - 1)) A, tau = sapo_temperature_pos for A > 0, else
                      sapo_temperature_neg, averaged as "grpo"; https://arxiv.org/abs/2511.20347
        importance_sampling_level: "token" (default), or "sequence": the exponential of the sequence's mean difference
            of log-probabilities is the ratio of all its tokens, GSPO, https://arxiv.org/abs/2507.18071 (with "grpo").
        beta: weight of KL(policy || reference), estimated for each token as exp(d) - d - 1, d = ref_log_probs -
            log_probs (http://joschu.net/blog/kl-approx.html, k3). Default: 0.
        use_bias_correction_kl: multiply the estimate by the ratio, https://arxiv.org/abs/2512.02556. Default: False.
        epsilon: lower clip range. Default: 0.2.
        epsilon_high: upper clip range. Default: `epsilon`.
        delta: upper bound of the ratio for negative advantages, above 1 + epsilon_high. Default: no bound
            (https://arxiv.org/abs/2505.07291).
        sapo_temperature_pos: positive. Default: 1.0.
        sapo_temperature_neg: positive. Default: 1.05.
        max_completion_length: tokens; needed for "dr_grpo".
        num_items_in_batch: the number of tokens in all completions of an optimizer step, divided by the number of ranks
            if gradients are averaged over ranks. Default: the tokens of `mask`.

    Returns:
        `GRPOLoss`: the loss and metrics.

    Raises:
        InputError: shapes do not fit, a value is out of range, or an option is missing or not used.

    Examples:
        >>> log_probs = -torch.rand(4, 10, requires_grad=True)
        >>> advantages, mask = torch.tensor([1.0, -1.0, 0.5, -0.5]), torch.ones(4, 10, dtype=torch.bool)
        >>> grpo_loss(log_probs, advantages, mask, epsilon_high=0.28).loss.backward()
    """
    check_tokens(OP, log_probs, mask, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs)
    check_rows_or_sequences(OP, "advantages", advantages, mask)
    check_choice(OP, "importance_sampling_level", importance_sampling_level, LEVELS)
    chosen = given(
        epsilon=epsilon, epsilon_high=epsilon_high, delta=delta, sapo_temperature_pos=sapo_temperature_pos,
        sapo_temperature_neg=sapo_temperature_neg, max_completion_length=max_completion_length,
        num_items_in_batch=num_items_in_batch,
    )  # fmt: skip
    options = _checked_options(loss_type, chosen)
    check_finite(OP, beta=beta)
    check_flag(f"{OP}: use_bias_correction_kl", use_bias_correction_kl)
    if beta < 0:
        raise InputError(f"{OP}: beta must not be negative, got {beta}")
    if beta and ref_log_probs is None:
        raise InputError(f"{OP}: beta is {beta}, which needs ref_log_probs")
    if use_bias_correction_kl and ref_log_probs is None:
        raise InputError(f"{OP}: use_bias_correction_kl needs ref_log_probs")

    new = masked(log_probs, mask)
    old = new.detach() if old_log_probs is None else masked(old_log_probs.detach(), mask).to(new.dtype)
    advantages = advantages.detach().to(new.dtype)
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else torch.where(mask, advantages, 0.0)
    log_ratio = new - old
    if importance_sampling_level == "sequence":
        log_ratio = (log_ratio.sum(1) / lengths(mask)).unsqueeze(1)
    ratio = log_ratio.exp()
    surrogate, divided, _ = LOSS_TYPES[loss_type]
    losses, low, high = surrogate(ratio, advantages, new, options)
    kl = None
    if ref_log_probs is not None:
        difference = masked(ref_log_probs.detach(), mask).to(new.dtype) - new
        kl = torch.expm1(difference) - difference
        kl = kl * ratio if use_bias_correction_kl else kl
        losses = losses + beta * kl if beta else losses
    loss = divided(torch.where(mask, losses, 0.0), mask, options).sum()
    either = None if low is None or high is None else low | high
    return GRPOLoss(loss, *(_mean(x, mask) for x in (kl, low, high, either)))


def _checked_options(loss_type: str, chosen: Mapping[str, Any]) -> Options:
    """The options of the loss type: those `chosen`, and its defaults."""
    check_choice(OP, "loss_type", loss_type, LOSS_TYPES)
    defaults = LOSS_TYPES[loss_type].options
    check_used(OP, loss_type, defaults, **chosen)
    for name, value in chosen.items():
        if name == "num_items_in_batch":
            check_finite(OP, **{name: value})
        elif name not in CLIPPING or not isinstance(value, float) or value != math.inf:  # such a range does not clip
            check_positive(OP, **{name: value})
    options = {**defaults, **chosen}
    if "epsilon" in options and options["epsilon_high"] is None:
        options["epsilon_high"] = options["epsilon"]
    for name in ("epsilon_high", "max_completion_length"):
        if name in options and options[name] is None:
            raise InputError(f"{OP}: loss_type {loss_type!r} needs {name}")
    if options.get("delta") is not None and options["delta"] <= 1 + options["epsilon_high"]:
        raise InputError(
            f"{OP}: delta must be above 1 + epsilon_high, {1 + options['epsilon_high']}; got {options['delta']}"
        )
    return options


def _mean(x: Tensor | None, mask: Tensor) -> Tensor | None:
    """The mean of x (B, T) over the mask, or of x (B, 1) over sequences that have tokens."""
    if x is None:
        return None
    counted = mask if x.shape == mask.shape else mask.any(1, keepdim=True)
    dtype = x.dtype if x.is_floating_point() else torch.float32
    return torch.where(counted, x.detach().to(dtype), 0.0).sum() / counted.sum().clamp(min=1)
