"""`losses.grpo_loss` in all its kinds against the papers' formulas, written in float64, token by token."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_losses import LENGTH, assert_same, draw, sigmoid
from torch import Tensor

from ligermodels import losses


def clip(x: Tensor, low: float, high: float) -> Tensor:
    return x if low <= x <= high else torch.tensor(low if x < low else high, dtype=x.dtype)


def ppo(ratio: Tensor, a: Tensor, _: Tensor, low: float = 0.2, high: float = 0.2, delta: float = math.inf) -> Tensor:
    bounded = ratio if ratio <= delta else torch.tensor(delta, dtype=ratio.dtype)
    return -torch.minimum(bounded * a, clip(ratio, 1 - low, 1 + high) * a)


def sapo(ratio: Tensor, a: Tensor, _: Tensor, positive: float = 1.0, negative: float = 1.05) -> Tensor:
    tau = positive if a > 0 else negative
    return -sigmoid(tau * (ratio - 1)) * 4 / tau * a


def cispo(ratio: Tensor, a: Tensor, log_prob: Tensor) -> Tensor:
    return -min(ratio.item(), 1.3) * a * log_prob


def by_sequence(rows: list[list[Tensor]]) -> Tensor:
    return sum(sum(row) / len(row) for row in rows) / len(rows)


def by_token(rows: list[list[Tensor]]) -> Tensor:
    return sum(sum(row) for row in rows) / sum(len(row) for row in rows)


GRPO: dict[str, tuple[dict[str, Any], Callable[..., Tensor], Callable[..., Tensor]]] = {
    "grpo": ({}, ppo, by_sequence),
    "grpo asymmetric": (
        {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.4}, lambda *x: ppo(*x, 0.1, 0.3, 1.4), by_sequence
    ),
    "bnpo": ({"epsilon": 0.1}, lambda *x: ppo(*x, 0.1, 0.1), by_token),
    "dr_grpo": (
        {"max_completion_length": 20}, ppo, lambda rows: sum(sum(row) for row in rows) / (len(rows) * 20)
    ),
    "dapo": ({"epsilon_high": 0.28}, lambda *x: ppo(*x, 0.2, 0.28), by_token),
    "dapo of a larger batch": (
        {"num_items_in_batch": torch.tensor(77)}, ppo, lambda rows: sum(sum(row) for row in rows) / 77
    ),
    "cispo": ({"epsilon_high": 1.3}, cispo, by_token),
    "sapo": ({}, sapo, by_sequence),
    "sapo warm": (
        {"sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0}, lambda *x: sapo(*x, 0.5, 2.0), by_sequence
    ),
}  # fmt: skip
KL: dict[str, dict[str, Any]] = {
    "no reference": {},
    "kl": {"beta": 0.3},
    "unbiased kl": {"beta": 0.3, "use_bias_correction_kl": True},
}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("of_tokens", [False, True])
@pytest.mark.parametrize("kl", KL)
@pytest.mark.parametrize("name", GRPO)
def test_grpo(name: str, kl: str, level: str, of_tokens: bool) -> None:
    options, surrogate, reduce = GRPO[name]
    rows = 7
    log_probs, old, mask = draw(rows, scale=0.5)
    ref = log_probs.detach() + 0.4 * torch.randn(rows, LENGTH, dtype=torch.float64)
    advantages = torch.randn(rows, LENGTH if of_tokens else 1, dtype=torch.float64)
    terms, kls = [], []
    for i in range(rows):
        places = [t for t in range(LENGTH) if mask[i, t]]
        difference = [log_probs[i, t] - old[i, t] for t in places]
        if level == "sequence":
            difference = [sum(difference) / len(places)] * len(places)
        row = []
        for t, x in zip(places, difference, strict=True):
            term = surrogate(x.exp(), advantages[i, t if of_tokens else 0], log_probs[i, t])
            if KL[kl]:
                u = (ref[i, t] - log_probs[i, t]).exp()
                kls.append((u - u.log() - 1) * (x.exp() if "use_bias_correction_kl" in KL[kl] else 1))
                term = term + 0.3 * kls[-1]
            row.append(term)
        terms.append(row)
    found = losses.grpo_loss(
        log_probs, advantages if of_tokens else advantages[:, 0], mask, old, ref if KL[kl] else None,
        loss_type=name.split()[0], importance_sampling_level=level, **options, **KL[kl],
    )  # fmt: skip
    assert_same(found.loss, reduce(terms), log_probs)
    assert (found.kl is None) == (not kls)
    if found.kl is not None:
        torch.testing.assert_close(found.kl, torch.stack(kls).mean().detach())


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo"])
def test_shares_of_clipped_ratios(loss_type: str) -> None:
    """Of five tokens that count, with ratios on either side of both bounds, and one that does not count."""
    ratios = torch.tensor([[0.7, 1.0, 1.4, 9.0], [0.7, 0.7, 1.4, 9.0]])
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    advantages = torch.tensor([1.0, -1.0])
    options = {"epsilon_high": 1.3} if loss_type == "cispo" else {}

    def found(level: str) -> losses.GRPOLoss:
        return losses.grpo_loss(
            ratios.log(), advantages, mask, torch.zeros(2, 4), loss_type=loss_type, importance_sampling_level=level,
            **options,
        )  # fmt: skip

    wanted = {
        ("dapo", "token"): (2 / 5, 1 / 5, 3 / 5),
        ("dapo", "sequence"): (1 / 2, 0.0, 1 / 2),
        ("cispo", "token"): (0.0, 1 / 5, 1 / 5),
        ("cispo", "sequence"): (0.0, 0.0, 0.0),
    }
    for level in ("token", "sequence"):
        shares = found(level)[2:]
        if loss_type == "sapo":
            assert shares == (None, None, None)
        else:
            assert shares == pytest.approx(wanted[loss_type, level])


def test_on_policy_the_old_log_probs_may_be_left_out() -> None:
    log_probs, _, mask = draw(6)
    advantages = torch.randn(6)
    found, wanted = (
        losses.grpo_loss(log_probs, advantages, mask, old, loss_type="grpo").loss for old in (None, log_probs.detach())
    )
    assert_same(found, wanted, log_probs)


def test_losses_are_in_the_dtype_of_the_policy() -> None:
    """Also beside log-probabilities of a reference in float64."""
    log_probs, other, mask = -torch.rand(4, 3), -torch.rand(4, 3, dtype=torch.float64), torch.ones(4, 3).bool()
    found = losses.grpo_loss(log_probs, torch.ones(4), mask, other, other, beta=0.1)
    kto = losses.kto_loss(log_probs, other, mask, mask[:, 0], other.new_ones(()))
    dpo = losses.dpo_loss(log_probs, other, mask)
    assert {x.dtype for x in (found.loss, found.kl, *kto, *dpo)} == {torch.float32}  # type: ignore[union-attr]
