"""`--gpus N` starts its ranks itself: results, exit codes, signals, and errors that are printed once."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from children import Command
from runs import losses, recipe_for
from typer.testing import CliRunner

from ligermodels.cli import app, launch
from ligermodels.training import FineTuningRecipe, fine_tune
from ligermodels.training.checkpoints import Checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")


def tuning(base: Path, data: Path, **changes: Any) -> FineTuningRecipe:
    settings = recipe_for(base, data, dtype="float64", evaluate_every=None, micro_batch_tokens=None).settings()
    common = {name: value for name, value in settings.items() if name in FineTuningRecipe.model_fields}
    return FineTuningRecipe().changed({**common, "checkpoint_every": 100, "report_every": 1, **changes})


@pytest.fixture
def recipe_file(base: Path, data: Path, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tuning(base, data, steps=12).settings()))
    return path


def run(*arguments: object, folder: Path, shown: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code, and what is shown, of the command in this process, whose two ranks have imported everything."""
    said = folder / "said"
    said.write_text("")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(launch.subprocess, "Popen", partial(Command, out=said))
        app(["train", "--gpus=2", "--device", "cpu", *map(str, arguments)])
    out, err = shown.readouterr()
    return int(ended.value.code or 0), out + err + said.read_text()


def stop_after(out: Path, step: int) -> None:
    """Send this process SIGTERM once the run in `out` has taken a step; without a run, after a long time."""
    deadline = time.monotonic() + 200
    while not [taken for taken, *_ in losses(out) if taken >= step] and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_on_two_ranks_is_stopped_and_resumed(
    base: Path, data: Path, recipe_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # should it come when there are no ranks
    stopper = Thread(target=stop_after, args=(out, 3))
    stopper.start()
    code, shown = run("--recipe", recipe_file, "--out", out, folder=tmp_path, shown=capfd)
    stopper.join()
    signal.signal(signal.SIGTERM, before)
    assert code == 143, shown
    (step,) = Checkpoints(out / "checkpoints").steps()
    assert 3 <= step < 12 and losses(out)[-1][0] == step
    assert shown.count(f"stopped after step {step} of 12; --resume continues") == 1, shown
    assert "error" not in shown and "Traceback" not in shown, shown

    code, shown = run("--resume", "--out", out, folder=tmp_path, shown=capfd)
    assert code == 0, shown
    assert shown.count(f"wrote {out}") == shown.count("\nvalidation loss") == shown.count("attention: ") == 1, shown
    fine_tune(tuning(base, data, steps=12), tmp_path / "whole")
    wanted = [number for line in losses(tmp_path / "whole") for number in line]
    assert [number for line in losses(out) for number in line] == pytest.approx(wanted, rel=1e-6)


def test_an_error_of_all_ranks_is_printed_once(
    recipe_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--recipe", recipe_file, "--out", tmp_path / "out", "--max-bad-lines", 0)
    code, shown = run(*arguments, folder=tmp_path, shown=capfd)
    assert code == 1, shown
    assert shown.count("error: ") == shown.count("data.jsonl:31: not an object") == 1, shown


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--track", "wandb"], "error: track: wandb cannot be imported"),
        (["--callback", "nosuch:X"], "error: callback: nosuch:X: there is no module 'nosuch'"),
    ],
)
def test_what_cannot_be_imported_is_an_error_of_no_rank(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: list[str], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    monkeypatch.setattr(launch, "run_ranks", lambda *_: pytest.fail("started ranks"))
    arguments = ["train", "--recipe", recipe_file, "--out", tmp_path / "out", "--gpus", 2, "--device", "cpu", *option]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 1 and result.stderr.startswith(message), result.output


RANK = """
import os, signal, sys, time
rank, number = int(os.environ["RANK"]), 0
def handle(received, _):
    global number
    number = received
signal.signal(signal.SIGTERM, handle), signal.signal(signal.SIGINT, handle)
open(f"started-{rank}", "w").close()
"""
"""A rank that notes signals, as a run does."""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("ends", "signals", "code", "shown"),
    [
        ("", [], 0, ""),
        ("sys.exit(7 * rank)", [], 7, ""),
        (f"{KILLED} if rank else time.sleep(99)", [], 137, "rank 1: ended by SIGKILL; the kernel sends it if"),
        ("while not number: time.sleep(0.01)\nsys.exit(128 + number)", [signal.SIGTERM], 143, ""),
        ("while not number: time.sleep(0.01)\nsys.exit(128 + number)", [signal.SIGINT], 130, ""),
        ("while True: time.sleep(0.01)", [signal.SIGINT, signal.SIGINT], 130, "interrupted"),
        ("time.sleep(rank)\nsys.exit(130 + 13 * rank)", [], 130, ""),  # an orderly stop, not a failure
    ],
)
def test_exit_codes_and_signals(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ends: str,
    signals: list[int],
    code: int,
    shown: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "SECONDS_AFTER_FAILURE", 0.2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def send() -> None:
        while len(list(tmp_path.glob("started-*"))) < 2:
            time.sleep(0.01)
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0.1)

    sender = Thread(target=send)
    sender.start()
    assert launch.run_ranks(2, [sys.executable, "-c", RANK + ends]) == code
    sender.join()
    assert shown in (error := capsys.readouterr().err) and bool(shown) == bool(error)
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_ranks_import_what_the_command_imports(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules of the current folder take the place of no package."""
    commands: list[list[str]] = []
    monkeypatch.setattr(launch, "run_ranks", lambda _, command: commands.append(command) or 0)
    arguments = ["train", "--recipe", recipe_file, "--out", tmp_path / "out", "--gpus", 2, "--device", "cpu"]
    assert CliRunner().invoke(app, [str(argument) for argument in arguments]).exit_code == 0
    (command,) = commands
    start = command.index("train")
    assert command[start:] == ["train", "--recipe", str(recipe_file), "--out", str(tmp_path / "out"), "--device", "cpu"]
    (tmp_path / "typer.py").write_text("raise SystemExit('a module of the current folder')")
    rank = subprocess.run([*command[:start], "--version"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (rank.stdout, rank.stderr) == ("ligermodels 0.1.0\n", "")


def test_ranks_find_one_another_and_one_of_them_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "speaking.py").write_text("""
import os, torch.distributed as dist
from ligermodels.cli.launch import is_first_to
from ligermodels.parallel.ranks import join, world_size
assert world_size() == 2 and join("cpu")
rank, mine = dist.get_rank(), [is_first_to("error"), is_first_to("error")]
everyone = [None, None]
dist.all_gather_object(everyone, mine)
assert sorted(map(sum, everyone)) == [0, 1] and is_first_to(f"only rank {rank}")
open(f"{rank}-{os.environ['LOCAL_RANK']}", "w").close()
""")
    with monkeypatch.context() as patch:
        patch.setattr(launch.subprocess, "Popen", partial(Command, out=tmp_path / "said"))
        assert launch.run_ranks(2, [sys.executable, "-m", "speaking"]) == 0, (tmp_path / "said").read_text()
    assert {path.name for path in tmp_path.glob("?-?")} == {"0-0", "1-1"}
    assert launch.is_first_to("error") and launch.is_first_to("error")  # without --gpus


@pytest.mark.parametrize(
    ("options", "environment", "message", "code"),
    [
        (["--gpus", "99"], {}, "--gpus 99: torch finds", 1),
        (["--gpus", "2", "--device", "cuda:1"], {}, "must be cuda or cpu beside --gpus, got cuda:1", 2),
        (
            ["--gpus", "2", "--device", "cpu"],
            {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "torchrun has started this process, as one of 4; leave out --gpus or torchrun",
            2,
        ),
    ],
)
@pytest.mark.parametrize("command", ["train", "medusa train", "mtp train", "eagle train", "dspark train"])
def test_wrong_usage_is_named(
    base: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    options: list[str],
    environment: dict[str, str],
    message: str,
    code: int,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    arguments = [*command.split(), str(base), "--data", str(data), "--out", str(tmp_path / "out"), *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code and message in result.stderr, result.output
    assert not (tmp_path / "out").exists()
