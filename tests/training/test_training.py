"""Training: exact packing, exact accumulation, a schedule known at its corners, and loud ends."""

import gc
import math
import warnings
import weakref
from collections.abc import Iterator
from itertools import islice, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from zoo import LLAMA as BASE

import ligermodels as lm
from ligermodels.data.batches import Batch
from ligermodels.data.documents import TokenDocuments
from ligermodels.data.packing import PackedBatches
from ligermodels.errors import InputError, SequenceLengthWarning, TrainingError
from ligermodels.evaluation import evaluate
from ligermodels.speculative.evaluation import evaluate_heads
from ligermodels.training import Callback, Event, FusedAdamW, StepMetrics, adamw, clip_gradients, train, warmup_cosine
from ligermodels.training.medusa import head_metrics
from ligermodels.training.optimizer import optimizer_named
from ligermodels.training.parameter_groups import parameter_groups


def small(**changes: object) -> lm.CausalLM:
    return lm.from_config({**BASE, "model_type": "llama", "num_hidden_layers": 1, **changes}, dtype=torch.float64)


def model_of(kind: str) -> lm.CausalLM | lm.MedusaModel:
    torch.manual_seed(3)
    return small() if kind == "lm" else lm.MedusaModel.from_base(small(), num_heads=3)


def corpus(count: int = 14) -> TokenDocuments:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 40, (count,), generator=generator).tolist()
    return TokenDocuments(torch.randint(3, 131, (n,), generator=generator).tolist() for n in lengths)


def batches(
    documents: TokenDocuments, size: int, *, seed: int | None = None, epochs: int | None = None, skip: int = 0
) -> Iterator[Batch]:
    return islice(PackedBatches(documents, seq_len=16, batch_size=size, seed=seed, epochs=epochs), skip, None)


def pieces(batch: Batch) -> list[list[int]]:
    return [batch["input_ids"][0, a:b].tolist() for a, b in pairwise(batch["cu_seqlens"].tolist())]


def test_packed_pieces_neither_see_nor_predict_one_another() -> None:
    model, batch = small(), next(batches(corpus(), 3))
    alone = [torch.tensor([piece]) for piece in pieces(batch)]
    assert len(alone) > 3
    targets = [max(0, ids.shape[1] - 1) for ids in alone]
    total = sum(model(ids, labels=ids, reduction="sum").loss for ids in alone)
    assert model.num_targets(batch["labels"], cu_seqlens=batch["cu_seqlens"]) == sum(targets)
    torch.testing.assert_close(model(**batch).loss, total / sum(targets), rtol=1e-12, atol=0)


# -- optimizer and schedule --------------------------------------------------------------------------------------------


def test_schedule_rises_to_one_and_falls_to_the_minimum() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = warmup_cosine(optimizer, 12, warmup_steps=4, min_lr_ratio=0.1)
    rates = []
    for _ in range(14):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[7] == pytest.approx(2.0 * 0.55)  # half-way between 1 and the minimum
    assert rates[11:] == pytest.approx([0.2] * 3)
    assert all(a > b for a, b in pairwise(rates[3:12]))
    with pytest.raises(InputError, match="warmup_steps: must be at most 4, got 5"):
        warmup_cosine(optimizer, 4, warmup_steps=5)
    with pytest.warns(DeprecationWarning, match="warmup_steps="):
        assert warmup_cosine(optimizer, 4, **{"warmup": 2}).get_last_lr() == [1.0]
    with pytest.raises(TypeError, match="'warmup' is the old name of 'warmup_steps'; give one of the two"):
        warmup_cosine(optimizer, 4, warmup_steps=1, **{"warmup": 2})


def test_groups_have_their_own_rates_on_one_way() -> None:
    medusa = lm.MedusaModel.from_base(small(), num_heads=2)
    medusa.base.requires_grad_()
    rates = [(medusa.head_parameters(), 4e-3), (medusa.base.parameters(), 1e-3)]
    for kind in ("adamw", "adafactor", "muon"):
        groups = parameter_groups(((list(parameters), lr) for parameters, lr in rates), 0.5)
        rates = [(medusa.head_parameters(), 4e-3), (medusa.base.parameters(), 1e-3)]
        optimizer = optimizer_named(kind, groups, model=medusa, betas=(0.9, 0.99))
        schedule = warmup_cosine(optimizer, 10, warmup_steps=2)
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


@pytest.mark.parametrize("given", [[], [{"params": []}], "frozen"])
def test_fused_adamw_without_a_trainable_parameter_is_an_error(given: object) -> None:
    parameters = small().requires_grad_(False).parameters() if given == "frozen" else given
    with pytest.raises(InputError, match="no parameter requires a gradient"):
        FusedAdamW(parameters)


@pytest.mark.parametrize("handles_kept", [False, True])
def test_step_in_backward_frees_the_model_with_the_optimizer(handles_kept: bool) -> None:
    model = small()
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    handles = optimizer.step_in_backward()
    ids = torch.tensor([[3, 4, 5, 6]])
    before = model.decoder.norm.weight.detach().clone()
    model(ids, labels=ids).loss.backward()
    assert not torch.equal(model.decoder.norm.weight, before) and model.decoder.norm.weight.grad is None
    alive = [weakref.ref(each) for each in (model, optimizer, *model.parameters())]
    if not handles_kept:
        del handles
    del model, optimizer
    gc.collect()
    assert not [each for each in alive if each() is not None]


def test_step_in_backward_ends_with_the_optimizer_and_follows_its_groups() -> None:
    model = small()
    ids = torch.tensor([[3, 4, 5, 6]])
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    handles = optimizer.step_in_backward()
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.0
    optimizer.load_state_dict(state)  # replaces the group dicts
    before = model.decoder.norm.weight.detach().clone()
    model(ids, labels=ids).loss.backward()
    assert torch.equal(model.decoder.norm.weight, before) and model.decoder.norm.weight.grad is None
    del optimizer
    gc.collect()
    model(ids, labels=ids).loss.backward()
    assert model.decoder.norm.weight.grad is not None
    for handle in handles:  # removing them again does nothing
        handle.remove()


# -- loop --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lm", "medusa"])
def test_accumulated_gradient_is_that_of_one_batch(kind: str) -> None:
    # Batches with very different numbers of targets, one of them with none at all for some heads.
    documents = TokenDocuments([3 + d] * length for d, length in enumerate((15, 2, 2, 2, 2, 10, 16, 7)))
    parts = list(PackedBatches(documents, seq_len=8, batch_size=1, epochs=1))[:8:2]
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
            max_grad_norm=0.05,
            accumulation_steps=len(feed),
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


def run(
    model: lm.CausalLM, documents: TokenDocuments, steps: int, optimizer: torch.optim.Optimizer, schedule, skip: int = 0
) -> None:
    feed = batches(documents, 2, seed=4, skip=skip)
    train(model, feed, steps=steps, optimizer=optimizer, schedule=schedule, accumulation_steps=2)


def test_a_run_resumed_in_the_middle_ends_the_same() -> None:
    documents, models = corpus(), [model_of("lm"), model_of("lm")]
    optimizers = [adamw(model.parameters(), 1e-2) for model in models]
    schedules = [warmup_cosine(optimizer, 6, warmup_steps=2) for optimizer in optimizers]
    run(models[0], documents, 6, optimizers[0], schedules[0])
    run(models[1], documents, 4, optimizers[1], schedules[1])

    resumed = model_of("lm")
    resumed.load_state_dict(models[1].state_dict())
    optimizer = adamw(resumed.parameters(), 1e-2)
    schedule = warmup_cosine(optimizer, 6, warmup_steps=2)
    optimizer.load_state_dict(optimizers[1].state_dict())
    schedule.load_state_dict(schedules[1].state_dict())
    run(resumed, documents, 2, optimizer, schedule, skip=4 * 2)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), resumed.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(models[1].parameters(), resumed.parameters(), strict=True))


def test_training_lowers_the_loss_and_reports_it() -> None:
    model, documents, seen = small(), corpus(), []
    before = evaluate(model, batches(documents, 4, epochs=1))
    optimizer = adamw(model.parameters(), 1e-2)
    schedule = warmup_cosine(optimizer, 25, warmup_steps=5)
    train(
        model,
        batches(documents, 4, seed=0),
        steps=25,
        optimizer=optimizer,
        schedule=schedule,
        on_step=seen.append,
        report_every=10,
    )
    assert [metrics.step for metrics in seen] == [10, 20, 25]
    assert seen[-1].learning_rate == pytest.approx(1e-3)
    assert seen[0].loss > seen[1].loss > seen[2].loss > 0 and all(m.tokens_per_second > 0 for m in seen)
    assert evaluate(model, batches(documents, 4, epochs=1)) < 0.8 * before


def test_callbacks_and_starts() -> None:
    documents, calls, options = corpus(), [], []
    model = model_of("lm")

    class Every(Callback):
        def __init__(self, every: int) -> None:
            self.every = every

        def on_step_end(self, step: int) -> None:
            calls.append((self.every, step))
            model.eval()

    class Reports(Callback):
        def __init__(self, stop_after: int) -> None:
            self.stop_after = stop_after

        def on_report(self, metrics: StepMetrics) -> None:
            calls.append(("report", metrics.step, [one.step for one in metrics.each]))

        def should_stop(self) -> bool:
            return calls[-1:] != [] and calls[-1][1] >= self.stop_after

    def run_to(steps: int, start: int, stop_after: int) -> int:
        return train(
            model,
            batches(documents, 2, seed=0, skip=start),
            steps=steps,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
            report_every=4,
            callbacks=[Every(3), Reports(stop_after), Every(5)],
            start=start,
            loss_options=lambda step: options.append((step, model.training)) or {"z_loss": 0.0},
        )

    assert run_to(7, 0, 99) == 7
    assert calls == [
        ("report", 3, [1, 2, 3]), (3, 3), ("report", 4, [4]), ("report", 5, [5]), (5, 5),
        ("report", 6, [6]), (3, 6), ("report", 7, [7]), (3, 7), (5, 7),
    ]  # fmt: skip
    assert options == [(step, True) for step in range(1, 8)]  # though a callback left the model in evaluation mode
    calls.clear()
    # Stopped: asked after each step, and again after `on_step_end`, which may have taken long.
    assert run_to(20, 7, 9) == 9
    assert calls == [("report", 8, [8]), ("report", 9, [9]), (3, 9)]
    assert run_to(20, 20, 99) == 20  # nothing is left to do
    with pytest.raises(InputError, match="at least 1"):
        train(model, [], steps=1, optimizer=torch.optim.SGD(model.parameters()), callbacks=[Every(0)])


def test_batches_are_not_kept_until_a_report() -> None:
    """With rare reports and long batches they would fill the memory."""
    model, kept, alive = small(), list[Any](), list[int]()

    def endless() -> Iterator[Batch]:
        while True:
            labels = torch.randint(3, 99, (1, 8))
            kept.append(weakref.ref(labels))
            yield Batch({"input_ids": labels.clone(), "labels": labels})

    class Count(Callback):
        def on_step(self, event: Event) -> None:
            alive.append(sum(each() is not None for each in kept))

    train(model, endless(), steps=6, optimizer=adamw(model.parameters(), 1e-3), report_every=6, callbacks=[Count()])
    assert max(alive) <= 2, alive


def test_functions_in_place_of_callbacks() -> None:
    model, calls = model_of("lm"), []
    with pytest.warns(DeprecationWarning, match="callbacks=") as caught:
        step = train(
            model,
            batches(corpus(), 2, seed=0),
            steps=20,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
            on_step=lambda metrics: calls.append(metrics.step),
            hooks=[(2, lambda step: calls.append(-step))],
            stop=lambda: -4 in calls,
        )
    assert step == 4 and calls == [2, -2, 4, -4]
    assert all(each.filename == __file__ for each in caught) and len(caught) == 2


def test_each_step_is_told_with_the_heads_accuracies() -> None:
    medusa, documents, seen = model_of("medusa"), corpus(), []
    optimizer = torch.optim.SGD(medusa.head_parameters(), lr=0.0)
    train(
        medusa,
        batches(documents, 1, seed=0),
        steps=6,
        accumulation_steps=2,
        optimizer=optimizer,
        report_every=4,
        on_step=seen.append,
        output_metrics=head_metrics,
    )
    assert [[one.step for one in metrics.each] for metrics in seen] == [[1, 2, 3, 4], [5, 6]]
    for metrics, (start, end) in zip(seen, ((0, 8), (8, 12)), strict=True):
        parts = list(islice(batches(documents, 1, seed=0), start, end))
        scores = evaluate_heads(medusa, parts)
        assert metrics.ratios["head_accuracy"] == pytest.approx(scores.accuracy(1).tolist(), abs=1e-6)
        assert [one.tokens for one in metrics.each] == [
            sum(part["input_ids"].numel() for part in parts[i : i + 2]) for i in range(0, len(parts), 2)
        ]
        assert metrics.report_targets == sum(one.targets for one in metrics.each) == int(scores.counts.sum())
        mean = sum(one.loss * one.targets for one in metrics.each) / metrics.report_targets
        assert metrics.loss == pytest.approx(mean)
        assert metrics.grad_norm == metrics.each[-1].grad_norm > 0
        for one, first in zip(metrics.each, range(start, end, 2), strict=True):
            alone = evaluate_heads(medusa, parts[first - start : first - start + 2])
            assert one.losses == {"head_losses": pytest.approx(alone.losses.tolist())}
            assert one.loss == pytest.approx(sum(0.8**i * loss for i, loss in enumerate(one.losses["head_losses"])))


@pytest.mark.parametrize("wrong", ["loss", "gradient"])
def test_the_batch_at_fault_is_named(wrong: str) -> None:
    model = model_of("lm")
    with torch.no_grad():
        model.decoder.embed.weight[2] = math.nan  # Of a token that is not in the corpus.

    def feed():
        for number, batch in enumerate(batches(corpus(), 1, seed=0), start=1):
            if number == 8 and wrong == "loss":
                batch["input_ids"] = batch["input_ids"].clone().index_fill_(1, torch.tensor([0]), 2)
            yield Batch(batch, where=lambda number=number: f"file:{number}")

    if wrong == "gradient":
        model.decoder.norm.weight.register_hook(lambda grad: grad * math.inf)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    words = {
        "loss": "step 3: .*At fault: batch 2 of 3, made of file:8. Try",
        "gradient": "step 1: .*all its batches, made of file:1; file:2; file:3. Try",
    }[wrong]
    with pytest.raises(TrainingError, match=words):
        train(model, feed(), steps=9, accumulation_steps=3, optimizer=optimizer, report_every=3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(value: float) -> None:
    model, documents = small(), corpus()

    def feed():
        for number, batch in enumerate(batches(documents, 1, seed=0), start=1):
            if number == 5:
                with torch.no_grad():
                    model.decoder.norm.weight.fill_(value)
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
        train(
            model,
            feed(*empty),
            steps=steps,
            optimizer=optimizer,
            accumulation_steps=2,
            report_every=2,
            on_step=seen.append,
        )
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


@pytest.mark.parametrize("in_backward", [False, True])
def test_gradients_of_a_pass_before_do_not_count(in_backward: bool) -> None:
    model, norms = small(), []
    ids = torch.arange(3, 20)[None]
    for earlier in (False, True):
        optimizer = FusedAdamW(model.parameters(), lr=0.0)
        if earlier:
            model(ids.flip(1), labels=ids.flip(1)).loss.backward()
        if in_backward:
            optimizer.step_in_backward()
        batch = Batch({"input_ids": ids, "labels": ids})
        train(model, [batch], steps=1, optimizer=optimizer, max_grad_norm=None,
              on_step=lambda report: norms.append(report.grad_norm))  # fmt: skip
        del optimizer
    assert norms[0] == norms[1]


@pytest.mark.parametrize("norm", [0, -1.0, math.nan])
def test_a_norm_to_clip_to_is_above_zero(norm: float) -> None:
    model = small()
    with pytest.raises(InputError, match="max_grad_norm: must be above 0"):
        train(model, [], steps=1, optimizer=adamw(model.parameters(), 1e-3), max_grad_norm=norm)


@pytest.mark.parametrize("name", ["steps", "accumulation_steps", "report_every", "Callback.every"])
def test_numbers_of_steps_are_whole(name: str) -> None:
    callback = Callback()
    options: dict[str, Any] = {"steps": 1, "callbacks": [callback]}
    if name == "Callback.every":
        callback.every = 0
    else:
        options[name] = 1.5
    with pytest.raises(InputError, match=f"^{name}: must be a whole number of at least 1"):
        train(small(), [], optimizer=adamw(small().parameters(), 1e-3), **options)


def test_gradients_are_not_touched_without_clipping() -> None:
    """An infinite norm times 1 / norm is NaN, and a product with 1 reads and writes all gradients."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    for parameter, gradient in zip(parameters, ([math.inf, 1.0], [2.0, 3.0]), strict=True):
        parameter.grad = torch.tensor(gradient)
    versions = [parameter.grad._version for parameter in parameters]  # type: ignore[union-attr]
    assert clip_gradients(parameters, math.inf) == math.inf
    assert [parameter.grad._version for parameter in parameters] == versions  # type: ignore[union-attr]
    assert clip_gradients(parameters[1:], 1.0) == pytest.approx(math.sqrt(13)) and clip_gradients([], 1.0) == 0
    assert torch.linalg.vector_norm(parameters[1].grad) == pytest.approx(1.0)  # type: ignore[arg-type]


def test_a_loss_in_float16_with_a_larger_norm() -> None:
    """Norms are read in float32 at least: 160,000 is infinite in float16, which was an error."""

    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def num_targets(self, labels: torch.Tensor, **_: Any) -> torch.Tensor:
            return torch.tensor([labels.numel()])

        def forward(self, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> Any:
            return SimpleNamespace(loss=((self.weight - 1.0) * 8e4).sum().half())

    model, seen = Half(), list[StepMetrics]()
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.0), Batch({"labels": torch.ones(1, 2).long()})
    train(model, [batch], steps=1, optimizer=optimizer, on_step=seen.append)
    assert seen[0].grad_norm == pytest.approx(1.6e5)


def test_batches_of_embeddings_and_without_labels() -> None:
    model, ids = small(), torch.randint(3, 60, (2, 6))
    embeds = Batch({"inputs_embeds": model.decoder.embed(ids).detach(), "labels": ids})
    seen: list[Any] = []
    train(model, [embeds], steps=1, optimizer=adamw(model.parameters(), 1e-3), on_step=seen.append)
    assert seen[0].each[0].tokens == ids.numel()
    with pytest.raises(InputError, match="labels: a batch has none, only input_ids"):
        train(model, [Batch({"input_ids": ids})], steps=1, optimizer=adamw(model.parameters(), 1e-3))


def test_batches_that_end_early_are_an_error() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(InputError, match="ended at step 2 of 3"):
        train(model, islice(batches(corpus(), 1), 5), steps=3, optimizer=optimizer, accumulation_steps=3)


# -- scores ------------------------------------------------------------------------------------------------------------


def test_scores_of_heads_are_those_of_their_logits() -> None:
    medusa = model_of("medusa")
    with torch.no_grad():
        for parameter in medusa.head_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    documents = corpus()
    scores = evaluate_heads(medusa, batches(documents, 3, epochs=1))
    logits = [[] for _ in range(3)]
    wanted = [[] for _ in range(3)]
    for piece in (piece for batch in batches(documents, 3, epochs=1) for piece in pieces(batch)):
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
    with pytest.raises(InputError, match="got 11"):
        scores.accuracy(11)
    for measure, model in ((evaluate, medusa.base), (evaluate_heads, medusa)):
        with pytest.raises(InputError, match="give at least one batch"):
            measure(model, [])


@pytest.mark.parametrize("kind", ["lm", "medusa"])
@pytest.mark.parametrize("form", ["rows", "packed", "positions"])
def test_sequences_longer_than_the_context_warn_once(kind: str, form: str) -> None:
    """Of packed rows the sequences in them count, however long the row is."""
    model = small(max_position_embeddings=12)
    if kind == "medusa":
        model = lm.MedusaModel.from_base(model, num_heads=2)

    def batch(length: int) -> Batch:
        ids = torch.arange(3, 3 + 26).view(2, 13)[:, :length] if form == "rows" else torch.arange(3, 29)[None]
        found = {"input_ids": ids, "labels": ids}
        if form == "packed":
            found["cu_seqlens"] = torch.tensor([0, length, 16, 26], dtype=torch.int32)
        if form == "positions":
            found["position_ids"] = torch.cat([torch.arange(n) for n in (length, 16 - length, 10)])[None]
        return Batch(found)

    def warned(*lengths: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
            train(model, map(batch, lengths), steps=len(lengths), optimizer=optimizer)
        return [str(each.message) for each in caught if each.category is SequenceLengthWarning]

    assert warned(12, 9) == []
    (message,) = warned(12, 13, 13)
    assert message.startswith("step 2: a sequence of 13 tokens is longer than the model's max_position_embeddings, 12;")


def test_a_context_that_rotary_scaling_extends() -> None:
    """As model cards set YaRN: with `max_position_embeddings` as it was."""
    ids = torch.arange(3, 23)[None]
    for factor, expected in ((2.0, 0), (1.5, 1)):
        rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 10, "rope_theta": 1e4}
        model = small(max_position_embeddings=10, rope_parameters=rope)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model, [Batch({"input_ids": ids, "labels": ids})], steps=1, optimizer=adamw(model.parameters(), 1e-4))
        assert [each.category for each in caught].count(SequenceLengthWarning) == expected
        assert all(each.filename == __file__ for each in caught if each.category is SequenceLengthWarning)
