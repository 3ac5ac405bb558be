"""Whole runs on a tiny model: killed anywhere they come out the same to the bit, and what goes wrong is named."""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_templates import TEXT, save_template, tokenizer_of
from safetensors.torch import load_file
from torch import nn
from zoo import LLAMA as BASE
from zoo import make_checkpoint

import ligermodels as lm
from ligermodels.errors import CheckpointError, ConfigError, InputError, TrainingError
from ligermodels.training import Recipe, adamw, metrics, read_recipe
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.optimizer import optimizer_named, parameter_groups
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
    return Recipe(**{**settings, **changes})


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


# -- stops and starts --------------------------------------------------------------------------------------------------


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


def write_recipe(recipe: Recipe, path: Path) -> Path:
    import yaml

    path.write_text(yaml.safe_dump(recipe.settings()))
    return path


def test_killed_anywhere_a_run_comes_out_the_same(base: Path, data: Path, tmp_path: Path, children: Any) -> None:
    recipe = recipe_for(base, data, steps=40, checkpoint_every=2, report_every=7, optimizer="adamw")
    file = write_recipe(recipe, tmp_path / "recipe.yaml")

    def start(out: str) -> Any:
        child = children.Process(target=command, args=("--recipe", str(file), "--out", str(tmp_path / out), "--resume"))
        child.start()
        return child

    child = start("whole")
    child.join(60)
    assert child.exitcode == 0

    # Killed before it begins, then a few steps further each time, at any point of a step or of writing, and at the end.
    draw, out, reached = random.Random(1), tmp_path / "killed", set[int]()
    checkpoints = out / "checkpoints"
    for target in (None, 3, 9, 18, 30, 40):
        child = start("killed")
        if target is None:
            child.join(draw.uniform(0, 0.2))
        else:
            while child.is_alive() and not [step for step, *_ in losses(out) if step >= target]:
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.05))
        child.kill()
        child.join()
        reached |= set(Checkpoints(checkpoints).steps())
    assert len(reached) >= 4, reached
    child = start("killed")
    child.join(60)
    assert child.exitcode == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert scores(tmp_path / "killed") == scores(tmp_path / "whole")
    assert equal_heads(tmp_path / "killed", tmp_path / "whole")
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-38", "step-40"]
    assert not [path for path in (tmp_path / "killed").iterdir() if path.name.endswith(".partial")]


def test_sigterm_saves_and_ends(base: Path, data: Path, tmp_path: Path, children: Any) -> None:
    recipe = recipe_for(base, data, steps=60, checkpoint_every=None, evaluate_every=None, report_every=1)
    file, out = write_recipe(recipe, tmp_path / "recipe.yaml"), tmp_path / "out"
    arguments = ("--recipe", str(file), "--out", str(out))
    child = children.Process(target=command, args=arguments)
    child.start()
    deadline = time.monotonic() + 60
    while not losses(out) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGTERM)
    child.join(60)
    assert child.exitcode == 143
    (step,) = Checkpoints(out / "checkpoints").steps()
    assert 0 < step < 60 and losses(out)[-1][0] == step and not (out / "model.safetensors").exists()
    before = losses(out)
    outcome = train_heads(recipe, out, resume=True)
    assert outcome.finished and losses(out)[:step] == before and len(losses(out)) == 60
    train_heads(recipe, tmp_path / "whole")
    assert losses(tmp_path / "whole") == losses(out) and equal_heads(out, tmp_path / "whole")
    # Once more, and there is nothing left to do.
    again = train_heads(recipe, out, resume=True)
    assert again.finished and again.scores is not None and outcome.scores is not None
    assert torch.equal(again.scores.hits, outcome.scores.hits) and len(losses(out)) == 60


def test_a_run_goes_on_only_with_what_it_began_with(base: Path, data: Path, tmp_path: Path) -> None:
    recipe, out = recipe_for(base, data, steps=4, checkpoint_every=2, evaluate_every=None), tmp_path / "out"
    train_heads(recipe, out)
    for change in ({"learning_rate": 1e-3}, {"heads": 4}, {"seed": 4}, {"steps": 5}):
        (name,) = change
        with pytest.raises(ConfigError, match=f"cannot go on with another recipe: {name} was"):
            train_heads(recipe.changed(change), out, resume=True)
    free = recipe.changed({"evaluate_every": 1, "keep_checkpoints": 1, "date": None})
    assert train_heads(free, out, resume=True).finished
    # A checkpoint from before there was a choice of rounding was rounded to the nearest.
    about = out / "checkpoints" / "step-4" / "run.json"
    before, written = about.read_text(), json.loads(about.read_text())
    del written["recipe"]["rounding"]
    about.write_text(json.dumps(written))
    with pytest.raises(ConfigError, match="rounding was 'nearest', is 'stochastic'"):
        train_heads(recipe, out, resume=True)
    assert train_heads(recipe.changed({"rounding": "nearest"}), out, resume=True).finished
    about.write_text(before)
    other = data.with_name("other.jsonl")
    other.write_text(data.read_text() + "\n")
    data.rename(data.with_name("kept"))
    other.rename(data)
    try:
        with pytest.raises(InputError, match="not what the run began with: corpus"):
            train_heads(recipe, out, resume=True)
    finally:
        data.with_name("kept").rename(data)
    # Without --resume it begins anew, and leaves nothing of the old one.
    train_heads(recipe.changed({"steps": 1, "checkpoint_every": None}), out)
    assert len(losses(out)) == 1 and not (out / "checkpoints").exists()


def test_what_is_not_finite_ends_the_run_and_is_named(base: Path, data: Path, tmp_path: Path) -> None:
    recipe = recipe_for(base, data, learning_rate=1e38, steps=12, report_every=2, checkpoint_every=1, warmup=0)
    with pytest.raises(
        TrainingError, match=r"step \d+: the loss is .* At fault: batch \d of 2, made of .*data.jsonl:\d+"
    ):
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


def test_heads_to_start_from(base: Path, data: Path, tmp_path: Path) -> None:
    recipe = recipe_for(base, data, steps=3, lm_head="shared", evaluate_every=None)
    first: Outcome = train_heads(recipe, tmp_path / "first")
    more = recipe.changed({"start_from": str(tmp_path / "first"), "learning_rate": 0.0})
    second = train_heads(more, tmp_path / "second")
    assert equal_heads(tmp_path / "first", tmp_path / "second")
    assert first.scores is not None and second.scores is not None and torch.equal(first.scores.hits, second.scores.hits)
    with pytest.raises(ConfigError, match=r"start_from: .*\(3, 1, 'shared'\)"):
        train_heads(more.changed({"layers": 2}), tmp_path / "third")


# -- checkpoints -------------------------------------------------------------------------------------------------------


def small(seed: int, width: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2).double())
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_a_checkpoint_brings_all_of_the_state_back(kind: str, tmp_path: Path) -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        groups = parameter_groups([(model.parameters(), 1e-2)], 0.1)
        return optimizer_named(kind, groups, betas=(0.8, 0.99))

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        for _ in range(3):
            loss = model[1](model[0](torch.randn(4, 3)).double()).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    model, checkpoints = small(0), Checkpoints(tmp_path / "there", keep=2)
    optimizer = optimizer_of(model)
    assert checkpoints.steps() == []
    for step in (3, 6, 10):
        steps(model, optimizer)
        checkpoints.save(step, model, optimizer, {"data": {"place": step}})
        if step == 6:
            after_six = steps(model, optimizer)  # While it is written.
    checkpoints.wait()
    assert checkpoints.steps() == [6, 10]
    other = small(1)
    other[0].load_state_dict(model[0].state_dict())
    for at in (optimizer_of(other), optimizer_of(other)):
        checkpoints.load(6, other, at)
        assert steps(other, at) == after_six
    assert checkpoints.about(6)["data"] == {"place": 6}
    with pytest.raises(CheckpointError, match=r"step-6: is of another model"):
        checkpoints.load(6, small(0, width=4), optimizer)
    if kind == "adamw":
        with pytest.raises(CheckpointError, match="of another optimiser"):
            checkpoints.load(6, other, adamw([other[1].weight], 1e-2))


def test_checkpoints_of_torchs_adamw_and_of_ours_fit_either(tmp_path: Path) -> None:
    def made(ours: bool, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small(seed).float()
        groups = parameter_groups([(model.parameters(), 1e-2)], 0.1)
        betas = (0.8, 0.99)
        return model, optimizer_named("adamw", groups, betas=betas) if ours else torch.optim.AdamW(groups, betas=betas)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for i in range(3):
            for p in model[1].parameters():
                p.grad = torch.cos(p.detach() * 10 + i)
            optimizer.step()

    for ours in (True, False):
        checkpoints = Checkpoints(tmp_path / str(ours))
        model, optimizer = made(ours, 0)
        steps(model, optimizer)
        checkpoints.save(3, model, optimizer, {})
        checkpoints.wait()
        steps(model, optimizer)
        other, another = made(not ours, 1)
        checkpoints.load(3, other, another)
        steps(other, another)
        for a, b in zip(model[1].parameters(), other[1].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    model = small(0)
    optimizer, checkpoints = adamw(model.parameters(), 1e-2), Checkpoints(tmp_path)
    (tmp_path / ".abc.partial").mkdir()
    checkpoints.save(1, model, optimizer, {})
    checkpoints.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    (tmp_path / "step-1" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-1: cannot be read.*remove it"):
        checkpoints.load(1, model, optimizer)
    (tmp_path / "step-1" / "run.json").write_text('{"format": 9}')
    with pytest.raises(CheckpointError, match="format 9"):
        checkpoints.about(1)
    (tmp_path / "step-1" / "run.json").unlink()
    with pytest.raises(CheckpointError, match=r"run\.json: cannot be read"):
        checkpoints.about(1)
    (tmp_path / "taken").write_text("")
    blocked = Checkpoints(tmp_path / "taken" / "below")
    blocked.save(1, model, optimizer, {})
    with pytest.raises(CheckpointError, match="cannot be written"):
        blocked.wait()


def test_metrics_begin_after_a_step_and_reach_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board: list[tuple[Any, ...]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            board.append((Path(folder).name, purge_step))

        def add_scalar(self, *scalar: object) -> None:
            board.append(scalar)

        def close(self) -> None:
            board.append(())

    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    first = metrics.Metrics(tmp_path)
    for step in (1, 2, 3):
        first.write(step, {"loss": step / 3})
    first.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + 'no json\n{"step": 2, "loss"')
    monkeypatch.setattr(metrics, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    second = metrics.Metrics(tmp_path, after=2)
    second.write(3, {"loss": 9.0, "accuracy": [0.5, 0.25]})
    second.close()
    assert losses_of(path) == [(1, 1 / 3), (2, 2 / 3), (3, 9.0)]
    assert board == [("tensorboard", 3), ("loss", 9.0, 3), ("accuracy/0", 0.5, 3), ("accuracy/1", 0.25, 3), ()]
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    metrics.Metrics(tmp_path).close()
    assert path.read_text() == ""


def losses_of(path: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in map(json.loads, path.read_text().splitlines())]
