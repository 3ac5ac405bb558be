"""Tokens without a target are left out of the end of a training pass: the same loss and gradients, from fewer rows."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.errors import InputError
from ligermodels.layers import Context, TargetRows, targets
from ligermodels.layers.targets import SKIP_BELOW, take_rows
from ligermodels.training.joint import frozen_copy

BOUNDS = torch.tensor([0, 9, 11, 32, 38], dtype=torch.int32)


def make(name: str, **changes: Any) -> lm.CausalLM:
    return lm.from_config({**CONFIGS[name], "initializer_range": 0.3, **changes}, dtype=torch.float64)


def draw(batch: int, length: int, ignored: float = 0.5) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 100, (batch, length))
    return ids, ids.masked_fill(torch.rand(ids.shape) < ignored, -100)


def rows_seen(**modules: nn.Module) -> dict[str, int]:
    """Rows that each module gets at a time, as they come."""
    seen: dict[str, int] = {}
    for name, module in modules.items():
        module.register_forward_pre_hook(lambda _, inputs, name=name: seen.update({name: inputs[0][..., 0].numel()}))
    return seen


def watch(model: lm.CausalLM) -> dict[str, int]:
    *_, before, last = model.blocks
    return rows_seen(
        before=before.mlp, qkv=last.attention.qkv, o=last.attention.o, mlp=last.mlp, norm=model.norm, head=model.head
    )


# -- the op, and what counts the targets -------------------------------------------------------------------------------


def test_rows_and_their_gradients() -> None:
    x, rows = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, 4, 9])
    assert torch.equal(take_rows(x, rows), x.flatten(0, 1)[None, rows]) and take_rows(x, None) is x
    assert gradcheck(take_rows, (x, rows)) and gradgradcheck(take_rows, (x, rows))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_targets_of_several_losses(device: str) -> None:
    """On a GPU without a wait for all that is queued there."""
    given = torch.randint(9, (3, 5, 7)).masked_fill(torch.rand(3, 5, 7) < 0.7, -100)
    each, weights = given.to(device), torch.rand(3, 5, 7, device=device)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = TargetRows(each)
        alone = [TargetRows(part[None]).counts for part in each]
        rows, taken, back = found.rows, found.take(weights), found.put_back(found.take(each), -100)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert found.counts == (given >= 0).sum((1, 2)).tolist() and alone == [[count] for count in found.counts]
    wanted = (given >= 0).any(0).flatten().nonzero()[:, 0]
    assert 0 < len(wanted) < 35 and rows.tolist() == wanted.tolist()
    assert torch.equal(taken.cpu(), weights.cpu().flatten(1)[:, None, wanted]) and torch.equal(back, each)


@pytest.mark.parametrize("share", [0.0, 0.97, 1.0])
def test_where_all_tokens_are_taken(share: float) -> None:
    given = torch.where(torch.arange(100) < 100 * share, 1, -100).view(1, 4, 25)
    found = TargetRows(given)
    assert found.counts == [round(100 * share)] and found.rows is None
    assert found.take(given) is given and found.put_back(given, 0) is given
    assert TargetRows(torch.where(torch.arange(100) < 96, 1, -100)[None, None]).rows is not None


# -- models ------------------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "batch": {},
    "packed": {"cu_seqlens": BOUNDS},
    "restarts": {"position_ids": torch.tensor([[*range(7), *range(12)], [*range(19)]])},
    "weighted": {"token_weights": torch.arange(38, dtype=torch.float64).view(2, 19) / 38},
    "accumulated": {"num_items_in_batch": 41},
    "each": {"reduction": "none"},
}


def loss_of_logits(
    model: lm.CausalLM,
    embeds: Tensor,
    labels: Tensor,
    token_weights: Tensor | None = None,
    num_items_in_batch: int | None = None,
    reduction: str = "mean",
    **bounds: Tensor,
) -> Tensor:
    """The plain way, of all tokens."""
    ends = model.document_bounds(labels.shape, bounds.get("position_ids"), bounds.get("cu_seqlens"))
    aims = targets.shift_labels(labels, 1, ends)
    logits = model(inputs_embeds=embeds, **bounds).logits
    losses = F.cross_entropy(logits.transpose(1, 2), aims, reduction="none")
    weights = torch.ones_like(losses) if token_weights is None else F.pad(token_weights[:, 1:], (0, 1))
    losses = losses * weights
    return losses if reduction == "none" else losses.sum() / (num_items_in_batch or weights[aims >= 0].sum())


@pytest.mark.parametrize("recompute", ["nothing", "activations", "blocks"])
@pytest.mark.parametrize("name", ["llama-3.1", "llama-3.2", "gemma2", "qwen3", "olmo2", "granite", "mixtral"])
def test_loss_and_gradients_are_those_of_all_tokens(name: str, recompute: str) -> None:
    """Post norms alone and beside others, norms of q and k, scaled residuals, windows, softcaps, tied heads."""
    model = make(name)
    for options in CASES.values():
        ids, labels = draw(1, 38) if "cu_seqlens" in options else draw(2, 19)
        embeds = model.embed(ids).detach().requires_grad_()
        operands = [embeds, *(p for p in model.parameters() if p is model.head.weight or p is not model.embed.weight)]
        model.recompute = "nothing"
        wanted = loss_of_logits(model, embeds, labels, **options)
        factor = torch.rand_like(wanted)
        expected = torch.autograd.grad((wanted * factor).sum(), operands)
        model.recompute = recompute
        found = model(labels=labels, inputs_embeds=embeds, **options).loss
        torch.testing.assert_close(found, wanted)
        for one, two in zip(torch.autograd.grad((found * factor).sum(), operands), expected, strict=True):
            torch.testing.assert_close(one, two)


def test_only_rows_with_targets_reach_the_end() -> None:
    model = make("llama-3.1")
    seen = watch(model)
    ids, labels = draw(2, 19)
    count = int((labels[:, 1:] >= 0).sum())
    some, every = dict.fromkeys(("o", "mlp", "norm", "head"), count), dict.fromkeys(("o", "mlp", "norm", "head"), 38)
    for options, wanted in (
        ({"labels": labels}, some),
        ({"labels": labels, "reduction": "none"}, some),
        ({"labels": labels, "return_logits": True}, every),
        ({"labels": torch.full_like(labels, -100)}, every),
        ({}, every),
    ):
        out = model(ids, **options)
        assert seen == {"before": 38, "qkv": 38, **wanted}
        assert out.logits is None or out.logits.shape == (2, 19, 131)
    with torch.no_grad():
        model(ids, labels=labels)
    assert seen["mlp"] == count


def test_a_mixture_sees_every_token() -> None:
    """Its load-balancing loss is over all of them."""
    model = make("mixtral", output_router_logits=True)
    seen = watch(model)
    ids, labels = draw(2, 19)
    found = model(ids, labels=labels)
    assert seen == {"before": 38, "qkv": 38, "o": 38, "mlp": 38} | dict.fromkeys(
        ("norm", "head"), int((labels[:, 1:] >= 0).sum())
    )
    assert torch.equal(found.aux_loss, model(ids, labels=ids, return_logits=True).aux_loss)


class Own(nn.Module):
    """In the place of a layer, made by someone who knows nothing of rows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return x / 2 + self.inner(x, context)


@pytest.mark.parametrize("place", ["attention", "mlp", "block", "none"])
@pytest.mark.parametrize("name", ["llama-3.1", "olmo2", "mixtral"])
def test_layers_that_know_nothing_of_rows(name: str, place: str) -> None:
    """They get and give all tokens; the final norm and the head, the rows. So do those of a model without blocks."""
    model = make(name)
    if place == "none":
        model = lm.CausalLM(replace(model.config, blocks=())).double()
    elif place == "block":
        model.blocks[-1] = Own(model.blocks[-1])
    else:
        setattr(model.blocks[-1], place, Own(getattr(model.blocks[-1], place)))
    seen = rows_seen(norm=model.norm)
    ids, labels = draw(2, 19)
    embeds, parameters = model.embed(ids).detach(), [p for p in model.parameters() if p is not model.embed.weight]
    wanted = loss_of_logits(model, embeds, labels)
    expected = torch.autograd.grad(wanted, parameters)
    found = model(labels=labels, inputs_embeds=embeds).loss
    assert seen["norm"] == int((labels[:, 1:] >= 0).sum())
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, parameters), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_weights": torch.rand(2, 18)}, r"token_weights: must have the inputs' shape \(2, 19\), got \(2, 18\)"),
        ({"token_weights": torch.rand(2, 19, device="meta")}, "token_weights: must be on cpu, .* got meta"),
        ({"labels": torch.ones(2, 19, dtype=torch.long, device="meta")}, "labels: must be on cpu, .* got meta"),
        ({"return_rank": True}, "return_rank: no such argument.*label_smoothing"),
        ({"attention_mask": torch.ones(2, 19), "labels": None}, "attention_mask: no such argument"),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], message: str) -> None:
    model, (ids, labels) = make("llama-3.1"), draw(2, 19)
    for each in (model, lm.MedusaModel.from_base(model, 2)):
        with pytest.raises(InputError, match=message):
            each(ids, **{"labels": labels, **options})


# -- Medusa ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["heads", "joint", "distill"])
@pytest.mark.parametrize(("name", "lm_head"), [("llama-3.1", "own"), ("gemma2", "shared"), ("mixtral", "own")])
def test_medusa_as_from_all_tokens(name: str, lm_head: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is needed for the first head or another; ranks are told of all."""
    model = lm.MedusaModel.from_base(make(name), 3, 1, lm_head)
    reference = None
    if stage != "heads":
        model.base.requires_grad_()
        reference = frozen_copy(model.base) if stage == "distill" else None
    with torch.no_grad():
        for parameter in [*model.head_parameters(), *(() if reference is None else reference.parameters())]:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    operands = [p for p in model.parameters() if p.requires_grad]
    seen = rows_seen(ours=model.base.norm, **({} if reference is None else {"theirs": reference.norm}))
    options: dict[str, Any] = {"base_loss": stage != "heads", "reference": reference}
    cases = [CASES[each] for each in ("batch", "packed", "weighted", "accumulated")]
    for case, recompute in zip(cases, ["nothing", "activations", "blocks", "nothing"], strict=True):
        model.base.recompute = recompute
        ids, labels = draw(1, 38, 0.8) if "cu_seqlens" in case else draw(2, 19, 0.8)
        results = []
        for share in (SKIP_BELOW, 0.0):
            monkeypatch.setattr(targets, "SKIP_BELOW", share)
            out = model(ids, labels=labels, **options, **case)
            results.append((out, torch.autograd.grad(out.loss, operands), dict(seen)))
        (found, gradients, few), (wanted, expected, all_of_them) = results
        ends = case.get("cu_seqlens", torch.tensor([0, 19, 38])).tolist()
        flat, first = labels.flatten(), 1 if stage != "heads" else 2
        needed = sum(
            bool((flat[t + first : min(end, t + 5)] >= 0).any())
            for start, end in pairwise(ends)
            for t in range(start, end)
        )
        assert 0 < needed < 36 and set(few.values()) == {needed} and set(all_of_them.values()) == {38}
        assert found.ranks.shape == wanted.ranks.shape == (3, *ids.shape)
        for field in ("ranks", "counts", "accuracy"):
            torch.testing.assert_close(getattr(found, field), getattr(wanted, field), rtol=0, atol=0)
        for field in ("loss", "head_losses", "base_loss"):
            torch.testing.assert_close(getattr(found, field), getattr(wanted, field))
        for one, two in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, two)
