"""The losses of objectives on preference data, by name, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.losses.preference import LOSS_TYPES, PreferenceLoss, cpo_loss, dpo_loss, orpo_loss, simpo_loss
from ligermodels.losses.sequences import lengths, sequence_log_probs
from ligermodels.losses.unpaired import kto_loss
from ligermodels.training.objective_evaluation import Metrics


class Scores(NamedTuple):
    """Log-probabilities of a batch's sequences: of pairs the B chosen, then the B rejected ones; or B single ones.

    log_probs: (S, T), with a gradient.
    mask: bool (S, T), tokens of the completions.
    nll_mask: bool (S, T), tokens of the likelihood: those of the completions, and with `prompt_targets` of prompts.
    num_nll_tokens: divisor of the chosen's summed negative log-likelihood, ().
    ref_log_probs: of the completions by the reference, (S,), or None.
    desirable: bool (B,), labels of single sequences, or None.
    kl: estimate of the KL divergence from the reference, (), or None.
    """

    log_probs: Tensor
    mask: Tensor
    nll_mask: Tensor
    num_nll_tokens: Tensor
    ref_log_probs: Tensor | None = None
    desirable: Tensor | None = None
    kl: Tensor | None = None


class ItemLosses(NamedTuple):
    """The losses of a batch.

    losses: of each pair or single sequence, (B,).
    rewards: of each sequence, (S,), without a gradient; None: there are none.
    metrics: further metrics without a gradient: () or of each item (B,).
    """

    losses: Tensor
    rewards: Tensor | None = None
    metrics: Mapping[str, Tensor] = {}


class PreferenceObjective(NamedTuple):
    """An objective on preference data.

    losses: (scores, settings) -> the losses and rewards.
    uses_reference: whether it needs the reference's log-probabilities.
    averages: whether its log-probabilities are means over a completion's tokens, not sums; of the metrics, as TRL's.
    is_custom: whether `losses` is a user's function.
    """

    losses: Callable[[Scores, Mapping[str, Any]], ItemLosses]
    uses_reference: bool = False
    averages: bool = False
    is_custom: bool = False


def _of_pairs(result: PreferenceLoss) -> ItemLosses:
    return ItemLosses(result.loss, torch.cat([result.chosen_rewards, result.rejected_rewards]))


def _dpo(scores: Scores, settings: Mapping[str, Any]) -> ItemLosses:
    """One or several loss types, weighted and summed, as TRL's `loss_type` and `loss_weights`."""
    options = dict(settings)
    types = options.pop("loss_type", ("sigmoid",))
    weights = options.pop("loss_weights", (1.0,) * len(types))
    used = {name for each in types for name in _options_of(each)}
    total, rewards = scores.log_probs.new_zeros(()), None
    for loss_type, weight in zip(types, weights, strict=True):
        # A type gets its own options, and those that no type has: these are an error that names them.
        own = {name: value for name, value in options.items() if name in _options_of(loss_type) or name not in used}
        result = dpo_loss(
            scores.log_probs, scores.ref_log_probs, scores.mask, loss_type=loss_type,  # type: ignore[arg-type]
            num_nll_tokens=scores.num_nll_tokens, reduction="none", **own,
        )  # fmt: skip
        total = total + weight * result.loss
        rewards = rewards or result
    return _of_pairs(rewards._replace(loss=total))  # type: ignore[union-attr]


def _options_of(loss_type: str) -> set[str]:
    known = LOSS_TYPES[loss_type].options if loss_type in LOSS_TYPES else ()
    more = ("f_alpha_divergence_coef",) if "f_divergence_type" in known else ()
    return {"beta", *known, *more}


def _orpo(scores: Scores, settings: Mapping[str, Any]) -> ItemLosses:
    nll: dict[str, Any] = {"nll_mask": scores.nll_mask, "num_nll_tokens": scores.num_nll_tokens}
    return _of_pairs(orpo_loss(scores.log_probs, scores.mask, reduction="none", **nll, **settings))


def _cpo(scores: Scores, settings: Mapping[str, Any]) -> ItemLosses:
    options = {"num_nll_tokens": scores.num_nll_tokens, **one_type("cpo", settings)}
    return _of_pairs(cpo_loss(scores.log_probs, scores.mask, reduction="none", **options))


def _kto(scores: Scores, settings: Mapping[str, Any]) -> ItemLosses:
    found = kto_loss(
        scores.log_probs, scores.ref_log_probs, scores.mask, scores.desirable, scores.kl,  # type: ignore[arg-type]
        reduction="none", **one_type("kto", settings),
    )  # fmt: skip
    return ItemLosses(found.loss, found.rewards)


def one_type(objective: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with the only loss type."""
    options = dict(settings)
    types = options.pop("loss_type", ())
    if len(types) > 1:
        raise InputError(f"loss_type: the objective {objective} has one loss type, got {', '.join(types)}")
    return {**options, "loss_type": types[0]} if types else options


PREFERENCE = {
    "dpo": PreferenceObjective(_dpo, uses_reference=True),
    "ipo": PreferenceObjective(
        lambda scores, settings: _dpo(scores, {**settings, "loss_type": ("ipo",)}), uses_reference=True
    ),
    "orpo": PreferenceObjective(_orpo, averages=True),
    "simpo": PreferenceObjective(
        lambda scores, settings: _of_pairs(simpo_loss(scores.log_probs, scores.mask, reduction="none", **settings)),
        averages=True,
    ),
    "cpo": PreferenceObjective(_cpo),
    "kto": PreferenceObjective(_kto, uses_reference=True),
}
"""Objectives on preference data by name."""


def metrics_of(scores: Scores, result: ItemLosses, counted: Tensor, *, averages: bool) -> Metrics:
    """Metrics by TRL's names: rewards and log-probabilities of chosen and rejected sequences; of pairs also how often
    the chosen has the higher reward, and by how much.

    Args:
        scores: log-probabilities of the sequences.
        result: losses and rewards.
        counted: bool (S,), sequences that count.
        averages: whether log-probabilities are averaged over tokens.
    """
    with torch.no_grad():
        sums = sequence_log_probs(scores.log_probs, scores.mask)
        values = {"logps": sums / lengths(scores.mask) if averages else sums}
        if result.rewards is not None:
            values["rewards"] = result.rewards
        if scores.desirable is None:
            sides = counted.chunk(2)
            split = {name: value.chunk(2) for name, value in values.items()}
        else:
            sides = (counted & scores.desirable, counted & ~scores.desirable)
            split = {name: (value, value) for name, value in values.items()}
        metrics = {
            f"{name}/{side}": _mean(value, mask)
            for name, pair in split.items()
            for side, value, mask in zip(("chosen", "rejected"), pair, sides, strict=True)
        }
        if scores.desirable is None and "rewards" in split:
            chosen, rejected = split["rewards"]
            metrics["rewards/accuracies"] = _mean((chosen > rejected).to(chosen.dtype), sides[0])
            metrics["rewards/margins"] = _mean(chosen - rejected, sides[0])
        if scores.kl is not None:
            metrics["kl"] = scores.kl.clamp(min=0), torch.ones_like(scores.kl)
        items = counted[: len(result.losses)]
        for name, value in result.metrics.items():
            metrics[name] = _mean(value.to(sums.dtype), items)
    return metrics


def _mean(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the values in the mask, and their number."""
    return torch.where(mask, values, 0.0).sum(), mask.sum().to(values.dtype)
