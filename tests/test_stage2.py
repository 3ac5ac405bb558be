"""Stage 2, the model trained with its heads: loss, divergence and their gradients against plain torch in float64, whole
runs that go on to the bit, and a small model in which it pays."""

import copy
import json
import random
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chat_templates import add_bos
from runs import command, recipe_for
from typer.testing import CliRunner
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.archs.distillation import divergence, divergence_and_losses
from ligermodels.cli import app
from ligermodels.demo import END, DemoSettings, frequency_baseline, llama_config, python_sources, train_tokenizer
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import HeadConfig, LMHead
from ligermodels.training import (
    Batch,
    Console,
    Joint,
    OwnWords,
    batches,
    documents_of,
    encode,
    evaluate,
    evaluate_drift,
    evaluate_heads,
    frozen_copy,
    hold_out,
    pack,
    read_documents,
    train,
    train_heads,
    trial,
    warmup_cosine,
    write_own_data,
)
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


def joint_loss(
    model: lm.MedusaModel, ids: torch.Tensor, labels: torch.Tensor, scale: float, reference: lm.CausalLM | None
) -> torch.Tensor:
    """The loss of stage 2 the plain way: documents one by one, all logits, targets by slices."""
    heads: list[list[torch.Tensor]] = [[] for _ in model.heads]
    own: list[torch.Tensor] = []
    for start, end in pairwise(BOUNDS):
        part, wanted = ids.flatten()[None, start:end], labels.flatten()[start:end]
        hidden = model.base.hidden_states(part)[0]
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
    joint = Joint(model, reference)
    vocab = model.base.config.vocab_size
    ids = torch.randint(3, vocab, (1, 66))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    names, parameters = zip(*model.named_parameters(), strict=True)
    wanted = joint_loss(model, ids, labels, 0.3, reference)
    gradients = torch.autograd.grad(wanted, parameters)

    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    whole = joint(ids, labels, cu_seqlens=bounds, heads_scale=torch.tensor(0.3))
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
        joint(part, targets, cu_seqlens=ends, heads_scale=0.3, num_items_in_batch=items).loss.backward()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    if reference is not None:
        assert all(p.grad is None for p in reference.parameters())
        with pytest.raises(InputError, match="reference"):
            model(ids, labels, reference=reference)


def test_a_mixture_keeps_its_experts_balanced() -> None:
    """The base's own loss is all of it, but under a reference, which says by itself what is to be said."""
    base = small("mixtral", output_router_logits=True)
    ids = torch.randint(3, base.config.vocab_size, (2, 17))
    wanted = base(ids, ids)
    joint = Joint(lm.MedusaModel.from_base(base, 2))
    found = joint(ids, ids, heads_scale=0.0)
    assert wanted.aux_loss > 0 and base.config.router_loss > 0
    torch.testing.assert_close(found.loss, wanted.loss)
    still = Joint(lm.MedusaModel.from_base(base, 2), frozen_copy(base))(ids, ids, heads_scale=0.0)
    torch.testing.assert_close(still.loss, torch.zeros_like(still.loss))


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
        options: Any = {"reduction": reduction, "memory_budget": budget, "num_targets": known}
        found = divergence(hidden, heads[0], other, heads[1], targets, **options)
        torch.testing.assert_close(found, wanted.detach() if not moved else wanted)
        assert found.requires_grad == bool(moved)
        for mine, theirs in zip(torch.autograd.grad(3 * found, moved) if moved else (), expected, strict=True):
            torch.testing.assert_close(mine, theirs)
        with torch.no_grad():
            again = divergence(hidden, heads[0], other, heads[1], targets, **options)
        assert torch.equal(again, found.detach()) and not again.requires_grad
    assert count > 10 and sorted(set(sizes)) == sorted({1, 5, count % 5 or 5, count})
    nothing = divergence(hidden, heads[0], other, heads[1], torch.full_like(targets, -100), reduction=reduction)
    assert nothing == 0
    for gradient in torch.autograd.grad(nothing, moved) if moved else ():
        assert not gradient.any()
    with pytest.raises(RuntimeError, match="num_targets"):
        divergence(hidden, heads[0], other, heads[1], targets, num_targets=count - 1)


def test_divergence_in_bfloat16_is_summed_in_float32() -> None:
    """As near the exact gradient as one rounding of logits allows, over many chunks."""
    head, other = LMHead(32, 97), LMHead(32, 97)
    for each in (head, other):
        torch.nn.init.normal_(each.weight, std=0.3)
        each.bfloat16()
    hidden, targets = torch.randn(300, 32).bfloat16(), torch.zeros(300).long()
    exact = copy.deepcopy(head).double()
    found = divergence(hidden, head, hidden, other, targets, memory_budget=97 * 24 * 3)
    wanted = divergence(hidden.double(), exact, hidden.double(), copy.deepcopy(other).double(), targets)
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
            divergence(states[0], heads[0], states[1], heads[1], targets, reduction="sum").detach(),
            *(head(x, targets, reduction="sum").detach() for head, x in zip(heads, states, strict=True)),
        ]
    )
    count = int((targets >= 0).sum())
    sizes: list[int] = []
    for head in heads:
        head.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    for budget, chunk in ((1, 1), (41 * 48 * 5, 5), (2**30, count)):
        sizes.clear()
        found = divergence_and_losses(states[0], heads[0], states[1], heads[1], targets, memory_budget=budget)
        torch.testing.assert_close(found, wanted)
        assert not found.requires_grad
        assert sum(sizes) == 2 * count and max(sizes) == chunk
    nothing = torch.full_like(targets, -100)
    assert not divergence_and_losses(states[0], heads[0], states[1], heads[1], nothing).any()


def test_drift_by_hand() -> None:
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
    drift = evaluate_drift(model, reference, parts)
    assert drift.kl == pytest.approx(torch.cat(terms).mean().item()) and drift.kl > 1e-3
    losses = [evaluate(each, parts) for each in (model, reference)]
    assert [drift.loss, drift.reference_loss] == pytest.approx(losses)
    assert drift.perplexity_change == pytest.approx(exp(losses[0]) / exp(losses[1]) - 1)
    with pytest.raises(InputError, match="no text"):
        evaluate_drift(model, reference, [])


# -- runs --------------------------------------------------------------------------------------------------------------


def lines(out: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says, but for speeds."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if "tokens_per_second" not in line]


def stage_2(base: Path, data: Path, **changes: Any) -> Any:
    settings = {"stage": 2, "learning_rate": 1e-3, "lambda0": 0.5, "lambda0_schedule": "sine", "evaluate_every": 4}
    return recipe_for(base, data, **{**settings, **changes})


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_from_stage_1_to_a_whole_checkpoint(lm_head: str, base: Path, data: Path, tmp_path: Path) -> None:
    train_heads(recipe_for(base, data, steps=5, held_out=0, lm_head=lm_head), tmp_path / "heads")
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
    told = rf"loss {number}, {number} tokens/s, the model's own {number}, right {share} {share} {share}, {number} GiB"
    assert on_bar and all(re.fullmatch(f"training: {told}", note) for note in on_bar)
    steps = [line for line in lines(tmp_path / "out") if "loss" in line]
    assert len(steps) == 12 and steps[0]["base_loss"] < 1e-6 < steps[-1]["base_loss"]
    for line in steps:
        heads = sum(0.8**i * loss for i, loss in enumerate(line["head_losses"]))
        assert line["loss"] == pytest.approx(line["base_loss"] + recipe.lambda0_at(line["step"], 12) * heads, rel=1e-5)
    assert outcome.drift is not None and outcome.scores is not None and outcome.drift.kl > 0
    last = lines(tmp_path / "out")[-1]
    assert (last["kl"], last["perplexity_change"]) == (outcome.drift.kl, outcome.drift.perplexity_change)
    assert last["perplexity"] == exp(outcome.drift.loss)

    # Model and heads are opened by what opens each, and are those that were scored.
    model = lm.from_pretrained(tmp_path / "out")
    medusa = lm.MedusaModel.from_pretrained(model, tmp_path / "out")
    assert medusa.shape.num_heads == 3 and medusa.lm_head == lm_head
    if lm_head == "shared":  # full-hf repeats it.
        for profile in ("vllm-shared", "tgi-v2"):
            medusa.export(tmp_path / profile, profile, base_model="owner/base")
    before = lm.from_pretrained(base)
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
    chats = [line for line in data.read_text().splitlines() if line != "{}"]
    (tmp_path / "chats.jsonl").write_text("\n".join(chats))
    options = ["--data", str(tmp_path / "chats.jsonl"), "--length", "16", "--prompts", "2", "--max-new-tokens", "5"]
    evaluated = CliRunner().invoke(app, ["medusa", "eval", *[str(tmp_path / "out")] * 2, *options, "--json"])
    found = json.loads(evaluated.stdout)
    # Of chats only what the assistant says is scored.
    assert 0 < found["targets"][0] < sum(len(line) for line in chats) / 8
    assert 0 < found["generation"]["same"] == found["generation"]["prompts"]

    # It may be trained on, from itself.
    again = recipe.changed({"base": str(tmp_path / "out"), "start_from": str(tmp_path / "out"), "learning_rate": 0.0})
    still = train_heads(again, tmp_path / "again")
    assert still.drift is not None and abs(still.drift.kl) < 1e-6 and still.drift.perplexity_change == 0
    assert still.scores is not None and torch.equal(still.scores.hits, outcome.scores.hits)


@pytest.mark.parametrize(("distill", "lm_head", "dtype"), [(False, "shared", "bfloat16"), (True, "own", "float32")])
def test_stage_2_goes_on_to_the_bit(
    base: Path, data: Path, tmp_path: Path, distill: bool, lm_head: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ligermodels.training import run

    recipe = stage_2(base, data, distill=distill, lm_head=lm_head, checkpoint_every=3, dtype=dtype)
    train_heads(recipe, tmp_path / "whole")
    taken: list[int] = []
    scale = run.Recipe.lambda0_at

    def stops(self: Any, step: int, steps: int) -> float:
        taken.append(step)
        if taken.count(step) == 1 and step in (2, 8):
            raise KeyboardInterrupt
        return scale(self, step, steps)

    monkeypatch.setattr(run.Recipe, "lambda0_at", stops)
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
    unscored = {"held_out": 0, "evaluate_every": None}
    recipe = stage_2(base, data, steps=4, warmup=0, weight_decay=0.1, head_lr_multiplier=3.0, **unscored)
    said: list[str] = []
    assert train_heads(recipe, tmp_path / "out", console=Console(said.append)).drift is None
    assert not [line for line in said if "steps are lost" in line]
    groups = seen[0]["optimizer"].param_groups
    assert [g["initial_lr"] for g in groups] == pytest.approx([1e-3, 1e-3, 3e-3, 3e-3])
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0, 0.1, 0.0]
    sizes = [sum(p.numel() for p in group["params"]) for group in groups]
    medusa = lm.MedusaModel.from_pretrained(lm.from_pretrained(base), tmp_path / "out")
    assert sizes[0] + sizes[1] == sum(p.numel() for p in medusa.base.parameters())
    assert sizes[2] + sizes[3] == sum(p.numel() for p in medusa.head_parameters())
    scales = [seen[0]["loss_options"](step)["heads_scale"] for step in (1, 2, 4)]
    assert scales == [recipe.lambda0_at(step, 4) for step in (1, 2, 4)] and scales[0] < scales[1] < scales[2] == 0.5
    for change, is_told in (({}, False), ({"rounding": "nearest"}, True), ({"optimizer": "adafactor"}, True)):
        said.clear()
        train_heads(recipe.changed({"dtype": "bfloat16", **change}), tmp_path / "other", console=Console(said.append))
        assert bool([line for line in said if "bfloat16, where small steps are lost" in line]) == is_told
    # A model that stays as it is has nothing to learn from itself.
    for distill, low, high in ((True, -1e-6, 1e-6), (False, 1, 99)):
        still = {"distill": distill, "lambda0": 0.0, "learning_rate": 0.0}
        train_heads(recipe.changed(still), tmp_path / "other")
        assert low < max(line["loss"] for line in lines(tmp_path / "other")) < high
    with pytest.raises(ConfigError, match="distill: is for stage 2"):
        recipe.changed({"stage": 1, "distill": True})


# -- the model's own words ---------------------------------------------------------------------------------------------


CHATS: list[dict[str, Any]] = [
    {"text": "Hello there , how are you ? " * 5},
    {
        "conversations": [
            {"from": w, "value": v} for w, v in zip(["human", "gpt"] * 2, ["Hi", "x", "How", "y"], strict=True)
        ]
    },
    {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "You"},
            {"role": "assistant"},
        ]
    },
    {"text": ""},
    {
        "messages": [{"role": "user", "content": "fine"}, {"role": "assistant", "content": "z"}],
        "tools": [{"name": "f"}],
    },
    {"messages": [{"role": "user", "content": "I"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}]},
]


def test_a_model_goes_on_in_its_own_words(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As each document alone, turn by turn, with what the model itself has said before."""
    CHATS[2]["messages"][2]["content"] = "w"
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in CHATS) + "no json\n")
    model = lm.from_pretrained(base)
    said: list[str] = []
    documents = documents_of(base, [file], max_bad_lines=1, on_bad_line=said.append)
    tokenizer, template = documents.tokenizer, documents.template
    add_bos(tokenizer, "<|endoftext|>")  # Which makes a token of an empty text.

    def alone(prompt: list[int], ends: list[int]) -> list[int]:
        new = model.generate([prompt], 12, eos_token_ids=ends, pad_token_id=0)[0, len(prompt) :].tolist()
        return new[: min((new.index(end) for end in ends if end in new), default=len(new)) + 1]

    def prompt_of(messages: list[Any], **variables: Any) -> list[int]:
        text = template.render(messages, add_generation_prompt=True, **variables)
        return tokenizer.encode_with_offsets(text)[0]

    # A token that the model says after some of the prompts is to end a turn.
    first = [prompt_of([{"role": "user", "content": "Hi"}]), prompt_of(CHATS[2]["messages"][:2])]
    ends = [alone(first[0], [])[7], alone(first[1], [])[4]]
    monkeypatch.setattr(model, "generation_defaults", lambda: {"eos_token_ids": ends})
    words = OwnWords(model, documents, temperature=0, max_new_tokens=12, prompt_tokens=9)
    found = words.records(range(7))
    assert said[0].startswith(f"{file}:4: nothing to learn: the text is empty")
    assert said[1:] == [f"{file}:7: not JSON (Expecting value: line 1 column 1 (char 0)); line passed over"]
    prompt = tokenizer.encode(CHATS[0]["text"])[:9]
    assert found[0] == {"text": tokenizer.decode(prompt + alone(prompt, ends))}
    for index, asked in ((1, ["Hi", "How"]), (2, ["You"]), (4, ["fine"])):
        messages: list[Any] = [CHATS[index]["messages"][0]] if index == 2 else []
        variables = {"tools": CHATS[index]["tools"]} if index == 4 else {}
        wanted = None
        for question in asked:
            messages.append({"role": "user", "content": question})
            prompt = prompt_of(messages, **variables)
            new = alone(prompt, ends)
            if new[-1] not in ends:
                break
            messages.append({"role": "assistant", "content": tokenizer.continuation(prompt, new[:-1])})
            wanted = {"messages": list(messages), **variables}
        assert found[index] == wanted
    assert found[1] is not None and found[2] is not None and found[3] is None and found[5] is None

    assert write_own_data(words, 7, tmp_path / "own.jsonl", batch_size=2) == sum(each is not None for each in found)
    again = [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    assert again == [each for each in found if each is not None]
    read = documents_of(base, [tmp_path / "own.jsonl"]).read(range(len(again)))
    assert all(each is not None and any(label >= 0 for label in each.labels) for each in read)
    monkeypatch.setattr(model, "generation_defaults", lambda: {})
    endless = OwnWords(model, documents, temperature=0, max_new_tokens=3)
    assert endless.records([1, 2, 0])[:2] == [None, None]
    (tmp_path / "chat.jsonl").write_text(json.dumps(CHATS[2]))
    endless = OwnWords(model, documents_of(base, [tmp_path / "chat.jsonl"]), max_new_tokens=3)
    with pytest.raises(InputError, match="nothing in the data could be continued"):
        write_own_data(endless, 1, tmp_path / "none.jsonl")
    assert not list(tmp_path.glob("*none.jsonl*"))
    with pytest.raises(InputError, match="temperature"):
        OwnWords(model, documents, temperature=-1)


def test_data_from_the_command_line(base: Path, data: Path, tmp_path: Path) -> None:
    def run(name: str, *options: object) -> Any:
        arguments = ["medusa", "generate-data", base, "--data", data, "--out", tmp_path / name]
        more = ["--max-bad-lines", 1, "--max-new-tokens", 5, "--prompt-tokens", 4, *options]
        return CliRunner().invoke(app, list(map(str, [*arguments, *more])))

    assert run("a.jsonl").exit_code == 0 and run("b.jsonl").exit_code == 0
    texts = [(tmp_path / name).read_text() for name in ("a.jsonl", "b.jsonl")]
    assert texts[0] == texts[1] and len(texts[0].splitlines()) >= 11
    result = run("b.jsonl", "--seed", 1, "--overwrite", "--temperature", 2.0)
    assert (tmp_path / "b.jsonl").read_text() != texts[0] and "b.jsonl: " in result.stderr
    for name, words in (("a.jsonl", "already"), ("a.json", "ends in .jsonl"), ("no/a.jsonl", "its folder is not")):
        assert run(name).exit_code == 1 and words in run(name).stderr


def test_own_words_go_on_where_they_were_killed(base: Path, data: Path, tmp_path: Path, children: Any) -> None:
    out = {name: tmp_path / f"{name}.jsonl" for name in ("whole", "killed")}
    options = ["--max-bad-lines", "1", "--max-new-tokens", "24", "--prompt-tokens", "4", "--batch-size", "2"]

    def arguments(name: str, *more: str) -> list[str]:
        return [str(base), "--data", str(data), "--out", str(out[name]), *options, "--resume", *more]

    def run(name: str, *more: str) -> Any:
        return CliRunner().invoke(app, ["medusa", "generate-data", *arguments(name, *more)])

    assert run("whole").exit_code == 0
    progress, partial = (tmp_path / f".killed.jsonl.{ending}" for ending in ("progress", "partial"))
    draw, reached = random.Random(0), set[int]()
    for target in (1, 13):
        child = children.Process(target=command, args=arguments("killed"), kwargs={"name": "generate-data"})
        child.start()
        while child.is_alive() and not (progress.is_file() and json.loads(progress.read_text())["done"] >= target):
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.01))
        child.kill()
        child.join()
        assert not out["killed"].exists()
        reached.add(json.loads(progress.read_text())["done"])
        with partial.open("ab") as file:
            file.write(b'{"text": "half a li' * 10_000)
    assert len(reached) == 2, reached
    assert (
        "--temperature" not in options and "temperature was 0.3, is 1.0" in run("killed", "--temperature", "1").stderr
    )
    result = run("killed")
    assert result.exit_code == 0 and out["killed"].read_bytes() == out["whole"].read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.jsonl", "whole.jsonl"]
    # Again there is nothing left to do; and what is damaged is named.
    before = out["whole"].stat().st_mtime_ns
    assert run("whole").exit_code == 0 and out["whole"].stat().st_mtime_ns == before
    out["killed"].unlink()
    progress.write_text('{"done": 3}')
    assert "damaged; remove it" in run("killed").stderr


def test_own_words_go_on_with_the_model_that_began_them(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by what is in the files, wherever they are; and on the day that it was."""
    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "a.jinja"
    shutil.copytree(base, here)
    file.write_text("{{ strftime_now('%Y-%m-%d') }} {{ messages[-1].content }}")

    def run(name: str, model: Path, template: Path, *more: str) -> Any:
        files = [model, "--data", data, "--out", tmp_path / f"{name}.jsonl", "--chat-template", template]
        options = ["--max-bad-lines", 1, "--max-new-tokens", 5, "--prompt-tokens", 4, "--batch-size", 4]
        return CliRunner().invoke(app, ["medusa", "generate-data", *map(str, [*files, *options]), *more])

    records, calls = OwnWords.records, list[Any]()

    def stopped(self: OwnWords, indices: Any) -> Any:
        calls.append(indices)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return records(self, indices)

    with monkeypatch.context() as patched:
        patched.setattr(OwnWords, "records", stopped)
        assert "--resume goes on" in run("stopped", here, file, "--date", "2001-02-03").stderr
    here.rename(there)
    moved = shutil.copy(file, there)
    shutil.copytree(base, here)
    weights = bytearray((here / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (here / "model.safetensors").write_bytes(weights)
    assert "base: not what the run began with: model.safetensors has" in run("stopped", here, file, "--resume").stderr
    file.write_text("{{ messages[0].content }}")
    assert "chat_template: not what the run began with: a.jinja" in run("stopped", there, file, "--resume").stderr
    told = "date was '2001-02-03', is '2001-02-04'"  # That of the start holds, whichever day it is.
    assert told in run("stopped", there, moved, "--resume", "--date", "2001-02-04").stderr
    assert run("stopped", there, moved, "--resume").exit_code == 0
    assert run("whole", base, moved, "--date", "2001-02-03").exit_code == 0
    assert (tmp_path / "stopped.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


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

    rows, held_rows = (pack((text(seed, 2000) for seed in seeds), 64) for seeds in (range(40), range(40, 44)))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": vocab}
    model = lm.from_config({**CONFIGS["llama-3.1"], **sizes, "initializer_range": 0.1}, dtype=torch.float32)

    def learn(trained: Any, parameters: Iterator[torch.nn.Parameter], **more: Any) -> None:
        optimizer = optimizer_named("adamw", parameter_groups([(parameters, 1e-2)], 0.0), betas=(0.9, 0.95))
        more |= {"optimizer": optimizer, "schedule": warmup_cosine(optimizer, 200, warmup=20)}
        train(trained, batches(rows, 8, seed=0), steps=200, report_every=200, **more)

    learn(model, model.parameters())
    medusa = lm.MedusaModel.from_base(model, num_heads=4)
    learn(medusa, medusa.head_parameters())
    found = evaluate_heads(medusa, batches(held_rows, 8, epochs=1)).accuracy(1).tolist()
    assert found == pytest.approx([sure**n for n in (2, 3, 4, 5)], rel=0.1)
    assert all(a > 1.1 * b for a, b in pairwise(found))
    assert found[-1] > 10 * frequency_baseline(rows, held_rows, 1)
    tried = trial(medusa, [text(seed, 9) for seed in range(50, 66)], nodes=20, max_new_tokens=32)
    assert tried.race.same == 8 and tried.race.tokens_per_step > 2
    assert tried.race.tokens_per_step == pytest.approx(tried.predicted, rel=0.05)

    # Stage 2 on the next token of the data, without a reference: a model that knows the language does so afterwards.
    second = copy.deepcopy(medusa)
    learn(Joint(second), second.parameters(), loss_options=lambda step: {"heads_scale": 0.2})
    drift = evaluate_drift(second.base, model, batches(held_rows, 8, epochs=1))
    after = evaluate_heads(second, batches(held_rows, 8, epochs=1)).accuracy(1).tolist()
    assert drift.perplexity_change < 0.01 and drift.kl > 0
    assert after == pytest.approx([sure**n for n in (2, 3, 4, 5)], rel=0.1)


def test_stage_2_makes_better_heads_and_leaves_the_model_as_good(tmp_path: Path) -> None:
    """The demo's model, smaller: head 0 gains over stage 1, and over a stage 1 that lasts as long."""
    s = DemoSettings(corpus_bytes=1_200_000, vocab_size=320, hidden_size=64, length=128, steps=250, head_steps=120)
    files, held = hold_out(python_sources(s.corpus_bytes), s.held_out, seed=s.seed)
    tokenizer = train_tokenizer(files, s.vocab_size, tmp_path)
    end = tokenizer.backend.token_to_id(END)
    rows = pack(encode(read_documents(files), tokenizer, eos_token_id=end), s.length)
    documents = (ids[:4096] for ids in encode(read_documents(held), tokenizer, eos_token_id=end))
    held_rows = pack(documents, s.length)
    (tmp_path / "config.json").write_text(json.dumps(llama_config(s, end)))

    def learn(model: Any, rates: Any, steps: int, seed: int, **options: Any) -> None:
        optimizer = optimizer_named("adamw", parameter_groups(rates, 0.0), betas=(0.9, 0.95))
        schedule = warmup_cosine(optimizer, steps, warmup=steps // 10)
        parts = batches(rows, s.rows_per_batch, seed=seed)
        train(model, parts, steps=steps, optimizer=optimizer, schedule=schedule, report_every=steps, **options)

    def accuracy(model: lm.MedusaModel) -> float:
        return float(evaluate_heads(model, batches(held_rows, 8, epochs=1)).accuracy(1)[0])

    model = lm.from_config(tmp_path)
    learn(model, [(model.parameters(), 4e-3)], s.steps, 0)
    first = lm.MedusaModel.from_base(model, num_heads=2)
    learn(first, [(first.head_parameters(), 3e-3)], s.head_steps, 1)
    longer, second = copy.deepcopy(first), copy.deepcopy(first)
    learn(longer, [(longer.head_parameters(), 3e-3)], s.head_steps, 2)
    rates = [(second.base.parameters(), 2e-3), (second.head_parameters(), 8e-3)]
    learn(Joint(second, model), rates, s.head_steps, 2, loss_options=lambda step: {"heads_scale": 0.3})
    drift = evaluate_drift(second.base, model, batches(held_rows, 8, epochs=1))
    assert accuracy(second) > 1.1 * max(accuracy(first), accuracy(longer))
    assert drift.perplexity_change < 0.01 and 0 < drift.kl < 0.05
    assert drift.loss == pytest.approx(evaluate(second.base, batches(held_rows, 8, epochs=1)), rel=1e-6)
