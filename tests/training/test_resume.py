"""Runs that are killed, stopped, or fail anywhere: they go on, come out the same to the bit, and with nothing else."""

import json
import os
import random
import re
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import STAGE_2, command, equal_heads, losses, recipe_for, scores
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

import ligermodels as lm
from ligermodels.cli import app
from ligermodels.data import fingerprint
from ligermodels.errors import CheckpointError, CheckpointWarning, ConfigError, InputError, TrainingError
from ligermodels.speculative import evaluation
from ligermodels.training import (
    Callback,
    Console,
    FineTuningRecipe,
    MedusaRecipe,
    heads,
    loop,
    read_recipe,
    train_heads,
)
from ligermodels.training import step as taken
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.inputs import same_recipe
from ligermodels.training.renamed import SETTINGS
from ligermodels.training.run_plan import RunPlan
from ligermodels.training.schedule import schedule_factor

pytestmark = pytest.mark.usefixtures("one_thread")


def write_recipe(recipe: MedusaRecipe, path: Path) -> Path:
    import yaml

    path.write_text(yaml.safe_dump(recipe.settings()))
    return path


@pytest.mark.parametrize(
    ("changes", "targets"),
    [({"steps": 12}, (None, 5, 12)), ({**STAGE_2, "steps": 8}, (3, 8))],
    ids=["stage 1", "stage 2"],
)
def test_killed_anywhere_a_run_comes_out_the_same(
    base: Path, data: Path, tmp_path: Path, children: Any, changes: dict[str, Any], targets: tuple[int | None, ...]
) -> None:
    recipe = recipe_for(base, data, **changes, checkpoint_every=2, report_every=7)
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
    for target in targets:
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
    assert len(reached) >= 2, reached
    child = start("killed")
    child.join(60)
    assert child.exitcode == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert scores(tmp_path / "killed") == scores(tmp_path / "whole")
    assert equal_heads(tmp_path / "killed", tmp_path / "whole")
    assert Checkpoints(checkpoints).steps() == [recipe.steps - 2, recipe.steps]
    assert not [path for path in (tmp_path / "killed").iterdir() if path.name.endswith(".partial")]


def test_sigterm_saves_and_ends(base: Path, data: Path, tmp_path: Path, children: Any) -> None:
    recipe = recipe_for(base, data, steps=30, checkpoint_every=100, evaluate_every=None, report_every=1)
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
    assert 0 < step < 30 and losses(out)[-1][0] == step and not (out / "model.safetensors").exists()
    before = losses(out)
    outcome = train_heads(recipe, out, resume=True)
    assert outcome.finished and losses(out)[:step] == before and len(losses(out)) == 30
    train_heads(recipe, tmp_path / "whole")
    assert losses(tmp_path / "whole") == losses(out) and equal_heads(out, tmp_path / "whole")
    # Once more, and there is nothing left to do.
    again = train_heads(recipe, out, resume=True)
    assert again.finished
    assert torch.equal(again.evaluation.scores.hits, outcome.evaluation.scores.hits) and len(losses(out)) == 30


def test_ctrl_c_saves_and_ends(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one after the step, at the command line with what to do then; the second one at once."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have jobs in the background ignore it
    recipe, out = recipe_for(base, data, checkpoint_every=100, evaluate_every=None), tmp_path / "out"
    arguments = ["medusa", "train", "--recipe", str(write_recipe(recipe, tmp_path / "recipe.yaml")), "--out", str(out)]
    with monkeypatch.context() as broken:
        broken.setattr(taken, "on_device", Moment(taken.on_device, 8, lambda: os.kill(os.getpid(), signal.SIGINT)))
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 130 and Checkpoints(out / "checkpoints").steps() == [4], result.output
    assert "stopped after step 4 of 12; --resume continues" in result.stderr.splitlines()
    assert "error" not in result.stderr and "Traceback" not in result.stderr
    assert train_heads(recipe, out, resume=True).finished
    train_heads(recipe, tmp_path / "whole")
    assert losses(out) == losses(tmp_path / "whole") and equal_heads(out, tmp_path / "whole")

    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)  # the handler runs between two instructions

    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(taken, "on_device", Moment(taken.on_device, 8, twice))
        train_heads(recipe, tmp_path / "twice")
    assert not Checkpoints(tmp_path / "twice" / "checkpoints").steps()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("stopped", [False, True], ids=["finished", "stopped"])
def test_a_run_is_extended(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """The steps after the extension have the learning rates of the longer run, and its data."""
    recipe, out = recipe_for(base, data, steps=6, warmup_steps=None, evaluate_every=None), tmp_path / "out"
    with monkeypatch.context() as broken:
        if stopped:
            broken.setattr(taken, "on_device", Moment(taken.on_device, 8, lambda: os.kill(os.getpid(), signal.SIGTERM)))
        assert train_heads(recipe, out).finished != stopped
    start = 4 if stopped else 6
    before, said = steps_of(out), list[str]()
    longer = recipe.changed({"steps": 12})
    assert train_heads(longer, out, resume=True, console=Console(said.append)).finished
    assert [line for line in said if f"extended from 6 to 12 steps: from step {start + 1} on" in line]
    found = steps_of(out)
    assert found[:start] == before[:start] and [step for step, _ in found] == list(range(1, 13))
    rates = [longer.learning_rate * schedule_factor(i, "cosine", 12) for i in range(12)]
    assert [rate for _, rate in found[start:]] == pytest.approx(rates[start:]) and found[1][1] < rates[1]
    # What it is now is what it is when it is resumed again, and it is as long.
    assert train_heads(longer, out, resume=True).finished and steps_of(out) == found
    with pytest.raises(ConfigError, match="the run has 12, and would have 6"):
        train_heads(recipe, out, resume=True)
    assert train_heads(longer.changed({"epochs": 4.0}), out, resume=True).step > 12


def steps_of(out: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["learning_rate"]) for line in lines if "learning_rate" in line]


def interrupt() -> None:
    raise KeyboardInterrupt


class Moment:
    """The call of a function at which something happens; counts the others."""

    def __init__(self, function: Callable[..., Any], at: int | None, happens: Callable[[], object]) -> None:
        self.function, self.at, self.happens, self.calls = function, at, happens, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        found = self.function(*args, **options)
        if self.calls == self.at:
            self.happens()
        return found


PLACES = ((taken, "on_device"), (Checkpoints, "save"), (evaluation, "on_device"))


@pytest.fixture(scope="module")
def whole(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Any, int]]:
    """A run that nothing interrupts, and how often it calls the functions of PLACES."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as watching:
        moments = {place: watched(watching, *place, None) for place in PLACES}
        torch.manual_seed(0)
        train_heads(recipe_for(base, data), folder)
    return folder, {place: moment.calls for place, moment in moments.items()}


def watched(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, at: int | None) -> Moment:
    """Have SIGTERM sent at a call of the function of this name."""
    moment = Moment(getattr(place, name), at, lambda: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(place, name, lambda *args, **options: moment(*args, **options))
    return moment


@pytest.mark.parametrize(
    ("place", "name", "share", "step"),
    [
        (taken, "on_device", 8 / 24, 4),  # Of the second batch of step 4.
        (Checkpoints, "save", 1 / 4, 3),
        (evaluation, "on_device", 0.1, 5),  # Of three evaluations the first, and the last.
        (evaluation, "on_device", 0.9, 12),
    ],
    ids=["accumulation", "checkpoint", "evaluation", "last evaluation"],
)
def test_sigterm_is_heeded_at_any_moment(
    base: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: tuple[Path, dict[Any, int]],
    place: Any,
    name: str,
    share: float,
    step: int,
) -> None:
    recipe, out = recipe_for(base, data), tmp_path / "out"
    moment = watched(monkeypatch, place, name, max(1, round(share * whole[1][place, name])))
    outcome = train_heads(recipe, out)
    assert (outcome.step, outcome.stopped, outcome.finished) == (step, True, False)
    # Not a step more, nor a batch of an evaluation.
    assert losses(out)[-1][0] == step and (place is not evaluation or moment.calls == moment.at)
    assert step not in [at for at, *_ in scores(out)] and not (out / "model.safetensors").exists()
    assert Checkpoints(out / "checkpoints").steps()[-1] == step
    again = train_heads(recipe, out, resume=True)
    assert again.finished and again.evaluation is not None
    assert losses(out) == losses(whole[0]) and scores(out) == scores(whole[0]) and equal_heads(out, whole[0])


@pytest.mark.parametrize("every", [5, None])
def test_what_fails_at_the_end_loses_nothing(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int | None
) -> None:
    """Whether checkpoints were asked for or not: then none stays once the heads are written."""
    recipe, out = recipe_for(base, data, steps=6, checkpoint_every=every, evaluate_every=None), tmp_path / "out"

    def fails(*_: Any, **__: Any) -> None:
        raise CheckpointError("the disk is full")

    for place, name in ((heads, "evaluate_heads"), (lm.MedusaModel, "save_pretrained")):
        with monkeypatch.context() as broken, pytest.raises(CheckpointError, match="the disk is full"):
            broken.setattr(place, name, fails)
            train_heads(recipe, out, resume=True)
        assert Checkpoints(out / "checkpoints").steps()[-1] == 6
    monkeypatch.setattr(taken, "on_device", fails)  # Not a step is taken again.
    assert train_heads(recipe, out, resume=True).finished
    assert (out / "checkpoints").exists() == (every is not None) and [at for at, *_ in scores(out)] == [6]


def test_a_last_checkpoint_that_fails_does_not_keep_the_heads_from_being_written(
    base: Path, data: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    recipe = recipe_for(base, data, steps=2, checkpoint_every=None)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoints").write_text("in the way")
    assert train_heads(recipe, tmp_path / "out", overwrite=True, console=Console(said.append)).finished
    assert any("cannot be written" in line and "the result is written all the same" in line for line in said)


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("changes", [{}, STAGE_2], ids=["stage 1", "stage 2"])
def test_a_run_on_a_gpu_goes_on_to_the_bit(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], attention: str
) -> None:
    recipe = recipe_for(base, data, **changes, dtype="bfloat16", report_every=1)
    options: dict[str, Any] = {"device": "cuda", "attention": attention}
    train_heads(recipe, tmp_path / "whole", **options)

    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        # At the start of step 8. Steps of a CUDA graph do not call `on_device`.
        broken.setattr(loop, "count_targets", Moment(loop.count_targets, 8, interrupt))
        train_heads(recipe, tmp_path / "killed", **options)
    assert losses(tmp_path / "killed")[-1][0] == 7
    train_heads(recipe, tmp_path / "killed", **options, resume=True)
    others = ["killed"]
    if changes:  # Where the untouched model is kept changes nothing.
        train_heads(recipe.changed({"reference": "cpu_offload"}), tmp_path / "host", **options)
        others.append("host")
    for other in others:
        assert losses(tmp_path / other) == losses(tmp_path / "whole")
        assert scores(tmp_path / other) == scores(tmp_path / "whole")
        assert equal_heads(tmp_path / other, tmp_path / "whole")


def test_a_run_goes_on_only_with_what_it_began_with(base: Path, data: Path, tmp_path: Path) -> None:
    recipe, out = recipe_for(base, data, steps=4, checkpoint_every=2, evaluate_every=None), tmp_path / "out"
    train_heads(recipe, out)
    for change in ({"learning_rate": 1e-3}, {"num_heads": 4}, {"seed": 4}):
        (name,) = change
        with pytest.raises(ConfigError, match=f"cannot resume with another recipe: {name} was"):
            train_heads(recipe.changed(change), out, resume=True)
    with pytest.raises(ConfigError, match="can be extended, and"):
        train_heads(recipe.changed({"steps": 3}), out, resume=True)
    free = recipe.changed({"evaluate_every": 1, "keep_checkpoints": 1, "date": None})
    assert train_heads(free, out, resume=True).finished
    # It starts over only with overwrite, and leaves nothing of the old run.
    short = recipe.changed({"steps": 1, "checkpoint_every": None})
    with pytest.raises(CheckpointError, match=r"holds checkpoints of a run; resume=True.*overwrite=True starts over"):
        train_heads(short, out)
    train_heads(short, out, overwrite=True)
    with pytest.raises(CheckpointError, match="exists and is not an empty folder"):  # finished, without checkpoints
        train_heads(short, out)
    assert len(losses(out)) == 1 and not (out / "checkpoints").exists()


def test_a_checkpoint_of_the_previous_release_is_of_the_same_recipe(base: Path, data: Path) -> None:
    recipe = recipe_for(base, data)
    old = {new: old for old, new in SETTINGS.items()}
    before = {old.get(name, name): value for name, value in recipe.settings().items()}
    assert "lambda0" in before and same_recipe(recipe, {**before, "reference": "host"}) == recipe
    with pytest.raises(ConfigError, match="num_heads was 4, is 3"):
        same_recipe(recipe, {**before, "heads": 4})


def test_a_plan_may_change_but_not_the_dtype_of_its_computation(base: Path, data: Path) -> None:
    recipe = recipe_for(base, data).changed({"parallel": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}})
    settings = recipe.settings()
    other = recipe.changed({"parallel": {"shard": 2, "reduce_dtype": None, "fsdp_unit": "model"}})
    assert same_recipe(other, settings).parallel == other.parallel
    for plan, was in ((settings["parallel"], "'bfloat16', is None"), ({}, "None, is 'bfloat16'")):
        changed = recipe.changed({"parallel": {"param_dtype": None if plan else "bfloat16"}})
        with pytest.raises(ConfigError, match=rf"parallel\.param_dtype was {was}; give the value that it had"):
            same_recipe(changed, {**settings, "parallel": plan})


def test_settings_that_a_release_adds_are_at_their_defaults_before(base: Path, data: Path) -> None:
    recipe = FineTuningRecipe(base=base, data=data, date="2026-01-01")
    before = recipe.settings()
    for name in before.keys() - {"base", "data", "date"}:
        assert same_recipe(recipe, {key: value for key, value in before.items() if key != name}) == recipe, name


def test_a_run_goes_on_without_the_heads_it_started_from(base: Path, data: Path, tmp_path: Path) -> None:
    shared = recipe_for(base, data, steps=4, checkpoint_every=2, evaluate_every=None, lm_head="shared")
    train_heads(shared, tmp_path / "first")
    recipe, out = shared.changed({"start_from": str(tmp_path / "first")}), tmp_path / "out"
    train_heads(recipe, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", out)
    shutil.rmtree(tmp_path / "first")
    for now in (recipe, recipe.changed({"start_from": None})):
        shutil.rmtree(out / "checkpoints" / "step-4")
        assert train_heads(now, out, resume=True).finished and equal_heads(out, tmp_path / "whole")
        assert losses(out) == losses(tmp_path / "whole") and read_recipe(out / "recipe.yaml") == recipe


def test_a_signal_in_the_evaluation_after_a_callback_ended_the_run(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation is abandoned, and repeated when the run resumes; nothing is exported before."""
    batches, out = RunPlan.validation_batches, tmp_path / "out"

    def interrupted(plan: RunPlan, *size: Any) -> Iterator[Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        yield from batches(plan, *size)

    class Stops(Callback):
        def on_step(self, event: Any) -> None:
            self.stop = event.step == 3

    recipe = recipe_for(base, data, evaluate_every=None, checkpoint_every=1)
    with monkeypatch.context() as patched:
        patched.setattr(RunPlan, "validation_batches", interrupted)
        outcome = train_heads(recipe, out, callbacks=[Stops()])
    assert outcome.stopped and outcome.step == 3 and not list(out.glob("*.safetensors"))


def test_nothing_to_learn_is_found_after_a_stop_too(base: Path, tmp_path: Path) -> None:
    """Be it before there are enough steps to tell."""
    (tmp_path / "short.jsonl").write_text('{"text": "a"}\n' * 99)  # With its end two tokens: none that a head guesses.
    recipe = recipe_for(base, tmp_path / "short.jsonl", steps=30, checkpoint_every=3)
    recipe = recipe.changed({"validation_fraction": 0})
    with pytest.MonkeyPatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(taken, "on_device", Moment(taken.on_device, 11, interrupt))
        train_heads(recipe, tmp_path / "out")
    assert Checkpoints(tmp_path / "out" / "checkpoints").steps() == [3]
    for _ in range(2):
        with pytest.raises(TrainingError, match="there has not been a single target to learn"):
            train_heads(recipe, tmp_path / "out", resume=True)


def test_what_says_how_a_run_began_is_written_whole_and_once(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = recipe_for(base, data, steps=2, evaluate_every=None), tmp_path / "out"
    train_heads(recipe, out)
    files = [out / name for name in ("recipe.yaml", "content.json")]
    before = [(path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in files]
    train_heads(recipe, out, resume=True)
    assert [(path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in files] == before
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(Path, "replace", lambda *_: interrupt())
        train_heads(recipe.changed({"keep_checkpoints": 1}), out, resume=True)
    assert [path.read_bytes() for path in files] == [content for *_, content in before]
    assert (out / ".recipe.yaml.partial").exists()
    train_heads(recipe, out, resume=True)
    assert not list(out.glob(".*"))


def test_resuming_does_no_harm_to_what_is_no_run(base: Path, data: Path, tmp_path: Path) -> None:
    recipe = write_recipe(recipe_for(base, data, steps=2, evaluate_every=None), tmp_path / "recipe.yaml")

    def resume(out: Path, *more: str) -> Result:
        return CliRunner().invoke(app, ["medusa", "train", "--recipe", str(recipe), "--out", str(out), *more])

    def content(folder: Path) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    out, model, own = tmp_path / "out", Path(shutil.copytree(base, tmp_path / "model")), tmp_path / "own"
    (model / "metrics.jsonl").write_text("of something else\n")
    own.mkdir()
    shutil.copy(recipe, own)
    first = resume(out, "--resume")
    assert first.exit_code == 0 and "has no checkpoint to resume from" in first.stderr, first.output
    finished = Path(shutil.copytree(out, tmp_path / "finished"))
    shutil.rmtree(finished / "checkpoints")
    for folder in (model, own, finished):
        before = content(folder)
        found = resume(folder, "--resume")
        assert found.exit_code == 1 and "holds no checkpoint to resume from, but something else" in found.stderr
        assert content(folder) == before
    import yaml

    settings = yaml.safe_load((finished / "recipe.yaml").read_text())
    (finished / "recipe.yaml").write_text(yaml.safe_dump({**settings, "checkpoint_every": None}))
    found = resume(finished, "--resume", "--steps", "99")
    assert found.exit_code == 1 and "checkpoint_every: null" in found.stderr and "as the model" in found.stderr
    assert resume(out, "--resume").exit_code == 0
    assert resume(finished, "--resume", "--overwrite").exit_code == 0 and equal_heads(out, finished)

    # What a run has written before its first checkpoint, killed at any moment.
    begun = tmp_path / "begun"
    settings_only = ["content.json", ".recipe.yaml.partial"]
    for names in ([".run.lock"], [".content.json.partial"], settings_only, ["metrics.jsonl"]):
        begun.mkdir(exist_ok=True)
        for name in names:
            (begun / name).write_text("")
        if "metrics.jsonl" in names:
            for name in ("content.json", "recipe.yaml"):
                shutil.copy(out / name, begun)
        found = resume(begun, "--resume")
        assert found.exit_code == 0 and "has no checkpoint to resume from" in found.stderr and equal_heads(out, begun)
        shutil.rmtree(begun)


@pytest.mark.parametrize("size", [1, 1000, fingerprint.PIECE * fingerprint.PIECES, 5_000_001])
def test_a_fingerprint_has_the_head_the_tail_and_pieces_between(size: int, tmp_path: Path) -> None:
    content = bytearray(random.Random(0).randbytes(size))

    def digest() -> str:
        (tmp_path / "file").write_bytes(content)
        return fingerprint.of_file(tmp_path / "file")["digest"]

    before = digest()
    for place in (0, size // 2, size - 1):
        if size == 5_000_001 and place == size // 2:
            place = (size - fingerprint.PIECE) * 31 // 63
        content[place] ^= 1
        assert digest() != before
        content[place] ^= 1
    assert digest() == before


def test_data_and_base_are_known_by_their_content(base: Path, data: Path, tmp_path: Path) -> None:
    recipe = recipe_for(base, data, steps=4, checkpoint_every=2, evaluate_every=None)
    train_heads(recipe, tmp_path / "whole")
    out = tmp_path / "out"
    shutil.copytree(tmp_path / "whole", out)
    shutil.rmtree(out / "checkpoints" / "step-4")

    # Elsewhere, and under other names, they are the same.
    moved, chats = tmp_path / "moved", tmp_path / "chats.jsonl"
    shutil.copytree(base, moved)
    shutil.copy(data, chats)
    elsewhere = recipe.changed({"base": str(moved), "data": str(chats)})
    assert train_heads(elsewhere, out, resume=True).finished and equal_heads(out, tmp_path / "whole")
    assert losses(out) == losses(tmp_path / "whole")

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    def other_norm(path: Path) -> None:
        tensors = load_file(path)
        tensors["model.norm.weight"][-1] += 1
        save_file(tensors, path, metadata={"format": "pt"})

    def other_activation(path: Path) -> None:
        path.write_text(path.read_text().replace('"silu"', '"gelu_pytorch_tanh"'))

    def longer(path: Path) -> None:
        path.write_bytes(path.read_bytes() + b"\n")

    for path, change, error, words in (
        (chats, flip, InputError, r"data: differs from .*: chats\.jsonl \(was data\.jsonl\) has other"),
        (chats, longer, InputError, r"chats\.jsonl .*had [\d,]+ bytes, has [\d,]+"),
        (moved / "config.json", other_activation, CheckpointError, r"base: differs .*: config\.json "),
        (moved / "tokenizer.json", longer, CheckpointError, r"base: differs .*: tokenizer\.json had"),
        (moved / "model.safetensors", other_norm, CheckpointError, r"base: .*: model\.safetensors has other content"),
    ):
        kept = path.read_bytes()
        change(path)
        with pytest.raises(error, match=words):
            train_heads(elsewhere, tmp_path / "whole", resume=True)
        path.write_bytes(kept)
    with pytest.raises(InputError, match=r"data: .*data\.jsonl is new"):
        train_heads(elsewhere.changed({"data": (str(chats), str(data))}), out, resume=True)
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    with pytest.raises(CheckpointError, match=r"chat_template: .*template\.jinja is new"):
        train_heads(elsewhere.changed({"chat_template": str(tmp_path / "template.jinja")}), out, resume=True)


def test_a_folder_has_one_run_at_a_time(base: Path, data: Path, tmp_path: Path, children: Any) -> None:
    """The other one changes nothing; one that was killed does not keep the folder."""
    recipe = recipe_for(base, data, steps=400, evaluate_every=None, report_every=1, checkpoint_every=100)
    file, out = write_recipe(recipe, tmp_path / "recipe.yaml"), tmp_path / "new" / "out"
    child = children.Process(target=command, args=("--recipe", str(file), "--out", str(out)))
    child.start()
    deadline = time.monotonic() + 60
    while not losses(out) and time.monotonic() < deadline:
        time.sleep(0.01)
    for resume in (True, False):
        with pytest.raises(CheckpointError, match="out: another run uses it; wait for its end"):
            train_heads(recipe, out, resume=resume)
    found = CliRunner().invoke(app, ["medusa", "train", "--recipe", str(file), "--out", str(out), "--resume"])
    assert found.exit_code == 1 and "another run uses it" in found.stderr
    assert child.is_alive() and losses(out)
    child.kill()
    child.join()
    (out / ".run.lock").touch()
    short = recipe.changed({"steps": 2, "checkpoint_every": None})
    assert train_heads(short, out, overwrite=True).finished and not list(out.glob(".*"))
    with pytest.raises(ConfigError):  # Before there is anything to write, nothing is left.
        train_heads(recipe.changed({"base": None}), tmp_path / "none" / "out")
    assert not (tmp_path / "none").exists()
    with pytest.raises(CheckpointError, match=r"recipe\.yaml: is a file; give a folder"):
        train_heads(recipe, file)


def damaged(step: Path) -> None:
    """One byte of a tensor is another."""
    path = step / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def renamed(name: str) -> Callable[[Path], object]:
    return lambda step: step.rename(step.with_name(name))


@pytest.fixture(scope="module")
def whole_of_five(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe, out = recipe_for(base, data, **FIVE), tmp_path_factory.mktemp("five") / "out"
    train_heads(recipe, out)
    return out


FIVE = {"steps": 5, "checkpoint_every": 1, "evaluate_every": None}


@pytest.mark.parametrize(
    ("harm", "warning", "left"),
    [
        (damaged, r"checkpoint of step 3: .*step-4/__0_0\.distcp: is damaged", {"damaged-step-4"}),
        (lambda step: (step / "manifest.json").unlink(), r"step-4/manifest\.json: no such file", {"damaged-step-4"}),
        (renamed("step-5"), r"step-5/run\.json: is the checkpoint of step 4, under another", {"damaged-step-5"}),
        (renamed("mine"), None, {"mine"}),
    ],
    ids=["a byte", "no manifest", "another step", "another name"],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    base: Path, data: Path, tmp_path: Path, whole_of_five: Path, harm: Callable[[Path], object], warning: str | None,
    left: set[str],
) -> None:  # fmt: skip
    recipe, out = recipe_for(base, data, **FIVE), tmp_path / "out"
    with pytest.MonkeyPatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(taken, "on_device", Moment(taken.on_device, 9, interrupt))  # The first batch of step 5.
        train_heads(recipe, out)
    checkpoints = out / "checkpoints"
    assert Checkpoints(checkpoints).steps() == [3, 4]
    harm(checkpoints / "step-4")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert train_heads(recipe, out, resume=True).finished
    told = [str(each.message) for each in caught if each.category is CheckpointWarning]
    assert len(told) == (warning is not None) and all(re.search(str(warning), each) for each in told)
    assert losses(out) == losses(whole_of_five) and equal_heads(out, whole_of_five)
    # It does not count among the newest, of which two are kept.
    assert {path.name for path in checkpoints.iterdir()} == {"step-4", "step-5", *left}


def test_checkpoints_of_which_none_is_whole_are_refused(base: Path, data: Path, tmp_path: Path) -> None:
    recipe, out = recipe_for(base, data, steps=2, checkpoint_every=1, evaluate_every=None), tmp_path / "out"
    train_heads(recipe, out)
    for step in (1, 2):
        damaged(out / "checkpoints" / f"step-{step}")
    with pytest.raises(CheckpointError, match=r"step-2/__0_0\.distcp: is damaged.*no other checkpoint is complete"):
        train_heads(recipe, out, resume=True)
    for step in (1, 2):
        renamed(f"old-{step}")(out / "checkpoints" / f"step-{step}")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match="holds no checkpoint under its name, step-N, but old-1, old-2; rename"):
        train_heads(recipe, out, resume=True)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
