"""Whole runs on a tiny model: from chats to heads, and what goes wrong is named."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import STAGE_2, equal_heads, losses, recipe_for, scores
from safetensors.torch import load_file

import ligermodels as lm
from ligermodels.data.batches import Batch
from ligermodels.data.documents import Documents
from ligermodels.data.packing import Prefetcher
from ligermodels.errors import CheckpointError, ConfigError, InputError, TrainingError
from ligermodels.evaluation import evaluate
from ligermodels.speculative.joint import frozen_copy
from ligermodels.training import Console, MedusaRecipe, Outcome, medusa, read_recipe, run_job, train_heads
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.inputs import packed
from ligermodels.training.loop import OutputMetrics
from ligermodels.training.recipe_file import shipped_recipes

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_run_from_chats_to_heads(base: Path, data: Path, tmp_path: Path) -> None:
    said: list[str] = []
    recipe, out = recipe_for(base, data, steps=None, epochs=2.0, date=None), tmp_path / "out"
    outcome = train_heads(recipe, out, console=Console(said.append))
    assert outcome.finished and outcome.steps > 9 and outcome.evaluation is not None
    assert any("data.jsonl:31: not an object" in message for message in said)
    assert sum("more than seq_len (16) tokens: split" in message for message in said) > 0
    found = losses(out)
    assert [step for step, *_ in found] == list(range(1, outcome.steps + 1))
    assert sum(loss for _, loss, _ in found[-5:]) < 0.9 * sum(loss for _, loss, _ in found[:5])
    assert [step for step, *_ in scores(out)] == [*range(5, outcome.steps, 5), outcome.steps]
    assert scores(out)[-1][1] == outcome.evaluation.scores.accuracy(1).tolist()
    heads = lm.MedusaModel.from_pretrained(lm.from_pretrained(base), out)
    assert heads.shape.num_heads == 3 and all(p.any() for p in heads.head_parameters())
    assert len(Checkpoints(out / "checkpoints").steps()) == 2

    # The recipe that is written beside them does it again.
    written = read_recipe(out / "recipe.yaml")
    assert written.date is not None
    train_heads(written, tmp_path / "again")
    assert losses(tmp_path / "again") == found and equal_heads(out, tmp_path / "again")
    # Another seed does not: its first batch is another.
    train_heads(written.changed({"seed": 4, "epochs": 0.5}), tmp_path / "other")
    assert losses(tmp_path / "other")[0] != found[0]


def test_accumulation_and_packing_leave_the_step_the_same(base: Path, data: Path, tmp_path: Path) -> None:
    found = []
    for micro in (16, 32, 64):
        recipe = recipe_for(base, data, steps=4, micro_batch_tokens=micro, dtype="float64", evaluate_every=None)
        train_heads(recipe, tmp_path / str(micro))
        found.append([number for line in losses(tmp_path / str(micro)) for number in line])
    assert found[0] == pytest.approx(found[2], rel=1e-9) and found[1] == pytest.approx(found[2], rel=1e-9)


def test_heads_in_bfloat16_learn_as_those_in_float32(base: Path, data: Path, tmp_path: Path) -> None:
    """At a learning rate whose steps bfloat16 does not hold: rounded to the nearest, they are lost."""
    model = lm.from_pretrained(base)
    moved = {}
    for dtype, rounding in (("float32", "nearest"), ("bfloat16", "stochastic"), ("bfloat16", "nearest")):
        recipe = recipe_for(base, data, steps=20, learning_rate=1e-5, warmup_steps=0, checkpoint_every=None)
        recipe = recipe.changed({"validation_fraction": 0, "dtype": dtype, "rounding": rounding})
        train_heads(recipe, tmp_path / "out", overwrite=True)
        weight = load_file(tmp_path / "out" / "model.safetensors")["lm_heads.0.weight"]
        moved[dtype, rounding] = (weight.double() - model.head.weight.detach().to(weight.dtype)).flatten()
    wanted, stochastic, nearest = moved.values()
    along = [float(each @ wanted / (wanted @ wanted)) for each in (stochastic, nearest)]
    assert abs(along[0] - 1) < 0.1 and along[1] < 0.5, along


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_runs_on_a_small_sample(base: Path, data: Path, tmp_path: Path, name: str) -> None:
    """As it stands, but for sizes: that there are fewer steps than its warm-up is no hindrance."""
    said: list[str] = []
    sizes = {"seq_len": 128, "batch_tokens": 256, "micro_batch_tokens": 128, "epochs": 0.01}
    recipe = read_recipe(name).changed({"base": str(base), "data": str(data), **sizes})
    outcome = train_heads(recipe, tmp_path / "out", console=Console(said.append))
    assert outcome.finished and outcome.steps == 1 and outcome.evaluation is not None
    assert "warmup_steps: 40 is more than there are steps; all 1 are warm-up" in said
    lm.MedusaModel.from_pretrained(lm.from_pretrained(base, dtype=torch.bfloat16), tmp_path / "out")


def test_the_untouched_model_is_kept_only_when_it_is_asked_for(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[str] = []
    monkeypatch.setattr(medusa, "frozen_copy", lambda model, place: copies.append(place) or frozen_copy(model, place))
    recipe, outcomes = recipe_for(base, data, **{**STAGE_2, "distill": False}, steps=3), []
    kl = {"kl_to_reference": True}
    for change in ({}, kl, {**kl, "reference": "cpu_offload"}, {"distill": True}):
        outcomes.append(train_heads(recipe.changed(change), tmp_path / "out", overwrite=True))
    assert copies == ["device", "cpu_offload", "device"]
    assert [outcome.evaluation.kl is None for outcome in outcomes] == [True, False, False, False]
    kls = [outcome.evaluation.kl for outcome in outcomes]
    assert kls[1] == kls[2] != kls[3]


def test_activation_checkpointing_leaves_stage_2_the_same(base: Path, data: Path, tmp_path: Path) -> None:
    recipe = recipe_for(base, data, **STAGE_2, steps=3, evaluate_every=None)
    for mode in ("none", "selective", "full"):
        train_heads(recipe.changed({"activation_checkpointing": mode}), tmp_path / mode)
        assert losses(tmp_path / mode) == losses(tmp_path / "none") and equal_heads(tmp_path / mode, tmp_path / "none")


def test_what_is_not_finite_ends_the_run_and_is_named(base: Path, data: Path, tmp_path: Path) -> None:
    recipe = recipe_for(base, data, learning_rate=1e37, steps=12, report_every=2, checkpoint_every=1, warmup_steps=0)
    documents = Documents.of_checkpoint(base, [data], max_bad_lines=1, on_bad_line=lambda message: None)
    train, _ = documents.corpus.split(recipe.validation_fraction, recipe.seed)
    batch = list(islice(packed(recipe, documents, train, batch_size=2, seed=recipe.seed), 3))[-1]
    # The first step throws the weights out, and the first batch of the second meets them.
    lines = re.escape(batch.where())
    with pytest.raises(TrainingError, match=rf"step 2: the loss is .* At fault: batch 1 of 2, made of {lines}\. Try"):
        train_heads(recipe.changed({"max_grad_norm": None, "dtype": "float32"}), tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()
    # No checkpoint holds what is not finite.
    last = Checkpoints(tmp_path / "out" / "checkpoints").steps()[-1]
    assert all(step == i for i, (step, *_) in enumerate(losses(tmp_path / "out"), start=1))
    assert len(losses(tmp_path / "out")) == last


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"base": None}, ConfigError, "base: the recipe has none"),
        ({"data": ()}, ConfigError, "data: the recipe has none"),
        ({"date": "today"}, ConfigError, "date: must be YYYY-MM-DD, got 'today'"),
        ({"max_bad_lines": 0}, InputError, r"data\.jsonl:31: not an object"),
        ({"chat_template": "nowhere.jinja"}, CheckpointError, "nowhere.jinja"),
        ({"data": ("nowhere.txt",)}, InputError, "nowhere.txt: "),
    ],
)
def test_bad_settings_leave_nothing_behind(
    base: Path, data: Path, tmp_path: Path, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        train_heads(recipe_for(base, data, steps=None).changed(change), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_half_precision_without_loss_scaling_is_refused(base: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "half")
    config = json.loads((base / "config.json").read_text())
    (tmp_path / "half" / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    recipe = recipe_for(tmp_path / "half", data, steps=1)
    with pytest.raises(ConfigError, match=r"dtype: the checkpoint's is float16.*bfloat16 or float32"):
        train_heads(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert train_heads(recipe.changed({"dtype": "bfloat16"}), tmp_path / "out").finished


@dataclass(frozen=True)
class Loss:
    loss: float

    def metrics(self) -> dict[str, float]:
        return {"loss": self.loss}


class FineTuning:
    """Another job than Medusa, by the interface alone."""

    router_bias_update_rate, validation_batch_size = 0.0, None

    def __init__(self, recipe: MedusaRecipe, model: lm.CausalLM, *, resuming: bool) -> None:
        self.model = self.trainable = model
        self.learning_rates = [(model.parameters(), recipe.learning_rate)]

    def loss_options(self, step: int, steps: int) -> dict[str, Any]:
        return {"z_loss": 1e-4 * step / steps}

    def output_metrics(self, out: Any) -> OutputMetrics:
        return OutputMetrics({"twice": 2 * out.loss}, {"half": (torch.tensor(1.0), torch.tensor(2.0))})

    def evaluate(self, batches: Callable[[], Iterable[Batch]]) -> Loss:
        return Loss(evaluate(self.model, batches()))

    def export(self, folder: Path) -> None:
        self.model.save_pretrained(folder, overwrite=True)

    def batches(self, prefetcher: Prefetcher) -> Prefetcher:
        return prefetcher


def test_another_job_runs_and_resumes(base: Path, data: Path, tmp_path: Path) -> None:
    recipe, said = recipe_for(base, data, learning_rate=1e-3), list[str]()

    @contextmanager
    def progress(what: str, **_: Any) -> Iterator[Any]:
        yield lambda done, total, note="": said.append(note)

    whole = run_job(FineTuning, recipe, tmp_path / "whole", console=Console(progress=progress))
    assert whole.finished and any(", twice " in note and ", half 50%, " in note for note in said)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["twice"] == pytest.approx(2 * line["loss"]) for line in lines if "loss" in line)
    assert [line["validation_loss"] for line in lines if "validation_loss" in line][-1] == whole.evaluation.loss
    trained, before = lm.from_pretrained(tmp_path / "whole"), lm.from_pretrained(base)
    assert all(not torch.equal(p, q) for p, q in zip(trained.parameters(), before.parameters(), strict=True))
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-12")
    assert run_job(FineTuning, recipe, tmp_path / "again", resume=True).finished
    assert losses(tmp_path / "again") == losses(tmp_path / "whole") and equal_heads(
        tmp_path / "again", tmp_path / "whole"
    )


def test_heads_to_start_from(base: Path, data: Path, tmp_path: Path) -> None:
    recipe = recipe_for(base, data, steps=3, lm_head="shared", evaluate_every=None)
    first: Outcome = train_heads(recipe, tmp_path / "first")
    more = recipe.changed({"start_from": str(tmp_path / "first"), "learning_rate": 0.0})
    second = train_heads(more, tmp_path / "second")
    assert equal_heads(tmp_path / "first", tmp_path / "second")
    assert torch.equal(first.evaluation.scores.hits, second.evaluation.scores.hits)
    with pytest.raises(ConfigError, match=r"num_layers: is 2, but 1 in the heads to start from, .*; set it to 1"):
        train_heads(more.changed({"num_layers": 2}), tmp_path / "third")
