"""Whole runs on a tiny model: from chats to heads, and what goes wrong is named."""

import json
import multiprocessing
import os
import random
import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import TEXT, save_template, tokenizer_of
from safetensors.torch import load_file
from zoo import LLAMA as BASE
from zoo import make_checkpoint

import ligermodels as lm
from ligermodels.errors import CheckpointError, ConfigError, InputError, TrainingError
from ligermodels.training import Recipe, Stream, documents_of, read_recipe, run
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.joint import frozen_copy
from ligermodels.training.recipe import shipped_recipes
from ligermodels.training.run import Console, Outcome, train_heads


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Of torch's: for matrices this small more are slower, much so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with Qwen2.5's manner of tokens and chats."""
    folder = tmp_path_factory.mktemp("runs") / "model"
    tokenizer = tokenizer_of("qwen2.5", folder)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    make_checkpoint(folder, {**BASE, **small, "vocab_size": tokenizer.backend.get_vocab_size()})
    save_template("qwen2.5", folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats and texts of few words, and a line that is none."""
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    draw, words = random.Random(0), TEXT.split(" ")

    def say() -> str:
        return " ".join(draw.choices(words[3:], k=draw.randint(1, 12)))

    lines: list[dict[str, Any]] = []
    for i in range(60):
        chat = [{"from": who, "value": say()} for who in ("human", "gpt") * draw.randint(1, 3)]
        lines.append({"conversations": chat} if i % 3 else {"text": say()})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:30]) + "{}\n" + json.dumps(lines[30]))
    return path


def recipe_for(base: Path, data: Path, **changes: Any) -> Recipe:
    settings = {
        "base": str(base),
        "data": (str(data),),
        "max_bad_lines": 1,
        "held_out": 0.2,
        "heads": 3,
        "learning_rate": 5e-3,
        "weight_decay": 0.01,
        "steps": 12,
        "length": 16,
        "batch_tokens": 64,
        "micro_batch_tokens": 32,
        "evaluate_every": 5,
        "checkpoint_every": 3,
        "seed": 3,
        "date": "2024-07-26",
    }
    return Recipe().changed(settings).changed(changes)


STAGE_2 = {"stage": 2, "learning_rate": 1e-3, "distill": True}


def losses(out: Path) -> list[tuple[int, float, float]]:
    path = out / "metrics.jsonl"
    text = path.read_text() if path.is_file() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def scores(out: Path) -> list[tuple[int, list[float]]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["top-1"], line["top-5"]) for line in lines if "top-1" in line]


def equal_heads(one: Path, other: Path) -> bool:
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_from_chats_to_heads(base: Path, data: Path, tmp_path: Path) -> None:
    said: list[str] = []
    recipe, out = recipe_for(base, data, steps=None, epochs=1.2, date=None), tmp_path / "out"
    outcome = train_heads(recipe, out, console=Console(said.append))
    assert outcome.finished and outcome.steps > 12 and outcome.scores is not None
    assert f"{outcome.steps} steps of 64 tokens" in said[1] and "data.jsonl:31: not an object" in said[0]
    assert len(said) == 2
    found = losses(out)
    assert [step for step, *_ in found] == list(range(1, outcome.steps + 1))
    assert sum(loss for _, loss, _ in found[-5:]) < 0.9 * sum(loss for _, loss, _ in found[:5])
    assert [step for step, *_ in scores(out)] == [*range(5, outcome.steps, 5), outcome.steps]
    assert scores(out)[-1][1] == outcome.scores.accuracy(1).tolist()
    heads = lm.MedusaModel.from_pretrained(lm.from_pretrained(base), out)
    assert heads.shape.num_heads == 3 and all(p.any() for p in heads.head_parameters())
    assert len(Checkpoints(out / "checkpoints").steps()) == 2

    # The recipe that is written beside them does it again.
    written = read_recipe(out / "recipe.yaml")
    assert written.date is not None
    train_heads(written, tmp_path / "again")
    assert losses(tmp_path / "again") == found and equal_heads(out, tmp_path / "again")
    # Another seed does not, and Adafactor is another optimiser.
    for change in ({"seed": 4}, {"optimizer": "adafactor"}):
        train_heads(written.changed(change), tmp_path / "other")
        assert losses(tmp_path / "other") != found


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
        recipe = recipe_for(base, data, steps=60, learning_rate=1e-5, warmup=0, evaluate_every=None, held_out=0)
        recipe = recipe.changed({"dtype": dtype, "rounding": rounding, "checkpoint_every": None})
        train_heads(recipe, tmp_path / "out")
        weight = load_file(tmp_path / "out" / "model.safetensors")["lm_heads.0.weight"]
        moved[dtype, rounding] = (weight.double() - model.head.weight.detach().to(weight.dtype)).flatten()
    wanted, stochastic, nearest = moved.values()
    along = [float(each @ wanted / (wanted @ wanted)) for each in (stochastic, nearest)]
    assert abs(along[0] - 1) < 0.1 and along[1] < 0.5, along


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_runs_on_a_small_sample(base: Path, data: Path, tmp_path: Path, name: str) -> None:
    """As it stands, but for sizes: that there are fewer steps than its warm-up is no hindrance."""
    said: list[str] = []
    sizes = {"length": 64, "batch_tokens": 256, "micro_batch_tokens": 128, "epochs": 0.01}
    recipe = read_recipe(name).changed({"base": str(base), "data": str(data), **sizes})
    outcome = train_heads(recipe, tmp_path / "out", console=Console(said.append))
    assert outcome.finished and outcome.steps == 1 and outcome.scores is not None
    assert "warmup: 40 is more than there are steps; all 1 are a warm-up" in said
    lm.MedusaModel.from_pretrained(lm.from_pretrained(base, dtype=torch.bfloat16), tmp_path / "out")


def test_the_untouched_model_is_kept_only_when_it_is_asked_for(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[str] = []
    monkeypatch.setattr(run, "frozen_copy", lambda model, place: copies.append(place) or frozen_copy(model, place))
    recipe, outcomes = recipe_for(base, data, **{**STAGE_2, "distill": False}, steps=3), []
    for change in ({}, {"drift": True}, {"drift": True, "reference": "host"}, {"distill": True}):
        outcomes.append(train_heads(recipe.changed(change), tmp_path / "out"))
    assert copies == ["device", "host", "device"]
    assert [outcome.drift is None for outcome in outcomes] == [True, False, False, False]
    assert outcomes[1].drift == outcomes[2].drift != outcomes[3].drift


def command(*arguments: str, name: str = "train") -> None:
    """What a child process does: the command line, from end to end."""
    from ligermodels.cli import app

    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    app(["medusa", name, *arguments])


@pytest.fixture(scope="module")
def children() -> Any:
    """Processes that have imported everything before they begin."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ligermodels.training.run", "ligermodels.cli", "test_runs"])
    first = context.Process(target=int)  # With it the server starts.
    first.start()
    first.join()
    return context


def test_what_is_not_finite_ends_the_run_and_is_named(base: Path, data: Path, tmp_path: Path) -> None:
    recipe = recipe_for(base, data, learning_rate=1e38, steps=12, report_every=2, checkpoint_every=1, warmup=0)
    documents = documents_of(base, [data], max_bad_lines=1, on_bad_line=lambda message: None)
    train, _ = documents.corpus.split(recipe.held_out, recipe.seed)
    batch = list(islice(Stream(documents, train, length=16, rows=2, seed=recipe.seed), 3))[-1]
    # The first step throws the weights out, and the first batch of the second meets them.
    lines = re.escape(batch.where())
    with pytest.raises(TrainingError, match=rf"step 2: the loss is .* At fault: batch 1 of 2, made of {lines}\. Try"):
        train_heads(recipe.changed({"grad_clip": None, "dtype": "float32"}), tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()
    # No checkpoint holds what is not finite.
    last = Checkpoints(tmp_path / "out" / "checkpoints").steps()[-1]
    assert all(step == i for i, (step, *_) in enumerate(losses(tmp_path / "out"), start=1))
    assert len(losses(tmp_path / "out")) == last


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"base": None}, ConfigError, "base: the recipe names none"),
        ({"data": ()}, ConfigError, "data: the recipe names none"),
        ({"date": "today"}, ConfigError, "date: must be YYYY-MM-DD, got 'today'"),
        ({"max_bad_lines": 0}, InputError, r"data\.jsonl:31: not an object"),
        ({"chat_template": "nowhere.jinja"}, CheckpointError, "nowhere.jinja"),
        ({"data": ("nowhere.txt",)}, InputError, "nowhere.txt: cannot be read"),
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


def test_heads_to_start_from(base: Path, data: Path, tmp_path: Path) -> None:
    recipe = recipe_for(base, data, steps=3, lm_head="shared", evaluate_every=None)
    first: Outcome = train_heads(recipe, tmp_path / "first")
    more = recipe.changed({"start_from": str(tmp_path / "first"), "learning_rate": 0.0})
    second = train_heads(more, tmp_path / "second")
    assert equal_heads(tmp_path / "first", tmp_path / "second")
    assert first.scores is not None and second.scores is not None and torch.equal(first.scores.hits, second.scores.hits)
    with pytest.raises(ConfigError, match=r"start_from: .*\(3, 1, 'shared'\)"):
        train_heads(more.changed({"layers": 2}), tmp_path / "third")
