"""Stage 2, the model trained with its heads: loss, divergence and their gradients against plain torch in float64, whole
runs that go on to the bit, and a small model in which it pays."""

import copy
import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from named_exports import export_named
from runs import recipe_for
from torch import nn
from typer.testing import CliRunner
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.cli import app
from ligermodels.data.batches import Batch
from ligermodels.data.corpus import Corpus
from ligermodels.data.documents import Documents, TokenDocuments
from ligermodels.data.packing import PackedBatches
from ligermodels.demo import END, DemoSettings, llama_config, python_sources, train_tokenizer
from ligermodels.errors import ConfigError, InputError
from ligermodels.evaluation import evaluate, evaluate_kl
from ligermodels.layers import HeadConfig, LMHead
from ligermodels.models.reference_kl import divergence, divergence_and_losses
from ligermodels.speculative.benchmark import fit_tree
from ligermodels.speculative.evaluation import evaluate_heads
from ligermodels.speculative.joint import JointMedusa, frozen_copy
from ligermodels.training import Console, MedusaRecipe, train, train_heads, warmup_cosine
from ligermodels.training.optimizer import optimizer_named, parameter_groups

BOUNDS = [0, 11, 13, 33, 66]

pytestmark = pytest.mark.usefixtures("one_thread")


def small(kind: str, **changes: Any) -> lm.CausalLM:
    torch.manual_seed(5)
    config = {**CONFIGS[kind], "initializer_range": 0.3, **changes}
    return lm.from_config(config, dtype=torch.float64)


def stirred(model: lm.CausalLM) -> lm.CausalLM:
    """Another model, somewhat like this one."""
    other = frozen_copy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return other


def most_frequent_token_accuracy(training: TokenDocuments, validation: TokenDocuments) -> float:
    """Top-1 accuracy, on the validation documents, of always guessing the most frequent training token."""
    tokens, validation_tokens = (torch.tensor([t for ids in x.documents for t in ids]) for x in (training, validation))
    return float((validation_tokens == tokens.bincount().argmax()).double().mean())


def joint_loss(
    model: lm.MedusaModel, ids: torch.Tensor, labels: torch.Tensor, scale: float, reference: lm.CausalLM | None
) -> torch.Tensor:
    """The loss of stage 2 the plain way: documents one by one, all logits, targets by slices."""
    heads: list[list[torch.Tensor]] = [[] for _ in model.heads]
    own: list[torch.Tensor] = []
    for start, end in pairwise(BOUNDS):
        part, wanted = ids.flatten()[None, start:end], labels.flatten()[start:end]
        hidden = model.base(part, return_last_hidden_state=True).last_hidden_state[0]
        logits = model.base.head(hidden)[:-1].log_softmax(-1)
        if reference is None:
            terms = -logits.gather(1, wanted[1:, None].clamp(min=0))[:, 0]
        else:
            with torch.no_grad():
                q = reference(part).logits[0, :-1].softmax(-1)
            terms = F.kl_div(logits, q, reduction="none").sum(-1)
        own.append(terms[wanted[1:] >= 0])
        for i, head in enumerate(model.heads):
            x = hidden
            for block in head.layers:
                x = x + F.silu(F.linear(x, block.linear.weight, block.linear.bias))
            logits = (model.base.head if head.lm_head is None else head.lm_head)(x)[: -2 - i].log_softmax(-1)
            aim = wanted[2 + i :]
            if len(aim) > 0:
                heads[i].append(-logits[aim >= 0].gather(1, aim[aim >= 0, None])[:, 0])
    losses = [torch.cat(each).mean() for each in heads]
    return torch.cat(own).mean() + scale * sum(model.decay**i * loss for i, loss in enumerate(losses))


@pytest.mark.parametrize("distill", [False, True])
@pytest.mark.parametrize(("kind", "lm_head"), [("llama-3.1", "own"), ("llama-3.2", "shared"), ("gemma2", "shared")])
def test_joint_loss_and_gradients_are_those_of_plain_torch(kind: str, lm_head: str, distill: bool) -> None:
    """An untied and a tied embedding, a softcap; rows packed, labels ignored, summed up over two batches."""
    model = lm.MedusaModel.from_base(small(kind), 3, 2, lm_head)
    with torch.no_grad():
        for parameter in model.head_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    reference = stirred(model.base) if distill else None
    joint = JointMedusa(model, reference)
    vocab = model.base.config.vocab_size
    ids = torch.randint(3, vocab, (1, 66))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    names, parameters = zip(*model.named_parameters(), strict=True)
    wanted = joint_loss(model, ids, labels, 0.3, reference)
    gradients = torch.autograd.grad(wanted, parameters)

    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    whole = joint(ids, labels=labels, cu_seqlens=bounds, heads_loss_weight=torch.tensor(0.3))
    torch.testing.assert_close(whole.loss, wanted)
    torch.testing.assert_close(
        whole.base_loss + 0.3 * sum(0.8**i * each for i, each in enumerate(whole.head_losses)), wanted
    )
    for name, found, gradient in zip(names, torch.autograd.grad(whole.loss, parameters), gradients, strict=True):
        torch.testing.assert_close(found, gradient, msg=lambda text, name=name: f"{name}: {text}")

    # The same in two parts, of which each has its share of all targets.
    rows = [(ids[:, :33], labels[:, :33], bounds[:4]), (ids[:, 33:], labels[:, 33:], bounds[3:] - 33)]
    items = sum(joint.num_targets(part, cu_seqlens=ends) for _, part, ends in rows)
    assert items.shape == (4,) and items[0] > items[1]
    for part, targets, ends in rows:
        joint(part, labels=targets, cu_seqlens=ends, heads_loss_weight=0.3, num_items_in_batch=items).loss.backward()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    if reference is not None:
        assert all(p.grad is None for p in reference.parameters())


def test_a_mixture_keeps_its_experts_balanced() -> None:
    """The base's own loss is all of it, but under a reference, which says by itself what is to be said."""
    base = small("mixtral", output_router_logits=True)
    ids = torch.randint(3, base.config.vocab_size, (2, 17))
    wanted = base(ids, labels=ids)
    joint = JointMedusa(lm.MedusaModel.from_base(base, 2))
    found = joint(ids, labels=ids, heads_loss_weight=0.0)
    assert wanted.aux_loss > 0 and base.config.router_aux_loss_coef > 0
    torch.testing.assert_close(found.loss, wanted.loss)
    still = JointMedusa(lm.MedusaModel.from_base(base, 2), frozen_copy(base))(ids, labels=ids, heads_loss_weight=0.0)
    torch.testing.assert_close(still.loss, torch.zeros_like(still.loss))


class LowRank(nn.Module):
    """What takes a head's place: a correction to the logits of another, and a parameter that nothing uses."""

    def __init__(self, inner: nn.Module, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.inner = inner
        self.a = nn.Parameter(torch.randn(2, hidden_size, dtype=torch.float64) * 0.1)
        self.b = nn.Parameter(torch.randn(vocab_size, 2, dtype=torch.float64) * 0.1)
        self.unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor | None = None, **options: Any) -> Any:
        logits = self.inner(hidden) + hidden @ self.a.T @ self.b.T
        if targets is None:
            return logits
        rank = (logits > logits.gather(-1, targets.clamp(min=0)[..., None])).sum(-1)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=options["reduction"])
        return (loss, rank.masked_fill(targets < 0, -1)) if options.get("return_rank") else loss


@pytest.mark.parametrize("distill", [False, True])
@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_the_base_models_head_may_be_any_module(lm_head: str, distill: bool) -> None:
    base = small("llama-3.1")
    size, vocab = base.config.hidden_size, base.config.vocab_size
    model = lm.MedusaModel.from_base(base, 2, 1, lm_head)
    reference = stirred(base) if distill else None
    base.head = LowRank(base.head, size, vocab)
    if reference is not None:
        reference.head = LowRank(reference.head, size, vocab).requires_grad_(False)
    joint = JointMedusa(model, reference)
    ids = torch.randint(3, vocab, (1, 66))
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    wanted = joint_loss(model, ids, ids, 0.3, reference)
    found = joint(ids, labels=ids, cu_seqlens=bounds, heads_loss_weight=0.3).loss
    torch.testing.assert_close(found, wanted)
    parameters = [p for name, p in model.named_parameters() if "unused" not in name]
    for mine, theirs in zip(*(torch.autograd.grad(each, parameters) for each in (found, wanted)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_memory_budget_is_of_the_kl_too(monkeypatch: pytest.MonkeyPatch) -> None:
    base, rows, ids = small("llama-3.1"), list[int](), torch.arange(12)[None]
    joint = JointMedusa(lm.MedusaModel.from_base(base, 2), stirred(base))
    logits = lm.CausalLM.logits
    monkeypatch.setattr(lm.CausalLM, "logits", lambda model, x: rows.append(len(x)) or logits(model, x))
    loss = joint(ids, labels=ids).loss
    assert rows == [11]
    torch.testing.assert_close(joint(ids, labels=ids, memory_budget=1).loss, loss)
    assert rows == [11] + [1] * 11


@pytest.mark.parametrize("distill", [False, True])
@pytest.mark.parametrize("kind", ["llama-3.1", "mixtral"])
def test_a_padded_batch_is_its_rows(kind: str, distill: bool) -> None:
    """Padding on the left and on the right: loss, gradients, ranks and counts are those of the rows, packed."""
    model = lm.MedusaModel.from_base(small(kind), 2)
    joint = JointMedusa(model, stirred(model.base) if distill else None)
    ids, mask = torch.randint(3, model.base.config.vocab_size, (3, 17)), torch.ones(3, 17, dtype=torch.long)
    mask[0, :6], mask[1, 12:] = 0, 0
    labels, weights = ids.masked_fill((mask == 0) | (torch.rand(3, 17) < 0.2), -100), torch.rand(3, 17)
    real = mask.bool()
    bounds = torch.cat([torch.zeros(1), mask.sum(1).cumsum(0)]).int()
    row, aims, taken = ids[real][None], labels[real][None], weights[real][None]
    for trained in (model, joint):
        counts = trained.num_targets(labels, attention_mask=mask)
        assert counts.equal(trained.num_targets(aims, cu_seqlens=bounds))
        options = {"num_items_in_batch": counts + 3}
        found = trained(ids, labels=labels, attention_mask=mask, token_weights=weights, **options)
        wanted = trained(row, labels=aims, cu_seqlens=bounds, token_weights=taken, **options)
        parameters = [p for p in trained.parameters() if p.requires_grad]
        for mine, theirs in zip(
            *(torch.autograd.grad(each.loss, parameters, allow_unused=True) for each in (found, wanted)), strict=True
        ):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs)
        for field in ("loss", "head_losses", "counts"):
            torch.testing.assert_close(getattr(found, field), getattr(wanted, field))
        assert found.ranks[:, real].equal(wanted.ranks[:, 0]) and found.ranks[:, ~real].eq(-1).all()
        with pytest.raises(InputError, match="attention_mask: must have the inputs' shape"):
            trained(ids, labels=labels, attention_mask=mask[:, 1:])
    model.requires_grad_(False)
    follows = small("llama-3.1", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    for trained in (heads := lm.MedusaModel.from_base(follows, 1), JointMedusa(heads)):
        with pytest.raises(InputError, match="attention_mask: rotary frequencies of this model depend on the length"):
            trained(ids, labels=ids, attention_mask=mask)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True), (False, False)])
def test_divergence_and_its_gradients(trained: tuple[bool, bool], reduction: str) -> None:
    """Chunk by chunk, with a bias, a softcap and a scale; the hidden states trained, the head, both, or none."""
    config = HeadConfig(bias=True, softcap=4.0, logit_scale=0.7)
    heads = [LMHead(width, 41, config).double() for width in (9, 6)]
    for head in heads:
        torch.nn.init.normal_(head.weight)
        torch.nn.init.normal_(head.bias)
    hidden = torch.randn(2, 13, 9, dtype=torch.float64, requires_grad=trained[0])
    heads[0].requires_grad_(trained[1])
    other = torch.randn(2, 13, 6, dtype=torch.float64)
    targets = torch.zeros(2, 13).long().masked_fill(torch.rand(2, 13) < 0.4, -100)
    keep = targets >= 0
    terms = F.kl_div(heads[0](hidden).log_softmax(-1), heads[1](other).softmax(-1).detach(), reduction="none")
    terms = terms.sum(-1)[keep]
    wanted = terms.mean() if reduction == "mean" else terms.sum()
    moved = [t for t in (hidden, *heads[0].parameters()) if t.requires_grad]
    expected = torch.autograd.grad(3 * wanted, moved) if moved else ()
    sizes, count = [], int(keep.sum())
    heads[0].register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[0]))
    for budget, known in ((1, None), (41 * 48 * 5, count), (2**30, None)):
        options: Any = {"reduction": reduction, "memory_budget": budget, "num_targets": known, "vocab_size": 41}
        found = divergence(hidden, heads[0], other, heads[1], targets, **options)
        torch.testing.assert_close(found, wanted.detach() if not moved else wanted)
        assert found.requires_grad == bool(moved)
        for mine, theirs in zip(torch.autograd.grad(3 * found, moved) if moved else (), expected, strict=True):
            torch.testing.assert_close(mine, theirs)
        with torch.no_grad():
            again = divergence(hidden, heads[0], other, heads[1], targets, **options)
        assert torch.equal(again, found.detach()) and not again.requires_grad
    assert count > 10 and sorted(set(sizes)) == sorted({1, 5, count % 5 or 5, count})
    nothing = divergence(
        hidden, heads[0], other, heads[1], torch.full_like(targets, -100), reduction=reduction, vocab_size=41
    )
    assert nothing == 0
    for gradient in torch.autograd.grad(nothing, moved) if moved else ():
        assert not gradient.any()
    with pytest.raises(RuntimeError, match="num_targets"):
        divergence(hidden, heads[0], other, heads[1], targets, num_targets=count - 1, vocab_size=41)


def test_divergence_in_bfloat16_is_summed_in_float32() -> None:
    """As near the exact gradient as one rounding of logits allows, over many chunks."""
    head, other = LMHead(32, 97), LMHead(32, 97)
    for each in (head, other):
        torch.nn.init.normal_(each.weight, std=0.3)
        each.bfloat16()
    hidden, targets = torch.randn(300, 32).bfloat16(), torch.zeros(300).long()
    exact = copy.deepcopy(head).double()
    found = divergence(hidden, head, hidden, other, targets, memory_budget=97 * 24 * 3, vocab_size=97)
    wanted = divergence(hidden.double(), exact, hidden.double(), copy.deepcopy(other).double(), targets, vocab_size=97)
    found.backward()
    wanted.backward()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-2, atol=0)
    assert (head.weight.grad - exact.weight.grad).norm() / exact.weight.grad.norm() < 6e-3


def test_divergence_and_losses_from_logits_computed_once() -> None:
    """Chunk by chunk, with a bias, a softcap and a scale: each place with a target meets each head once."""
    config = HeadConfig(bias=True, softcap=4.0, logit_scale=0.7)
    heads = [LMHead(width, 41, config).double() for width in (9, 6)]
    for head in heads:
        torch.nn.init.normal_(head.weight)
        torch.nn.init.normal_(head.bias)
    states = [torch.randn(2, 13, width, dtype=torch.float64) for width in (9, 6)]
    targets = torch.randint(0, 41, (2, 13)).masked_fill(torch.rand(2, 13) < 0.4, -100)
    wanted = torch.stack(
        [
            divergence(states[0], heads[0], states[1], heads[1], targets, reduction="sum", vocab_size=41).detach(),
            *(head(x, targets, reduction="sum").loss.detach() for head, x in zip(heads, states, strict=True)),
        ]
    )
    count = int((targets >= 0).sum())
    sizes: list[int] = []
    for head in heads:
        head.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    for budget, chunk in ((1, 1), (41 * 48 * 5, 5), (2**30, count)):
        sizes.clear()
        found = divergence_and_losses(
            states[0], heads[0], states[1], heads[1], targets, memory_budget=budget, vocab_size=41
        )
        torch.testing.assert_close(found, wanted)
        assert not found.requires_grad
        assert sum(sizes) == 2 * count and max(sizes) == chunk
    nothing = torch.full_like(targets, -100)
    assert not divergence_and_losses(states[0], heads[0], states[1], heads[1], nothing, vocab_size=41).any()


def test_kl_by_hand() -> None:
    """Over the targets of all batches, of which some are ignored; documents end where they do."""
    model = small("llama-3.1")
    reference = stirred(model)
    parts, terms = [], []
    for length, cut in ((17, 5), (9, 4)):
        ids = torch.randint(3, model.config.vocab_size, (1, length))
        labels = ids.masked_fill(torch.rand(ids.shape) < 0.4, -100)
        parts.append(Batch({"input_ids": ids, "labels": labels, "cu_seqlens": torch.tensor([0, cut, length]).int()}))
        for document, wanted in zip(
            ids.split([cut, length - cut], 1), labels.split([cut, length - cut], 1), strict=True
        ):
            p, q = (each(document).logits[0, :-1].log_softmax(-1) for each in (model, reference))
            terms.append((q.exp() * (q - p)).sum(-1)[wanted[0, 1:] >= 0])
    kl = evaluate_kl(model, reference, parts)
    assert kl.kl == pytest.approx(torch.cat(terms).mean().item()) and kl.kl > 1e-3
    losses = [evaluate(each, parts) for each in (model, reference)]
    assert [kl.loss, kl.reference_loss] == pytest.approx(losses)
    assert kl.perplexity_change == pytest.approx(exp(losses[0]) / exp(losses[1]) - 1)
    ids = torch.randint(3, model.config.vocab_size, (2, 9))
    restarting = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
    rows = Batch({"input_ids": ids, "labels": ids, "position_ids": restarting})
    bounds = torch.tensor([0, 4, 9, 11, 18]).int()
    packed = Batch({"input_ids": ids.view(1, -1), "labels": ids.view(1, -1), "cu_seqlens": bounds})
    found, wanted = (asdict(evaluate_kl(model, reference, [each])) for each in (rows, packed))
    assert found == pytest.approx(wanted)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    row, bounds = ids[mask == 1][None], torch.tensor([0, 5, 14]).int()
    padded = Batch({"input_ids": ids, "labels": ids, "attention_mask": mask})
    packed = Batch({"input_ids": row, "labels": row, "cu_seqlens": bounds})
    for each in (lambda part: evaluate(model, [part]), lambda part: evaluate_kl(model, reference, [part]).kl):
        assert each(padded) == pytest.approx(each(packed))
    with pytest.raises(InputError, match="no text"):
        evaluate_kl(model, reference, [])
    with pytest.raises(InputError, match="labels: a batch has none, only input_ids"):
        evaluate_kl(model, reference, [Batch({"input_ids": ids})])


# -- runs --------------------------------------------------------------------------------------------------------------


def lines(out: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says, but for speeds."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if "tokens_per_second" not in line]


def stage_2(base: Path, data: Path, **changes: Any) -> Any:
    settings = {"stage": 2, "learning_rate": 1e-3, "evaluate_every": 4}
    settings |= {"heads_loss_weight": 0.5, "heads_loss_weight_schedule": "sine"}
    return recipe_for(base, data, **{**settings, **changes})


def test_from_stage_1_to_a_whole_checkpoint(base: Path, data: Path, tmp_path: Path) -> None:
    lm_head = "shared"
    train_heads(recipe_for(base, data, steps=5, validation_fraction=0, lm_head=lm_head), tmp_path / "heads")
    start = {"start_from": str(tmp_path / "heads"), "lm_head": lm_head}
    recipe = stage_2(base, data, distill=True, chat_template=None, **start)
    notes: list[str] = []

    @contextmanager
    def progress(what: str, **_: Any) -> Iterator[Any]:
        yield lambda done, total, note="": notes.append(f"{what}: {note}")

    outcome = train_heads(recipe, tmp_path / "out", console=Console(progress=progress))
    # The bar tells what there is to know, and the lines of metrics what each step's loss is made of.
    on_bar = [note for note in notes if note.startswith("training: ")]
    number, share = r"[\d.,]+", r"\d+%"
    told = rf"loss {number} \(mean of {number} targets\), {number} tokens/s, base loss {number}, "
    told += rf"head accuracy {share} {share} {share}, peak memory {number} GiB"
    assert on_bar and all(re.fullmatch(f"training: {told}", note) for note in on_bar)
    steps = [line for line in lines(tmp_path / "out") if "loss" in line]
    assert len(steps) == 12 and steps[0]["base_loss"] < 1e-6 < steps[-1]["base_loss"]
    for line in steps:
        heads = sum(0.8**i * loss for i, loss in enumerate(line["head_losses"]))
        weight = recipe.heads_loss_weight_at(line["step"], 12)
        assert line["loss"] == pytest.approx(line["base_loss"] + weight * heads, rel=1e-5)
    assert outcome.evaluation.kl.kl > 0
    last = lines(tmp_path / "out")[-1]
    kl = outcome.evaluation.kl
    found = [last[f"validation_{name}"] for name in ("kl_to_reference", "perplexity_change", "perplexity")]
    assert found == [kl.kl, kl.perplexity_change, exp(kl.loss)]

    # Model and heads are opened by what opens each, and are those that were scored.
    model = lm.from_pretrained(tmp_path / "out")
    medusa = lm.MedusaModel.from_pretrained(model, tmp_path / "out")
    assert medusa.shape.num_heads == 3 and medusa.lm_head == lm_head
    for profile in ("vllm-shared", "tgi-v2"):
        export_named(medusa, tmp_path / profile, profile, "owner/base")
    before = lm.from_pretrained(base)
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
    chats = [line for line in data.read_text().splitlines() if line != "{}"]
    (tmp_path / "chats.jsonl").write_text("\n".join(chats))
    options = ["--data", str(tmp_path / "chats.jsonl"), "--seq-len", "16", "--prompts", "2", "--max-new-tokens", "5"]
    evaluated = CliRunner().invoke(app, ["medusa", "eval", *[str(tmp_path / "out")] * 2, *options, "--json"])
    found = json.loads(evaluated.stdout)
    # Of chats only what the assistant says is scored.
    assert 0 < found["targets"][0] < sum(len(line) for line in chats) / 8
    assert 0 < found["generation"]["same"] == found["generation"]["prompts"]

    # It may be trained on, from itself.
    again = recipe.changed({"base": str(tmp_path / "out"), "start_from": str(tmp_path / "out"), "learning_rate": 0.0})
    still = train_heads(again, tmp_path / "again")
    assert abs(still.evaluation.kl.kl) < 1e-6 and still.evaluation.kl.perplexity_change == 0
    assert torch.equal(still.evaluation.scores.hits, outcome.evaluation.scores.hits)


@pytest.mark.parametrize(("distill", "lm_head", "dtype"), [(False, "shared", "bfloat16"), (True, "own", "float32")])
def test_stage_2_goes_on_to_the_bit(
    base: Path, data: Path, tmp_path: Path, distill: bool, lm_head: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = stage_2(base, data, distill=distill, lm_head=lm_head, checkpoint_every=3, dtype=dtype)
    train_heads(recipe, tmp_path / "whole")
    taken: list[int] = []
    scale = MedusaRecipe.heads_loss_weight_at

    def stops(self: Any, step: int, steps: int) -> float:
        taken.append(step)
        if taken.count(step) == 1 and step in (2, 8):
            raise KeyboardInterrupt
        return scale(self, step, steps)

    monkeypatch.setattr(MedusaRecipe, "heads_loss_weight_at", stops)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train_heads(recipe, tmp_path / "killed", resume=True)
    outcome = train_heads(recipe, tmp_path / "killed", resume=True)
    assert taken == [1, 2, 1, 2, 3, 4, 5, 6, 7, 8, 7, 8, 9, 10, 11, 12] and outcome.finished
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")
    one, other = (lm.from_pretrained(tmp_path / name) for name in ("killed", "whole"))
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_two_learning_rates_and_the_heads_way_up(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ligermodels.training import run

    seen: list[Any] = []

    def watched(*args: Any, **options: Any) -> int:
        seen.append(options)
        return train(*args, **options)

    monkeypatch.setattr(run, "train", watched)
    unscored = {"validation_fraction": 0, "evaluate_every": None}
    recipe = stage_2(base, data, steps=4, warmup_steps=0, weight_decay=0.1, head_lr_multiplier=3.0, **unscored)
    said: list[str] = []
    assert train_heads(recipe, tmp_path / "out", console=Console(said.append)).evaluation is None
    assert not [line for line in said if "small updates" in line]
    groups = seen[0]["optimizer"].param_groups
    assert [g["initial_lr"] for g in groups] == pytest.approx([1e-3, 1e-3, 3e-3, 3e-3])
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0, 0.1, 0.0]
    sizes = [sum(p.numel() for p in group["params"]) for group in groups]
    medusa = lm.MedusaModel.from_pretrained(lm.from_pretrained(base), tmp_path / "out")
    assert sizes[0] + sizes[1] == sum(p.numel() for p in medusa.base.parameters())
    assert sizes[2] + sizes[3] == sum(p.numel() for p in medusa.head_parameters())
    scales = [seen[0]["loss_options"](step)["heads_loss_weight"] for step in (1, 2, 4)]
    assert scales == [recipe.heads_loss_weight_at(step, 4) for step in (1, 2, 4)]
    assert scales[0] < scales[1] < scales[2] == 0.5
    for change, is_told in (({}, False), ({"rounding": "nearest"}, True), ({"optimizer": "adafactor"}, True)):
        said.clear()
        changed = recipe.changed({"dtype": "bfloat16", **change})
        train_heads(changed, tmp_path / "other", overwrite=True, console=Console(said.append))
        assert bool([line for line in said if "bfloat16 loses small updates" in line]) == is_told
    # A model that stays as it is has nothing to learn from itself.
    for distill, low, high in ((True, -1e-6, 1e-6), (False, 1, 99)):
        still = {"distill": distill, "heads_loss_weight": 0.0, "learning_rate": 0.0}
        train_heads(recipe.changed(still), tmp_path / "other", overwrite=True)
        assert low < max(line["loss"] for line in lines(tmp_path / "other")) < high
    with pytest.raises(ConfigError, match="distill: is for stage 2"):
        recipe.changed({"stage": 1, "distill": True})


# -- what it is for ----------------------------------------------------------------------------------------------------


def test_heads_learn_what_there_is_to_know() -> None:
    """Of a language whose next token is 7 x + 3 five times in six, and else any: the best guess of the token that is n
    ahead is right about (5/6) ** n times, and each head comes near it. Decoding then yields what was predicted."""
    vocab, sure = 61, 5 / 6

    def text(seed: int, length: int) -> list[int]:
        draw, found = random.Random(seed), [1]
        while len(found) < length:
            found.append((7 * found[-1] + 3) % vocab if draw.random() < sure else draw.randrange(vocab))
        return found

    training, validation = (
        TokenDocuments.chunks((text(seed, 2000) for seed in seeds), 64) for seeds in (range(40), range(40, 44))
    )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": vocab}
    model = lm.from_config({**CONFIGS["llama-3.1"], **sizes, "initializer_range": 0.1}, dtype=torch.float32)

    def learn(trained: Any, parameters: Iterator[torch.nn.Parameter], steps: int = 90, **more: Any) -> None:
        optimizer = optimizer_named(
            "adamw", parameter_groups([(parameters, 1e-2)], 0.0), model=trained, betas=(0.9, 0.95)
        )
        more |= {"optimizer": optimizer, "schedule": warmup_cosine(optimizer, steps, warmup_steps=20)}
        train(
            trained, PackedBatches(training, seq_len=64, batch_size=8, seed=0), steps=steps, report_every=steps, **more
        )

    learn(model, model.parameters())
    medusa = lm.MedusaModel.from_base(model, num_heads=4)
    learn(medusa, medusa.head_parameters())

    def batches() -> PackedBatches:
        return PackedBatches(validation, seq_len=64, batch_size=8, epochs=1)

    found = evaluate_heads(medusa, batches()).accuracy(1).tolist()
    assert found == pytest.approx([sure**n for n in (2, 3, 4, 5)], rel=0.1)
    assert all(a > 1.1 * b for a, b in pairwise(found))
    assert found[-1] > 10 * most_frequent_token_accuracy(training, validation)
    tried = fit_tree(medusa, [text(seed, 9) for seed in range(50, 66)], nodes=20, max_new_tokens=32)
    assert tried.benchmark.same == 8 and tried.benchmark.tokens_per_step > 2
    assert tried.benchmark.tokens_per_step == pytest.approx(tried.predicted, rel=0.05)

    # Stage 2 on the next token of the data, without a reference: a model that knows the language does so afterwards.
    second = copy.deepcopy(medusa)
    learn(JointMedusa(second), second.parameters(), 40, loss_options=lambda step: {"heads_loss_weight": 0.2})
    kl = evaluate_kl(second.base, model, batches())
    after = evaluate_heads(second, batches()).accuracy(1).tolist()
    assert kl.perplexity_change < 0.01 and kl.kl > 0
    assert after == pytest.approx([sure**n for n in (2, 3, 4, 5)], rel=0.1)


def test_stage_2_makes_better_heads_and_leaves_the_model_as_good(tmp_path: Path) -> None:
    """The demo's model, smaller: head 0 gains over stage 1, and over a stage 1 that lasts as long."""
    s = DemoSettings(
        corpus_bytes=600_000, vocab_size=320, hidden_size=64, num_layers=1, seq_len=128, steps=120, head_steps=60
    )
    corpus = Corpus(python_sources(s.corpus_bytes))
    split = corpus.split(s.validation_fraction, s.seed)
    tokenizer = train_tokenizer((corpus.read(i)[0].decode() for i in split[0]), s.vocab_size, tmp_path)
    end = tokenizer.backend.token_to_id(END)
    documents = Documents(corpus, tokenizer, eos_token_id=end)
    tokens = [[found.ids for found in documents.read(part) if found] for part in split]
    training = TokenDocuments.chunks(tokens[0], s.seq_len)
    validation = TokenDocuments(ids[:4096] for ids in tokens[1])

    def batches() -> PackedBatches:
        return PackedBatches(validation, seq_len=s.seq_len, batch_size=8, epochs=1)

    (tmp_path / "config.json").write_text(json.dumps(llama_config(s, end)))

    def learn(model: Any, rates: Any, steps: int, seed: int, **options: Any) -> None:
        optimizer = optimizer_named("adamw", parameter_groups(rates, 0.0), model=model, betas=(0.9, 0.95))
        schedule = warmup_cosine(optimizer, steps, warmup_steps=steps // 10)
        parts = PackedBatches(training, seq_len=s.seq_len, batch_size=s.batch_size, seed=seed)
        train(model, parts, steps=steps, optimizer=optimizer, schedule=schedule, report_every=steps, **options)

    def accuracy(model: lm.MedusaModel) -> float:
        return float(evaluate_heads(model, batches()).accuracy(1)[0])

    model = lm.from_config(tmp_path)
    learn(model, [(model.parameters(), 4e-3)], s.steps, 0)
    first = lm.MedusaModel.from_base(model, num_heads=2)
    learn(first, [(first.head_parameters(), 3e-3)], s.head_steps, 1)
    longer, second = copy.deepcopy(first), copy.deepcopy(first)
    learn(longer, [(longer.head_parameters(), 3e-3)], s.head_steps, 2)
    rates = [(second.base.parameters(), 2e-3), (second.head_parameters(), 8e-3)]
    learn(JointMedusa(second, model), rates, s.head_steps, 2, loss_options=lambda step: {"heads_loss_weight": 0.3})
    kl = evaluate_kl(second.base, model, batches())
    assert accuracy(second) > 1.05 * max(accuracy(first), accuracy(longer))
    assert kl.perplexity_change < 0.02 and 0 < kl.kl < 0.05
    assert kl.loss == pytest.approx(evaluate(second.base, batches()), rel=1e-6)
