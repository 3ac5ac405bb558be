"""Training: exact packing, exact accumulation, a schedule known at its corners, and loud ends."""

import json
import math
import warnings
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from zoo import LLAMA as BASE

import ligermodels as lm
from ligermodels.errors import InputError, TrainingError
from ligermodels.tokenizer import Tokenizer
from ligermodels.training import (
    Batch,
    Rows,
    adamw,
    batches,
    encode,
    evaluate,
    evaluate_heads,
    hold_out,
    pack,
    read_documents,
    train,
    warmup_cosine,
)
from ligermodels.training.optimizer import optimizer_named, parameter_groups


def small(**changes: object) -> lm.CausalLM:
    return lm.from_config({**BASE, "model_type": "llama", "num_hidden_layers": 1, **changes}, dtype=torch.float64)


def model_of(kind: str) -> lm.CausalLM | lm.MedusaModel:
    torch.manual_seed(3)
    return small() if kind == "lm" else lm.MedusaModel.from_base(small(), num_heads=3)


def documents(*lengths: int) -> list[list[int]]:
    """Token ids that differ by document: document d holds 3 + d."""
    return [[3 + d] * length for d, length in enumerate(lengths)]


def corpus(count: int = 14) -> Rows:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    return pack([torch.randint(3, 131, (n,), generator=generator).tolist() for n in lengths], 16)


# -- text --------------------------------------------------------------------------------------------------------------


def test_texts_come_from_plain_files_and_from_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("whole\nfile é", encoding="utf-8")
    (tmp_path / "empty.txt").write_text("")
    lines = [{"text": "one"}, {"text": ""}, {"text": "zwei\nü", "more": 1}]
    (tmp_path / "b.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines))
    names = ["b.jsonl", "empty.txt", "a.py"]
    assert list(read_documents(tmp_path / name for name in names)) == ["one", "zwei\nü", "whole\nfile é"]


BAD_LINES = b'{"text": "good"}\n{"text": "cut\n["text"]\n{"text": 5}\n{"text": "\xff"}\n{"text": "fine"}\n'


def test_bad_lines_are_an_error_unless_allowed_and_are_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(BAD_LINES)
    with pytest.raises(InputError, match=r"data\.jsonl:2: not JSON"):
        list(read_documents([path]))
    passed_over: list[str] = []
    assert list(read_documents([path], max_bad_lines=4, on_bad_line=passed_over.append)) == ["good", "fine"]
    assert [message.split(":")[1] for message in passed_over] == ["2", "3", "4", "5"]
    with pytest.warns(UserWarning), pytest.raises(InputError, match=r"data\.jsonl:5: .*4 bad lines, 3 allowed"):
        list(read_documents([path], max_bad_lines=3))
    with warnings.catch_warnings(), pytest.raises(InputError, match="3 bad lines, 2 allowed"):
        warnings.simplefilter("ignore")
        list(read_documents([path, path], max_bad_lines=2))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    for name, reason in (("latin.txt", "UTF-8.*byte 0"), ("absent.txt", "No such file"), ("absent.jsonl", "No such")):
        with pytest.raises(InputError, match=f"{name}: .*{reason}"):
            list(read_documents([tmp_path / name]))


def test_documents_end_in_eos_once(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer, texts = Tokenizer(tmp_path), ["a b", "b", "a </s>"]
    assert list(encode(texts, tokenizer)) == [[0, 2, 3], [0, 3], [0, 2, 1]]
    assert list(encode(iter(texts), tokenizer, eos_token_id=1)) == [[0, 2, 3, 1], [0, 3, 1], [0, 2, 1]]


def test_held_out_items_are_few_fixed_and_in_order() -> None:
    kept, held = hold_out(list(range(40)), 0.1, seed=2)
    assert (len(kept), len(held)) == (36, 4)
    assert sorted(kept + held) == list(range(40)) and kept == sorted(kept) and held == sorted(held)
    assert hold_out(list(range(40)), 0.1, seed=2)[1] == held != hold_out(list(range(40)), 0.1, seed=3)[1]
    assert [len(part) for part in hold_out("ab", 0.01)] == [len(part) for part in hold_out("ab", 0.99)] == [1, 1]
    with pytest.raises(InputError, match="two items"):
        hold_out("a")


# -- packing -----------------------------------------------------------------------------------------------------------


def pieces(batch: Batch) -> list[list[int]]:
    bounds = batch["cu_seqlens"].tolist()
    return [batch["input_ids"][0, a:b].tolist() for a, b in pairwise(bounds)]


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    length=st.integers(1, 11),
    rows_per_batch=st.integers(1, 4),
)
def test_packing_keeps_every_token_once_and_documents_apart(
    lengths: list[int], length: int, rows_per_batch: int
) -> None:
    given = documents(*lengths)
    rows = pack(given, length)
    stream = [token for document in given for token in document]
    assert len(rows) == math.ceil(len(stream) / length)
    found = [piece for batch in batches(rows, rows_per_batch, epochs=1) for piece in pieces(batch)]
    assert [token for piece in found for token in piece] == stream
    assert all(0 < len(piece) <= length and len(set(piece)) == 1 for piece in found)
    # No cut where there need not be one: a piece ends with its document or with its row.
    cuts = {end for end in range(length, len(stream), length)}
    ends = {sum(lengths[: d + 1]) for d in range(len(lengths))}
    place = 0
    for piece in found:
        place += len(piece)
        assert place in cuts | ends
    shuffled = [piece for batch in batches(rows, rows_per_batch, seed=5, epochs=1) for piece in pieces(batch)]
    assert Counter(map(tuple, shuffled)) == Counter(map(tuple, found))


def test_packed_pieces_neither_see_nor_predict_one_another() -> None:
    model, rows = small(), corpus()
    batch = rows.batch([3, 1, 0])
    alone = [torch.tensor([piece]) for piece in pieces(batch)]
    assert len(alone) > 3
    targets = [max(0, ids.shape[1] - 1) for ids in alone]
    total = sum(model(ids, labels=ids, reduction="sum").loss for ids in alone)
    assert model.num_targets(batch["labels"], cu_seqlens=batch["cu_seqlens"]) == sum(targets)
    torch.testing.assert_close(model(**batch).loss, total / sum(targets), rtol=1e-12, atol=0)


def test_order_is_of_the_seed_and_resumes_in_the_middle() -> None:
    rows = corpus()
    several = list(islice(batches(rows, 3, seed=1), 20))
    assert len(rows) % 3 and len(rows) < 3 * 20 / 2  # A smaller batch at the end, and more than one epoch.
    again = list(islice(batches(rows, 3, seed=1, skip=7), 13))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(several[7:], again, strict=True))
    an_epoch = math.ceil(len(rows) / 3)
    assert not torch.equal(several[0]["input_ids"], several[an_epoch]["input_ids"])
    assert not torch.equal(several[0]["input_ids"], next(batches(rows, 3, seed=2))["input_ids"])
    assert len(list(batches(rows, 3, seed=1, epochs=2))) == 2 * an_epoch


def test_nothing_to_pack_is_an_error() -> None:
    for nothing in ([], [[], []]):
        with pytest.raises(InputError, match="not a single token"):
            pack(nothing, 8)
    with pytest.raises(InputError, match="length"):
        pack([[1]], 0)
    with pytest.raises(InputError, match="rows_per_batch"):
        next(batches(corpus(), 0))


# -- optimiser and schedule --------------------------------------------------------------------------------------------


def test_schedule_rises_to_one_and_falls_to_its_floor() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = warmup_cosine(optimizer, 12, warmup=4, floor=0.1)
    rates = []
    for _ in range(14):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[7] == pytest.approx(2.0 * 0.55)  # Half-way between 1 and the floor.
    assert rates[11:] == pytest.approx([0.2] * 3)
    assert all(a > b for a, b in pairwise(rates[3:12]))
    with pytest.raises(InputError, match="warmup=5"):
        warmup_cosine(optimizer, 4, warmup=5)


def test_groups_have_their_own_rates_on_one_way() -> None:
    medusa = lm.MedusaModel.from_base(small(), num_heads=2)
    medusa.base.requires_grad_()
    rates = [(medusa.head_parameters(), 4e-3), (medusa.base.parameters(), 1e-3)]
    for kind in ("adamw", "adafactor"):
        groups = parameter_groups(((list(parameters), lr) for parameters, lr in rates), 0.5)
        rates = [(medusa.head_parameters(), 4e-3), (medusa.base.parameters(), 1e-3)]
        optimizer = optimizer_named(kind, groups, betas=(0.9, 0.99))
        schedule = warmup_cosine(optimizer, 10, warmup=2)
        assert [group["lr"] for group in optimizer.param_groups] == [2e-3, 2e-3, 5e-4, 5e-4]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0, 0.5, 0.0]
        optimizer.step()
        schedule.step()
        assert [group["lr"] for group in optimizer.param_groups] == [4e-3, 4e-3, 1e-3, 1e-3]
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(medusa.parameters()))


def test_only_matrices_decay_and_frozen_parameters_stay_out() -> None:
    medusa = lm.MedusaModel.from_base(small(), num_heads=2)
    decayed, other = adamw(medusa.parameters(), 1.0, weight_decay=0.5).param_groups
    assert {id(p) for p in decayed["params"]} == {id(p) for p in medusa.head_parameters() if p.ndim == 2}
    assert {id(p) for p in other["params"]} == {id(p) for p in medusa.head_parameters() if p.ndim == 1}
    assert (decayed["weight_decay"], other["weight_decay"]) == (0.5, 0.0)
    with pytest.raises(InputError, match="nothing to train"):
        adamw(medusa.base.parameters(), 1.0)


# -- loop --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lm", "medusa"])
def test_accumulated_gradient_is_that_of_one_batch(kind: str) -> None:
    # Batches with very different numbers of targets, one of them with none at all for some heads.
    rows = pack(documents(15, 1, 1, 1, 2, 10, 16, 3), 8)
    parts = [rows.batch([i]) for i in (0, 2, 4, 6)]
    parts[0]["labels"] = parts[0]["labels"].clone().index_fill(1, torch.arange(5), -100)
    whole: Batch = {
        "input_ids": torch.cat([part["input_ids"] for part in parts], dim=1),
        "labels": torch.cat([part["labels"] for part in parts], dim=1),
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int32)] + [
            part["cu_seqlens"][1:] + offset for part, offset in zip(parts, (0, 8, 16, 24), strict=True)
        ]),
    }  # fmt: skip
    models = [model_of(kind) for _ in range(3)]
    losses = []
    for model, feed in zip(models[:2], (parts, [whole]), strict=True):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        train(
            model,
            feed,
            steps=1,
            optimizer=optimizer,
            grad_clip=0.05,
            accumulate=len(feed),
            on_step=lambda metrics: losses.append(metrics.loss),
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert losses[1] == pytest.approx(models[2](**whole).loss.item(), rel=1e-12)
    moved = 0
    for (name, a), b, start in zip(
        models[0].named_parameters(), models[1].parameters(), models[2].parameters(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13, msg=name)
        moved += not torch.equal(a, start)
    assert moved == sum(p.requires_grad for p in models[2].parameters())


def run(model: lm.CausalLM, rows: Rows, steps: int, optimizer: torch.optim.Optimizer, schedule, skip: int = 0) -> None:
    feed = batches(rows, 2, seed=4, skip=skip)
    train(model, feed, steps=steps, optimizer=optimizer, schedule=schedule, accumulate=2)


def test_a_run_resumed_in_the_middle_ends_the_same() -> None:
    rows, models = corpus(), [model_of("lm"), model_of("lm")]
    optimizers = [adamw(model.parameters(), 1e-2) for model in models]
    schedules = [warmup_cosine(optimizer, 6, warmup=2) for optimizer in optimizers]
    run(models[0], rows, 6, optimizers[0], schedules[0])
    run(models[1], rows, 4, optimizers[1], schedules[1])

    resumed = model_of("lm")
    resumed.load_state_dict(models[1].state_dict())
    optimizer = adamw(resumed.parameters(), 1e-2)
    schedule = warmup_cosine(optimizer, 6, warmup=2)
    optimizer.load_state_dict(optimizers[1].state_dict())
    schedule.load_state_dict(schedules[1].state_dict())
    run(resumed, rows, 2, optimizer, schedule, skip=4 * 2)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), resumed.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(models[1].parameters(), resumed.parameters(), strict=True))


def test_training_lowers_the_loss_and_reports_it() -> None:
    model, rows, seen = small(), corpus(), []
    before = evaluate(model, batches(rows, 4, epochs=1))
    optimizer = adamw(model.parameters(), 1e-2)
    schedule = warmup_cosine(optimizer, 25, warmup=5)
    train(
        model,
        batches(rows, 4, seed=0),
        steps=25,
        optimizer=optimizer,
        schedule=schedule,
        on_step=seen.append,
        report_every=10,
    )
    assert [metrics.step for metrics in seen] == [10, 20, 25]
    assert seen[-1].learning_rate == pytest.approx(1e-3)
    assert seen[0].loss > seen[1].loss > seen[2].loss > 0 and all(m.tokens_per_second > 0 for m in seen)
    assert evaluate(model, batches(rows, 4, epochs=1)) < 0.8 * before


def test_hooks_stops_and_starts() -> None:
    rows, heard, options = corpus(), [], []
    model = model_of("lm")

    def run_to(steps: int, start: int, stop_after: int) -> int:
        return train(
            model,
            batches(rows, 2, seed=0, skip=start),
            steps=steps,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
            on_step=lambda metrics: heard.append(("report", metrics.step, [one.step for one in metrics.each])),
            report_every=4,
            hooks=[
                (3, lambda step: heard.append(("three", step))),
                (5, lambda step: (heard.append(("five", step)), model.eval())),
            ],
            start=start,
            stop=lambda: heard[-1:] != [] and heard[-1][1] >= stop_after,
            loss_options=lambda step: options.append((step, model.training)) or {"z_loss": 0.0},
        )

    assert run_to(7, 0, 99) == 7
    assert heard == [
        ("report", 3, [1, 2, 3]), ("three", 3), ("report", 4, [4]), ("report", 5, [5]), ("five", 5),
        ("report", 6, [6]), ("three", 6), ("report", 7, [7]), ("three", 7), ("five", 7),
    ]  # fmt: skip
    assert options == [(step, True) for step in range(1, 8)]  # Though a hook left the model in eval mode.
    heard.clear()
    # Stopped: asked after each step, and again after its hooks, one of which may have taken long.
    assert run_to(20, 7, 9) == 9
    assert heard == [("report", 8, [8]), ("report", 9, [9]), ("three", 9)]
    assert run_to(20, 20, 99) == 20  # Nothing left to do.
    with pytest.raises(InputError, match="at least 1"):
        train(model, [], steps=1, optimizer=torch.optim.SGD(model.parameters()), hooks=[(0, print)])


def test_each_step_is_told_with_the_heads_accuracies() -> None:
    medusa, rows, seen = model_of("medusa"), corpus(), []
    optimizer = torch.optim.SGD(medusa.head_parameters(), lr=0.0)
    train(
        medusa,
        batches(rows, 1, seed=0),
        steps=6,
        accumulate=2,
        optimizer=optimizer,
        report_every=4,
        on_step=seen.append,
    )
    assert [[one.step for one in metrics.each] for metrics in seen] == [[1, 2, 3, 4], [5, 6]]
    for metrics, (start, end) in zip(seen, ((0, 8), (8, 12)), strict=True):
        parts = list(islice(batches(rows, 1, seed=0), start, end))
        scores = evaluate_heads(medusa, parts)
        assert metrics.accuracy == pytest.approx(scores.accuracy(1).tolist(), abs=1e-6)
        assert [one.tokens for one in metrics.each] == [
            sum(part["input_ids"].numel() for part in parts[i : i + 2]) for i in range(0, len(parts), 2)
        ]
        assert metrics.loss == pytest.approx(sum(one.loss for one in metrics.each) / len(metrics.each))
        assert metrics.grad_norm == metrics.each[-1].grad_norm > 0
        for one, first in zip(metrics.each, range(start, end, 2), strict=True):
            alone = evaluate_heads(medusa, parts[first - start : first - start + 2])
            assert one.head_losses == pytest.approx(alone.losses.tolist()) and one.base_loss is None
            assert one.loss == pytest.approx(sum(0.8**i * loss for i, loss in enumerate(one.head_losses)))


@pytest.mark.parametrize("wrong", ["loss", "gradient"])
def test_the_batch_at_fault_is_named(wrong: str) -> None:
    model = model_of("lm")
    with torch.no_grad():
        model.embed.weight[2] = math.nan  # Of a token that is not in the corpus.

    def feed():
        for number, batch in enumerate(batches(corpus(), 1, seed=0), start=1):
            if number == 8 and wrong == "loss":
                batch["input_ids"] = batch["input_ids"].clone().index_fill_(1, torch.tensor([0]), 2)
            yield Batch(batch, where=lambda number=number: f"file:{number}")

    if wrong == "gradient":
        model.norm.weight.register_hook(lambda grad: grad * math.inf)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    words = {
        "loss": "step 3: .*At fault: batch 2 of 3, made of file:8. Try",
        "gradient": "step 1: .*all its batches, made of file:1; file:2; file:3. Try",
    }[wrong]
    with pytest.raises(TrainingError, match=words):
        train(model, feed(), steps=9, accumulate=3, optimizer=optimizer, report_every=3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(value: float) -> None:
    model, rows = small(), corpus()

    def feed():
        for number, batch in enumerate(batches(rows, 1, seed=0), start=1):
            if number == 5:
                with torch.no_grad():
                    model.norm.weight.fill_(value)
            yield batch

    optimizer, seen = torch.optim.SGD(model.parameters(), lr=1e-3), []
    with pytest.raises(TrainingError, match="step 5: the loss is"):
        train(model, feed(), steps=9, optimizer=optimizer, report_every=3, on_step=lambda m: seen.append(m.step))
    assert seen == [3]


@pytest.mark.parametrize("kind", ["lm", "medusa"])
def test_a_step_without_targets_is_none_and_a_run_without_them_an_error(kind: str) -> None:
    def feed(*empty: int):
        for number, batch in enumerate(batches(corpus(), 1, seed=0), start=1):
            if number in empty:
                batch["labels"] = torch.full_like(batch["labels"], -100)
            yield Batch(batch, where=lambda number=number: f"file:{number}")

    def losses_with(*empty: int, steps: int = 4) -> list[float]:
        model, seen = model_of(kind), []
        optimizer = adamw([p for p in model.parameters() if p.requires_grad], 1e-2)
        train(model, feed(*empty), steps=steps, optimizer=optimizer, accumulate=2, report_every=2, on_step=seen.append)
        assert all(p.isfinite().all() for p in model.parameters())
        return [one.loss for metrics in seen for one in metrics.each]

    assert losses_with(1, 2)[0] == 0 < min(losses_with(1, 2)[1:])
    assert losses_with(5, 6)[2] == 0 < losses_with(5, 6)[3]
    assert losses_with(1, 2, 3, 4)[2] > 0
    for steps, end in ((4, 4), (40, 10)):  # In all of them, or in the first.
        with pytest.raises(
            TrainingError, match=rf"step {end}: there has not been a single target .* in file:\d+; train"
        ):
            losses_with(*range(1, 99), steps=steps)


def test_batches_that_end_early_are_an_error() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(InputError, match="ended at step 2 of 3"):
        train(model, islice(batches(corpus(), 1), 5), steps=3, optimizer=optimizer, accumulate=3)


# -- scores ------------------------------------------------------------------------------------------------------------


def test_scores_of_heads_are_those_of_their_logits() -> None:
    medusa = model_of("medusa")
    with torch.no_grad():
        for parameter in medusa.head_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    rows = corpus()
    scores = evaluate_heads(medusa, batches(rows, 3, epochs=1))
    logits = [[] for _ in range(3)]
    wanted = [[] for _ in range(3)]
    for piece in (piece for batch in batches(rows, 3, epochs=1) for piece in pieces(batch)):
        out = medusa(torch.tensor([piece])).logits[:, 0].detach()
        for head in range(3):
            targets = piece[2 + head :]
            logits[head].append(out[head, : len(targets)])
            wanted[head].append(torch.tensor(targets, dtype=torch.long))
    for head in range(3):
        x, y = torch.cat(logits[head]), torch.cat(wanted[head])
        assert scores.counts[head] == len(y)
        torch.testing.assert_close(scores.losses[head], torch.nn.functional.cross_entropy(x, y), rtol=1e-12, atol=0)
        hits = (x.topk(10).indices == y[:, None]).double().mean(0)
        torch.testing.assert_close(scores.hits[head], hits, rtol=1e-12, atol=0)
        torch.testing.assert_close(scores.accuracy(5)[head], hits[:5].sum(), rtol=1e-12, atol=0)
    with pytest.raises(InputError, match="not for 11"):
        scores.accuracy(11)
    for measure, model in ((evaluate, medusa.base), (evaluate_heads, medusa)):
        with pytest.raises(InputError, match="not a single batch"):
            measure(model, [])
