"""Labels shifted for one loss or several; tokens without a target are left out where blocks mix no tokens."""

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
from ligermodels.layers import ForwardContext, Targets, shift_labels, targets
from ligermodels.layers.lm_head import HeadLoss
from ligermodels.layers.packing import document_bounds
from ligermodels.layers.targets import SKIP_BELOW
from ligermodels.layers.tokens import layout_without_padding, take_tokens
from ligermodels.speculative.joint import JointMedusa, frozen_copy
from ligermodels.training.distillation import DistillationModel

SHARED = "gemma4_text-per-layer-inputs"
"""A model whose last blocks attend to keys and values of earlier blocks."""
BOUNDS = torch.tensor([0, 9, 11, 32, 38], dtype=torch.int32)


def make(name: str, **changes: Any) -> lm.CausalLM:
    return lm.from_config({**CONFIGS[name], "initializer_range": 0.3, **changes}, dtype=torch.float64)


def draw(batch: int, length: int, ignored: float = 0.5) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 100, (batch, length))
    return ids, ids.masked_fill(torch.rand(ids.shape) < ignored, -100)


def tokens_seen(**modules: nn.Module) -> dict[str, int]:
    """How many tokens each module got in its last call."""
    seen: dict[str, int] = {}
    for name, module in modules.items():
        module.register_forward_pre_hook(lambda _, inputs, name=name: seen.update({name: inputs[0][..., 0].numel()}))
    return seen


def watch(model: lm.CausalLM) -> dict[str, int]:
    *_, before, last = model.decoder.blocks
    parts = {"before": before.mlp, "mixer": last.mixer, "mlp_norm": last.mlp_norm, "mlp": last.mlp}
    return tokens_seen(**parts, norm=model.decoder.norm, head=model.head)


# -- the op, and what counts the targets -------------------------------------------------------------------------------


def test_take_tokens_and_its_gradients() -> None:
    x, indices = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, 4, 9])
    assert torch.equal(take_tokens(x, indices), x.flatten(0, 1)[None, indices])
    assert gradcheck(take_tokens, (x, indices)) and gradgradcheck(take_tokens, (x, indices))


def test_shifted_labels_by_hand() -> None:
    labels, bounds = torch.arange(10, 18)[None], torch.tensor([0, 3, 4, 4, 8], dtype=torch.int32)
    assert shift_labels(labels.view(2, 4), 1).tolist() == [[11, 12, 13, -100], [15, 16, 17, -100]]
    assert shift_labels(labels, 9).tolist() == [[-100] * 8]
    assert shift_labels(labels, 1, bounds).tolist() == [[11, 12, -100, -100, 15, 16, 17, -100]]
    assert shift_labels(labels, 2, bounds).tolist() == [[12, -100, -100, -100, 16, 17, -100, -100]]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_targets_of_several_losses(device: str, packed: bool) -> None:
    """On a GPU without a wait for all that is queued there."""
    labels = torch.randint(9, (1, 35) if packed else (5, 7)).masked_fill(
        torch.rand(35).view(-1, 35 if packed else 7) < 0.7, -100
    )
    bounds = torch.tensor([0, 20, 22, 35], dtype=torch.int32) if packed else None
    ahead, weights = (1, 2, 4), torch.rand(labels.shape)
    given, loss_weights, ends = (None if x is None else x.to(device) for x in (labels, weights, bounds))
    called: list[tuple[Tensor, Tensor, dict[str, Any]]] = []

    def head(hidden: Tensor, target: Tensor, **options: Any) -> Any:
        called.append((hidden, target, options))
        return HeadLoss((hidden[..., 0] * options["token_weights"]).masked_fill(target == -100, 0.0), target)

    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        shape = (labels.shape[0], labels.shape[1])
        found = Targets(given, ahead, vocab_size=9, layout=layout_without_padding(shape, ends), narrow=True)
        indices, counts = found.tokens.selected.indices, [found.wait_for_count(i) for i in range(3)]
        states = torch.arange(1.0, 36.0, device=device)[indices].view(1, -1, 1)
        results = [
            found.loss(i, head, states, token_weights=loss_weights, reduction="none", return_rank=True)[:2]
            for i in range(3)
        ]
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    each = torch.stack([shift_labels(labels, n, bounds) for n in ahead])
    assert counts == (each >= 0).sum((1, 2)).tolist()
    needed = (each >= 0).any(0).flatten().nonzero()[:, 0]
    assert 0 < len(needed) < 33 and indices.tolist() == needed.tolist()
    for i, ((hidden, target, options), (losses, ranks)) in enumerate(zip(called, results, strict=True)):
        assert hidden is states and target.tolist() == [each[i].flatten()[needed].tolist()]
        assert options["num_targets"] == counts[i] and options["reduction"] == "none" and options["return_rank"]
        # Per token what the head gives, at its place; for the others a loss of 0, and no rank.
        own = F.pad(weights[:, ahead[i] :], (0, ahead[i])).flatten()
        wanted = torch.zeros(35).index_copy(0, needed, (needed + 1.0) * own[needed]) * (each[i].flatten() >= 0)
        torch.testing.assert_close(losses.cpu().flatten(), wanted)
        assert (
            ranks.cpu().flatten().tolist()
            == torch.full((35,), -1).index_copy(0, needed, each[i].flatten()[needed]).tolist()
        )
        assert losses.shape == ranks.shape == labels.shape


@pytest.mark.parametrize("count", [0, 96, 97, 99])
def test_all_tokens_are_taken_where_nearly_all_are_needed_or_none(count: int) -> None:
    labels = torch.full((1, 100), -100)
    labels[:, 1 : count + 1] = 1
    found = Targets(labels, (1,), vocab_size=2, narrow=True)
    assert found.wait_for_count(0) == count
    assert (found.tokens.selected is None) == (count != 96)
    assert found.take(labels).numel() == (96 if count == 96 else 100)
    assert Targets(labels, (1,), vocab_size=2).tokens is None


@pytest.mark.parametrize("bad", [-1, 9, -101])
def test_labels_outside_the_vocabulary(bad: int) -> None:
    with pytest.raises(InputError, match=rf"labels: must lie in \[0, 9\), or be -100 .*, but \[0, 1\] is {bad}"):
        Targets(torch.tensor([[3, bad]]), (1,), vocab_size=9)


# -- models ------------------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "batch": {},
    "packed": {"cu_seqlens": BOUNDS},
    "restarts": {"position_ids": torch.tensor([[*range(7), *range(12)], [*range(19)]])},
    "weighted": {"token_weights": torch.arange(38, dtype=torch.float64).view(2, 19) / 38},
    "accumulated": {"num_items_in_batch": 41},
    "each": {"reduction": "none"},
    "by class": {"class_weights": torch.arange(131, dtype=torch.float64) / 131, "label_smoothing": 0.1},
    "scaled": {"token_scaling": True, "reduction": "none"},
}


def loss_of_logits(
    model: lm.CausalLM,
    embeds: Tensor,
    labels: Tensor,
    token_weights: Tensor | None = None,
    num_items_in_batch: int | None = None,
    reduction: str = "mean",
    class_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    token_scaling: bool = False,
    **bounds: Tensor,
) -> Tensor:
    """The plain way, of all tokens."""
    ends = document_bounds((labels.shape[0], labels.shape[1]), bounds.get("position_ids"), bounds.get("cu_seqlens"))
    aims = shift_labels(labels, 1, ends)
    logits = model(inputs_embeds=embeds, **bounds).logits
    options = {"weight": class_weights, "label_smoothing": label_smoothing}
    losses = F.cross_entropy(logits.transpose(1, 2), aims, reduction="none", **options)
    weights = torch.ones_like(losses) if token_weights is None else F.pad(token_weights[:, 1:], (0, 1))
    losses = losses * weights
    if token_scaling:
        losses = losses * losses.detach().neg().exp()
    if class_weights is not None:
        weights = weights * class_weights[aims.clamp(min=0)]
    return losses if reduction == "none" else losses.sum() / (num_items_in_batch or weights[aims >= 0].sum())


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("llama-3.1", mode) for mode in ("none", "selective", "full")),
        *((name, "selective") for name in ("llama-3.2", "gemma2", "mixtral")),
        *((name, "full") for name in ("qwen3", "olmo2", "granite")),
    ],
)
def test_loss_and_gradients_are_those_of_all_tokens(name: str, mode: str) -> None:
    """Post norms alone and beside others, norms of q and k, scaled residuals, windows, softcaps, tied heads."""
    model = make(name)
    for options in CASES.values():
        ids, labels = draw(1, 38) if "cu_seqlens" in options else draw(2, 19)
        embeds = model.decoder.embed(ids).detach().requires_grad_()
        unused = [] if model.head.weight is model.decoder.embed.weight else [model.decoder.embed.weight]
        operands = [embeds, *(p for p in model.parameters() if all(p is not each for each in unused))]
        model.activation_checkpointing = "none"
        wanted = loss_of_logits(model, embeds, labels, **options)
        factor = torch.rand_like(wanted)
        expected = torch.autograd.grad((wanted * factor).sum(), operands)
        model.activation_checkpointing = mode
        found = model(labels=labels, inputs_embeds=embeds, **options).loss
        torch.testing.assert_close(found, wanted)
        for one, two in zip(torch.autograd.grad((found * factor).sum(), operands), expected, strict=True):
            torch.testing.assert_close(one, two)


@pytest.mark.parametrize("name", ["llama-3.1", SHARED])
def test_only_blocks_that_mix_no_tokens_leave_tokens_out(name: str) -> None:
    model = make(name)
    assert model.decoder.narrows == (name == SHARED)
    seen = watch(model)
    ids, labels = draw(2, 19)
    count = int((labels[:, 1:] >= 0).sum())
    parts = ("before", "mixer", "mlp_norm", "mlp", "norm", "head")
    some, every = (dict.fromkeys(parts, tokens) for tokens in (count if name == SHARED else 38, 38))
    for options, wanted in (
        ({"labels": labels}, some),
        ({"labels": labels, "reduction": "none"}, some),
        ({"labels": labels, "return_logits": True}, every),
        ({"labels": torch.full_like(labels, -100)}, every),
        ({}, every),
    ):
        out = model(ids, **options)
        assert seen == wanted
        assert out.logits is None or out.logits.shape == (2, 19, 131)
    with torch.no_grad():
        model(ids, labels=labels)
    assert seen == some


def test_a_mixture_sees_every_token() -> None:
    """Its load-balancing loss is over all of them."""
    model = make("mixtral", output_router_logits=True)
    seen = watch(model)
    ids, labels = draw(2, 19)
    found = model(ids, labels=labels)
    assert set(seen.values()) == {38}
    assert torch.equal(found.aux_loss, model(ids, labels=ids, return_logits=True).aux_loss)


def test_chosen_tokens_of_packed_rows() -> None:
    model, some = make("llama-3.1"), torch.tensor([3, 20, 30])
    ids, positions = draw(2, 19)[0], CASES["restarts"]["position_ids"]
    for options in ({}, {"position_ids": positions}):
        logits = model(ids, **options).logits.flatten(0, 1)
        torch.testing.assert_close(model(ids, token_indices=some, **options).logits, logits[some][None])


@pytest.mark.parametrize("name", ["llama-3.1", SHARED])
def test_targets_of_a_batch_whose_rows_the_decoder_joins(name: str) -> None:
    """The targets know nothing of documents, for which the decoder joins all rows into one."""
    model, (ids, labels) = make(name), draw(2, 19)
    bounds = document_bounds(ids.shape, CASES["restarts"]["position_ids"], None)
    targets = Targets(labels, (1,), vocab_size=model.config.vocab_size, narrow=True)
    states = model.decoder(ids, cu_seqlens=bounds).flatten(0, 1)
    assert targets.tokens is not None and targets.tokens.selected is not None
    found = model.decoder(ids, cu_seqlens=bounds, token_indices=targets.tokens)
    torch.testing.assert_close(found, states[targets.tokens.selected.indices][None])


class Own(nn.Module):
    """In the place of a layer, of a class that is no `Layer`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, context: ForwardContext, *state: Any) -> Tensor:
        return x / 2 + self.inner(x, context, *state)


@pytest.mark.parametrize(
    ("name", "place"), [("llama-3.1", "mixer"), ("olmo2", "mlp"), ("mixtral", "mixer"), (SHARED, "mlp")]
)
def test_layers_that_know_nothing_of_targets(name: str, place: str) -> None:
    """They get and give all tokens, and so does the head behind them: the decoder no longer narrows."""
    model = make(name)
    own = Own(getattr(model.decoder.blocks[-1], place))
    setattr(model.decoder.blocks[-1], place, own)
    seen = tokens_seen(head=model.head, own=own)
    ids, labels = draw(2, 19)
    targets = shift_labels(labels, 1).flatten()
    parameters = list(model.parameters())
    wanted = F.cross_entropy(model(ids).logits.flatten(0, 1), targets)
    expected = torch.autograd.grad(wanted, parameters)
    found = model(ids, labels=labels).loss
    assert seen == {"head": 38, "own": 38} and not model.decoder.narrows
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, parameters), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_weights": torch.rand(2, 18)}, r"token_weights: must have the inputs' shape \(2, 19\), got \(2, 18\)"),
        ({"token_weights": torch.rand(2, 19, device="meta")}, "token_weights: must be on cpu, .* got meta"),
        ({"labels": torch.ones(2, 19, dtype=torch.long, device="meta")}, "labels: must be on cpu, .* got meta"),
        ({"return_rank": True}, "return_rank: no such argument.*label_smoothing"),
        ({"temperature": 1.0}, "temperature: no such argument"),
        ({"class_weights": torch.ones(130)}, r"class_weights must be floating of shape \(131\)"),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], message: str) -> None:
    model, (ids, labels) = make("llama-3.1"), draw(2, 19)
    medusa = lm.MedusaModel.from_base(model, 2)
    for each in (model, medusa, JointMedusa(medusa)):
        with pytest.raises(InputError, match=message):
            each(ids, **{"labels": labels, **options})


@pytest.mark.parametrize("names", [("llama-3.1", SHARED), (SHARED, "llama-3.1"), (SHARED, SHARED)])
def test_distillation_compares_the_same_tokens(names: tuple[str, str]) -> None:
    """Whether one of the two decoders, or both, leave out tokens without a target."""
    student, teacher = map(make, names)
    ids, labels = draw(2, 19)
    targets = shift_labels(labels, 1) >= 0
    log_p, log_q = (each(ids).logits[targets].log_softmax(-1) for each in (student, teacher))
    wanted = F.kl_div(log_p, log_q, reduction="sum", log_target=True) / targets.sum()
    found = DistillationModel(student, teacher, beta=0.0)(ids, labels).loss
    torch.testing.assert_close(found, wanted)


# -- Medusa ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["heads", "joint", "distill"])
@pytest.mark.parametrize(("name", "lm_head"), [(SHARED, "own"), ("gemma2", "shared"), ("mixtral", "own")])
def test_medusa_as_from_all_tokens(name: str, lm_head: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is needed for the first head or another; ranks are those of all tokens."""
    model = lm.MedusaModel.from_base(make(name), 3, 1, lm_head)
    reference = frozen_copy(model.base) if stage == "distill" else None
    trained = model if stage == "heads" else JointMedusa(model, reference)
    with torch.no_grad():
        for parameter in [*model.head_parameters(), *(() if reference is None else reference.parameters())]:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    operands = [p for p in model.parameters() if p.requires_grad]
    seen = tokens_seen(
        ours=model.base.decoder.norm, **({} if reference is None else {"theirs": reference.decoder.norm})
    )
    cases = [CASES[each] for each in ("batch", "packed", "weighted", "accumulated")]
    for case, mode in zip(cases, ["none", "selective", "full", "none"], strict=True):
        model.base.activation_checkpointing = mode
        ids, labels = draw(1, 38, 0.8) if "cu_seqlens" in case else draw(2, 19, 0.8)
        results = []
        for share in (SKIP_BELOW, 0.0):
            monkeypatch.setattr(targets, "SKIP_BELOW", share)
            out = trained(ids, labels=labels, **case)
            results.append((out, torch.autograd.grad(out.loss, operands), dict(seen)))
        (found, gradients, few), (wanted, expected, all_of_them) = results
        ends = case.get("cu_seqlens", torch.tensor([0, 19, 38])).tolist()
        flat, first = labels.flatten(), 1 if stage != "heads" else 2
        needed = sum(
            bool((flat[t + first : min(end, t + 5)] >= 0).any())
            for start, end in pairwise(ends)
            for t in range(start, end)
        )
        assert 0 < needed < 36 and set(all_of_them.values()) == {38}
        assert set(few.values()) == {needed if name == SHARED else 38}
        assert found.ranks.shape == wanted.ranks.shape == (3, *ids.shape)
        for field in ("ranks", "counts", "accuracy"):
            torch.testing.assert_close(getattr(found, field), getattr(wanted, field), rtol=0, atol=0)
        for field in ("loss", "head_losses", "base_loss"):
            torch.testing.assert_close(getattr(found, field), getattr(wanted, field))
        for one, two in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, two)
