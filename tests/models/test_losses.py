"""The objectives of `ligermodels.losses` against their papers' formulas, written in float64, token by token."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ligermodels import losses, ops
from ligermodels.errors import InputError

PAIRS, LENGTH = 5, 11


def draw(rows: int, *, scale: float = 0.2, grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of a policy, those of a model near it, and a mask with holes and rows of all lengths, one of
    them of a single token. Outside the mask there is nan, which must not matter."""
    log_probs = -3 * torch.rand(rows, LENGTH, dtype=torch.float64) - 0.05
    other = (log_probs + scale * torch.randn_like(log_probs)).clamp(max=-1e-3)
    mask = torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (rows, 1))
    mask &= torch.rand(rows, LENGTH) < 0.8
    mask[:, 1] = True
    mask[1] = False
    mask[1, 4] = True
    for x in (log_probs, other):
        x[~mask] = math.nan
    return log_probs.requires_grad_(grad), other, mask


def row_sums(x: Tensor, mask: Tensor) -> list[Tensor]:
    return [sum((x[i, t] for t in range(x.shape[1]) if mask[i, t]), torch.zeros(())) for i in range(len(x))]


def lengths(mask: Tensor) -> list[int]:
    return [int(row.sum()) for row in mask]


def log_sigmoid(x: Tensor) -> Tensor:
    return -torch.log(1 + torch.exp(-x))


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def assert_same(found: Tensor, wanted: Tensor, *leaves: Tensor) -> None:
    """The values, and the gradients of the leaves, exactly 0 where the formula has none."""
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    direction = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad(x, leaves, direction, retain_graph=True) for x in (found, wanted))
    for one, two in zip(ours, theirs, strict=True):
        assert one.isfinite().all() and two.isfinite().all() and two.any()
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


# -- pairs -------------------------------------------------------------------------------------------------------------

BETA, EPSILON = 0.4, 0.15
Formula = Callable[[Tensor, Tensor, int, int], Tensor]
"""Log-ratios of chosen and rejected, and their numbers of tokens -> the loss."""


def dpo(c: Tensor, r: Tensor, e: float = 0.0) -> Tensor:
    return -(1 - e) * log_sigmoid(BETA * (c - r)) - e * log_sigmoid(BETA * (r - c))


def exo(c: Tensor, r: Tensor) -> Tensor:
    q = torch.softmax(BETA * torch.stack([c, r]), 0)
    return (q * (q / torch.tensor([1 - EPSILON, EPSILON], dtype=q.dtype)).log()).sum()


def discopop(m: Tensor, tau: float) -> Tensor:
    return (1 - sigmoid(m / tau)) * -log_sigmoid(m) + sigmoid(m / tau) * torch.exp(-m)


SMOOTHED = {"label_smoothing": EPSILON}
DPO: dict[str, tuple[dict[str, Any], Formula]] = {
    "sigmoid": ({}, lambda c, r, n, k: dpo(c, r)),
    "sigmoid smoothed": (SMOOTHED, lambda c, r, n, k: dpo(c, r, EPSILON)),
    "sigmoid_norm": ({}, lambda c, r, n, k: dpo(c / n, r / k)),
    "hinge": ({}, lambda c, r, n, k: (1 - BETA * (c - r)).clamp(min=0)),
    "ipo": ({}, lambda c, r, n, k: (c / n - r / k - 1 / (2 * BETA)) ** 2),
    "robust": (
        SMOOTHED, lambda c, r, n, k: ((1 - EPSILON) * dpo(c, r) - EPSILON * dpo(r, c)) / (1 - 2 * EPSILON)
    ),
    "exo_pair": (SMOOTHED, lambda c, r, n, k: exo(c, r)),
    "nca_pair": (
        {}, lambda c, r, n, k: -log_sigmoid(BETA * c) - (log_sigmoid(-BETA * c) + log_sigmoid(-BETA * r)) / 2
    ),
    "bco_pair": ({}, lambda c, r, n, k: -log_sigmoid(BETA * c) - log_sigmoid(-BETA * r)),
    "sppo_hard": ({}, lambda c, r, n, k: (c - (1 - 0.5) / BETA) ** 2 + (r - (0 - 0.5) / BETA) ** 2),
    "apo_zero": ({}, lambda c, r, n, k: -sigmoid(BETA * c) + sigmoid(BETA * r) + 1),
    "apo_down": ({}, lambda c, r, n, k: sigmoid(BETA * c) - sigmoid(BETA * c - BETA * r) + 1),
    "discopop": ({}, lambda c, r, n, k: discopop(BETA * (c - r), 0.05)),
    "discopop warm": ({"discopop_tau": 0.7}, lambda c, r, n, k: discopop(BETA * (c - r), 0.7)),
}  # fmt: skip


@pytest.mark.parametrize("summed_reference", [False, True])
@pytest.mark.parametrize("name", DPO)
def test_dpo(name: str, summed_reference: bool) -> None:
    options, formula = DPO[name]
    log_probs, ref, mask = draw(2 * PAIRS)
    r = [a - b for a, b in zip(row_sums(log_probs, mask), row_sums(ref, mask), strict=True)]
    n = lengths(mask)
    wanted = torch.stack([formula(r[i], r[i + PAIRS], n[i], n[i + PAIRS]) for i in range(PAIRS)])
    reference = torch.stack(row_sums(ref, mask)) if summed_reference else ref
    options = {"beta": BETA, "loss_type": name.split()[0], **options}
    found = losses.dpo_loss(log_probs, reference, mask, reduction="none", **options)
    assert_same(found.loss, wanted, log_probs)
    assert_same(losses.dpo_loss(log_probs, reference, mask, **options).loss, wanted.mean(), log_probs)
    torch.testing.assert_close(torch.cat(found[1:]), BETA * torch.stack(r).detach())
    assert not found.chosen_rewards.requires_grad


@pytest.mark.parametrize("smoothing", [0.0, EPSILON])
@pytest.mark.parametrize("paired", [True, False])
def test_aot(smoothing: float, paired: bool) -> None:
    """Quantile against quantile: each sorted by itself."""
    log_probs, ref, mask = draw(2 * PAIRS)
    policy, reference = (torch.stack(row_sums(x, mask)) for x in (log_probs, ref))
    if paired:
        better, worse = (x[:PAIRS] - x[PAIRS:] for x in (policy, reference))
    else:
        better, worse = (policy - reference)[:PAIRS], (policy - reference)[PAIRS:]
    in_order = (sorted(x, key=Tensor.item) for x in (better, worse))
    wanted = torch.stack([dpo(c, r, smoothing) for c, r in zip(*in_order, strict=True)])
    found = losses.dpo_loss(
        log_probs, ref, mask, beta=BETA, loss_type="aot" if paired else "aot_unpaired", label_smoothing=smoothing,
        reduction="none",
    )  # fmt: skip
    assert_same(found.loss, wanted, log_probs)


SCORES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "forward_kl": ({}, lambda u: 1 - 1 / u),
    "js_divergence": ({}, lambda u: (2 * u / (1 + u)).log()),
    "alpha_divergence": ({"f_alpha_divergence_coef": 0.3}, lambda u: (1 - u**-0.3) / 0.3),
}


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "discopop"])
@pytest.mark.parametrize("divergence", SCORES)
def test_f_divergences(divergence: str, loss_type: str) -> None:
    options, score = SCORES[divergence]
    name = {"sigmoid": "sigmoid smoothed"}.get(loss_type, loss_type)
    log_probs, ref, mask = draw(2 * PAIRS)
    f = [score((a - b).exp()) for a, b in zip(row_sums(log_probs, mask), row_sums(ref, mask), strict=True)]
    n = lengths(mask)
    wanted = torch.stack([DPO[name][1](f[i], f[i + PAIRS], n[i], n[i + PAIRS]) for i in range(PAIRS)])
    options = {"beta": BETA, "loss_type": loss_type, "f_divergence_type": divergence, **DPO[name][0], **options}
    found = losses.dpo_loss(log_probs, ref, mask, reduction="none", **options)
    assert_same(found.loss, wanted, log_probs)
    torch.testing.assert_close(torch.cat(found[1:]), BETA * torch.stack(f).detach())


def test_scores_that_would_overflow_stay_finite() -> None:
    log_probs = torch.full((2, 3), -90.0, requires_grad=True)
    for divergence, loss_type in (("forward_kl", "sigmoid"), ("reverse_kl", "discopop")):
        found = losses.dpo_loss(
            log_probs, torch.tensor([0.0, -270.0]), torch.ones(2, 3, dtype=torch.bool), beta=1.0,
            loss_type=loss_type, f_divergence_type=divergence,
        )  # fmt: skip
        assert found.loss.isfinite() and torch.autograd.grad(found.loss, log_probs)[0].isfinite().all()


def nll(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Of the first half of the rows."""
    terms = [-log_probs[i, t] for i in range(PAIRS) for t in range(LENGTH) if mask[i, t]]
    return sum(terms, torch.zeros(())) / len(terms)


def test_sft_and_the_likelihood_of_each_pair() -> None:
    log_probs, ref, mask = draw(2 * PAIRS)
    assert_same(losses.dpo_loss(log_probs, ref, mask, loss_type="sft").loss, nll(log_probs, mask), log_probs)
    each = losses.dpo_loss(log_probs, ref, mask, loss_type="sft", reduction="none").loss
    for i in range(PAIRS):
        (gradient,) = torch.autograd.grad(each[i], log_probs, retain_graph=True)
        assert torch.equal(gradient != 0, mask & (torch.arange(2 * PAIRS) == i).unsqueeze(1))


@pytest.mark.parametrize("name", ["sigmoid", "sigmoid smoothed", "hinge", "ipo"])
def test_cpo(name: str) -> None:
    options, formula = DPO[name]
    log_probs, _, mask = draw(2 * PAIRS)
    r, n = row_sums(log_probs, mask), lengths(mask)
    preference = torch.stack([formula(r[i], r[i + PAIRS], n[i], n[i + PAIRS]) for i in range(PAIRS)]).mean()
    found = losses.cpo_loss(log_probs, mask, beta=BETA, loss_type=name.split()[0], cpo_alpha=0.7, **options)
    assert_same(found.loss, preference + 0.7 * nll(log_probs, mask), log_probs)
    torch.testing.assert_close(torch.cat(found[1:]), BETA * torch.stack(r).detach())


@pytest.mark.parametrize("smoothing", [0.0, EPSILON])
def test_simpo(smoothing: float) -> None:
    log_probs, _, mask = draw(2 * PAIRS)
    a = [x / n for x, n in zip(row_sums(log_probs, mask), lengths(mask), strict=True)]
    margin = [2.5 * a[i] - 2.5 * a[i + PAIRS] - 1.4 for i in range(PAIRS)]
    wanted = torch.stack([-(1 - smoothing) * log_sigmoid(m) - smoothing * log_sigmoid(-m) for m in margin])
    found = losses.simpo_loss(
        log_probs, mask, beta=2.5, simpo_gamma=1.4, label_smoothing=smoothing, reduction="none"
    )  # fmt: skip
    assert_same(found.loss, wanted, log_probs)
    torch.testing.assert_close(torch.cat(found[1:]), 2.5 * torch.stack(a).detach())


def test_orpo() -> None:
    log_probs, _, mask = draw(2 * PAIRS)
    p = [torch.exp(x / n) for x, n in zip(row_sums(log_probs, mask), lengths(mask), strict=True)]
    odds = [x / (1 - x) for x in p]
    preference = torch.stack([log_sigmoid(torch.log(odds[i] / odds[i + PAIRS])) for i in range(PAIRS)]).mean()
    found = losses.orpo_loss(log_probs, mask, beta=BETA)
    assert_same(found.loss, nll(log_probs, mask) - BETA * preference, log_probs)
    torch.testing.assert_close(torch.cat(found[1:]), BETA * torch.stack(p).log().detach())
    fewer = mask & (torch.arange(LENGTH) != 1)
    found = losses.orpo_loss(log_probs, mask, beta=BETA, nll_mask=fewer)
    assert_same(found.loss, nll(log_probs, fewer) - BETA * preference, log_probs)


def test_certain_sequences_have_finite_odds() -> None:
    log_probs = torch.zeros(4, 3, requires_grad=True)
    mask = torch.ones(4, 3, dtype=torch.bool)
    mask[1] = False
    found = losses.orpo_loss(log_probs, mask).loss
    assert found.isfinite() and torch.autograd.grad(found, log_probs)[0].isfinite().all()


# -- single sequences --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kl", [None, 0.3, -0.3])
def test_kto(kl: float | None) -> None:
    log_probs, ref, mask = draw(2 * PAIRS)
    label = torch.rand(2 * PAIRS) < 0.4
    assert label.any() and not label.all()
    r = [a - b for a, b in zip(row_sums(log_probs, mask), row_sums(ref, mask), strict=True)]
    z = max(kl or 0.0, 0.0)
    value = [1 - sigmoid(BETA * (x - z if y else z - x)) for x, y in zip(r, label, strict=True)]
    wanted = torch.stack([(1.3 if y else 0.6) * v for v, y in zip(value, label, strict=True)])
    found = losses.kto_loss(
        log_probs, ref, mask, label, None if kl is None else torch.tensor(kl, dtype=torch.float64), beta=BETA,
        reduction="none", desirable_weight=1.3, undesirable_weight=0.6,
        loss_type="apo_zero_unpaired" if kl is None else "kto",
    )  # fmt: skip
    assert_same(found.loss, wanted, log_probs)
    torch.testing.assert_close(found.rewards, BETA * torch.stack(r).detach())


# -- all of them -------------------------------------------------------------------------------------------------------


def test_only_the_policy_gets_a_gradient() -> None:
    log_probs, other, mask = draw(6)
    old, ref, advantages, kl = other.clone(), other.clone(), torch.randn(6), torch.tensor(0.2)
    for x in (old, ref, advantages, kl):
        x.requires_grad_()
    label = torch.arange(6) < 2
    (
        losses.grpo_loss(log_probs, advantages, mask, old, ref, beta=0.1).loss
        + losses.dpo_loss(log_probs, ref, mask).loss
        + losses.dpo_loss(log_probs, advantages, mask).loss
        + losses.kto_loss(log_probs, ref, mask, label, kl).loss
    ).backward()
    assert log_probs.grad is not None and all(x.grad is None for x in (old, ref, advantages, kl))


def test_half_precision_is_computed_in_float32() -> None:
    log_probs, ref, mask = (x.detach() for x in draw(2 * PAIRS))
    low = [x.bfloat16() for x in (log_probs, ref)]
    found = losses.dpo_loss(*low, mask, beta=BETA).loss
    assert found.dtype == torch.float32
    wanted = losses.dpo_loss(*(x.double() for x in low), mask, beta=BETA).loss
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)


def test_sequences_without_tokens_have_no_gradient() -> None:
    log_probs, other, mask = draw(4)
    mask[2] = False
    for loss in (
        losses.dpo_loss(log_probs, other, mask, loss_type="ipo").loss,
        losses.cpo_loss(log_probs, mask).loss,
        losses.simpo_loss(log_probs, mask).loss,
        losses.orpo_loss(log_probs, mask).loss,
        losses.grpo_loss(log_probs, torch.ones(4), mask, other, other, beta=0.1).loss,
        losses.grpo_loss(
            log_probs, torch.ones(4), mask, other, loss_type="grpo", importance_sampling_level="sequence"
        ).loss,
    ):
        (gradient,) = torch.autograd.grad(loss, log_probs)
        assert loss.isfinite() and gradient.isfinite().all() and gradient.any() and not gradient[~mask].any()


# -- distillation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("beta", "divergence"), [(0, "forward_kl"), (1.0, "reverse_kl"), (0.3, "jsd")])
def test_generalized_jsd_names_its_ends(beta: float, divergence: str) -> None:
    tensors = [torch.randn(shape) for shape in ((2, 3, 4), (9, 4), (2, 3, 5), (9, 5))]
    mask = torch.rand(2, 3) < 0.7
    found = losses.generalized_jsd_loss(*tensors, mask, beta=beta, temperature=2.0, reduction="sum")
    only_jsd = {"beta": beta} if divergence == "jsd" else {}
    options = {"divergence": divergence, "temperature": 2.0, "reduction": "sum", **only_jsd}
    assert torch.equal(found, ops.linear_distillation(*tensors, mask, **options)) and found > 0
    with pytest.raises(InputError, match="beta must be in"):
        losses.generalized_jsd_loss(*tensors, beta=1.1)


def test_no_tokens_to_divide_by() -> None:
    """Without a token in the whole batch there is no loss; fewer than one token per rank is a number as others are."""
    log_probs, nothing = -torch.rand(4, 3), torch.zeros(4, 3, dtype=torch.bool)
    for none in (0, torch.tensor(0)):
        assert losses.cpo_loss(log_probs, nothing, num_nll_tokens=none).loss.isfinite()
        assert losses.grpo_loss(log_probs, torch.ones(4), nothing, num_items_in_batch=none).loss == 0
    one = [losses.grpo_loss(log_probs, torch.ones(4), ~nothing, num_items_in_batch=n).loss for n in (1, 0.25)]
    torch.testing.assert_close(one[1], 4 * one[0])


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "changed", "message"),
    [
        ("dpo", {"loss_type": "dpo"}, "loss_type must be one of sigmoid, .*, sft; got 'dpo'"),
        ("dpo", {"label_smoothing": 0.1, "loss_type": "hinge"}, "loss_type 'hinge' has no label_smoothing"),
        ("dpo", {"label_smoothing": 0.5}, r"label_smoothing must be in \[0, 0.5\), got 0.5"),
        ("dpo", {"loss_type": "exo_pair"}, "'exo_pair' needs label_smoothing"),
        ("dpo", {"discopop_tau": 0.1}, "loss_type 'sigmoid' has no discopop_tau"),
        ("dpo", {"f_divergence_type": "kl"}, "f_divergence_type must be one of reverse_kl, forward_kl"),
        ("dpo", {"f_divergence_type": "forward_kl", "loss_type": "sft"}, "'sft' has no f_divergence_type"),
        ("dpo", {"f_alpha_divergence_coef": 0.2}, "f_alpha_divergence_coef is of"),
        ("dpo", {"beta": 0.0}, "beta must be positive"),
        ("dpo", {"beta": math.inf}, "beta must be positive and finite, got inf"),
        ("cpo", {"beta": 0.0}, "beta must be positive"),
        ("cpo", {"label_smoothing": 0.7}, r"label_smoothing must be in \[0, 0.5\), got 0.7"),
        ("cpo", {"log_probs": torch.ones(3, 3), "mask": torch.ones(3, 3) > 0}, "log_probs must be of pairs"),
        ("dpo", {"reduction": "sum"}, "reduction must be one of mean, none; got 'sum'"),
        ("dpo", {"mask": torch.ones(4, 3)}, r"mask must be torch.bool of shape \(4, 3\)"),
        ("dpo", {"ref_log_probs": torch.ones(3)}, r"ref_log_probs must be floating of shape \(4\)"),
        ("dpo", {"log_probs": torch.ones(3, 3), "mask": torch.ones(3, 3) > 0}, "log_probs must be of pairs"),
        ("cpo", {"loss_type": "simpo"}, "loss_type must be one of sigmoid, hinge, ipo; got 'simpo'"),
        ("cpo", {"label_smoothing": 0.1, "loss_type": "ipo"}, "loss_type 'ipo' has no label_smoothing"),
        ("simpo", {"log_probs": torch.ones(4, 3, 2)}, r"log_probs must be floating of shape \(N, T\)"),
        ("orpo", {"nll_mask": torch.ones(4, 2) > 0}, r"nll_mask must be torch.bool of shape \(4, 3\)"),
        ("kto", {"kl": None}, "'kto' needs kl"),
        ("kto", {"loss_type": "apo_zero_unpaired"}, "'apo_zero_unpaired' takes none"),
        ("kto", {"label": torch.ones(4)}, r"label must be torch.bool of shape \(4\)"),
        ("grpo", {"loss_type": "gspo"}, "loss_type must be one of grpo, bnpo, dr_grpo, dapo, cispo, sapo; got 'gspo'"),
        ("grpo", {"importance_sampling_level": "word"}, "importance_sampling_level must be one of token, sequence"),
        ("grpo", {"loss_type": "cispo"}, "loss_type 'cispo' needs epsilon_high"),
        ("grpo", {"loss_type": "cispo", "epsilon": 0.2}, "loss_type 'cispo' has no epsilon"),
        ("grpo", {"loss_type": "dr_grpo"}, "loss_type 'dr_grpo' needs max_completion_length"),
        ("grpo", {"loss_type": "bnpo", "num_items_in_batch": 3}, "loss_type 'bnpo' has no num_items_in_batch"),
        ("grpo", {"sapo_temperature_pos": 1.0}, "loss_type 'dapo' has no sapo_temperature_pos"),
        ("grpo", {"delta": 1.1}, "delta must be above 1 \\+ epsilon_high"),
        ("grpo", {"beta": 0.1}, "beta is 0.1, which needs ref_log_probs"),
        ("grpo", {"use_bias_correction_kl": True}, "use_bias_correction_kl needs ref_log_probs"),
        ("grpo", {"advantages": torch.ones(3)}, r"advantages must be floating of shape \(4\)"),
        ("grpo", {"old_log_probs": torch.ones(4, 2)}, r"old_log_probs must be floating of shape \(4, 3\)"),
        *(
            (loss, {name: number}, f"{name}: must be above 0")
            for loss, name in (
                ("dpo", "num_nll_tokens"),
                ("cpo", "num_nll_tokens"),
                ("orpo", "num_nll_tokens"),
                ("grpo", "num_items_in_batch"),
            )
            for number in (0, -2, torch.tensor(0), torch.tensor(-2.0))
        ),
    ],
    ids=str,
)
def test_bad_input(loss: str, changed: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"log_probs": -torch.ones(4, 3), "mask": torch.ones(4, 3, dtype=torch.bool)}
    good |= {"ref_log_probs": -torch.ones(4, 3)} if loss in ("dpo", "kto") else {}
    good |= {"label": torch.ones(4) > 0, "kl": torch.tensor(0.0)} if loss == "kto" else {}
    good |= {"advantages": torch.ones(4)} if loss == "grpo" else {}
    with pytest.raises(InputError, match=f"{loss}_loss: .*{message}"):
        getattr(losses, f"{loss}_loss")(**good | changed)
