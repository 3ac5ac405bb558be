"""Trackers: TensorBoard's own files; trackio and wandb as modules with the signatures of the packages; curves.png."""

import importlib.machinery
import inspect
import json
import math
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from test_callbacks import Recorder, lines, recipe_of
from test_run_console import Output

from ligermodels.errors import BackendError, ConfigError
from ligermodels.training import fine_tune, trackers
from ligermodels.training import run as training_run
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.metrics import Metrics, read_curves
from ligermodels.training.trackers import TensorBoard, TrackedRun

pytestmark = pytest.mark.usefixtures("one_thread")


class FakeRun:
    """A run of trackio or wandb: what was logged."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.logged, self.exit_codes = options, list[tuple[int | None, dict[str, Any]]](), list[Any]()
        self.defined: list[tuple[str, Any]] = []

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        assert not self.exit_codes and all(isinstance(value, int | float) for value in data.values())
        self.logged.append((step, data))

    def finish(self, exit_code: int | None = None) -> None:
        self.exit_codes.append(exit_code)

    def define_metric(self, name: str, step_metric: str | None = None, hidden: bool | None = None) -> None:
        self.defined.append((name, step_metric))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[FakeRun]]:
    """Modules trackio (0.43) and wandb (0.31); the runs that were started in them."""
    runs: dict[str, list[FakeRun]] = {"trackio": [], "wandb": []}

    def trackio_init(
        project: str, name: str | None = None, group: str | None = None, space_id: str | None = None,
        config: dict[str, Any] | None = None, resume: str = "never",
    ) -> FakeRun:  # fmt: skip
        print("* Trackio project initialized")
        runs["trackio"].append(FakeRun({"project": project, "name": name, "config": config, "resume": resume}))
        return runs["trackio"][-1]

    def wandb_init(
        entity: str | None = None, project: str | None = None, dir: str | None = None, id: str | None = None,
        name: str | None = None, config: dict[str, Any] | None = None, allow_val_change: bool | None = None,
        mode: str | None = None, resume: str | None = None,
    ) -> FakeRun:  # fmt: skip
        options = {"project": project, "id": id, "name": name, "config": config, "resume": resume}
        runs["wandb"].append(FakeRun(options))
        return runs["wandb"][-1]

    for name, init in (("trackio", trackio_init), ("wandb", wandb_init)):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.init = init  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    for variable in ("WANDB_PROJECT", "WANDB_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    return runs


def test_trackers_get_every_metric_and_resume(
    base: Path, data: Path, tmp_path: Path, fakes: dict[str, list[FakeRun]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The lines of metrics.jsonl, under names from the output folder; a resumed run is the same run of the tracker."""
    recipe, out = recipe_of(base, data, track=["trackio", "wandb"]), tmp_path / "project" / "out"
    fine_tune(recipe, out)
    for start in (0, 6):
        if start:
            for step in Checkpoints(out / "checkpoints").steps():
                if step > start:
                    shutil.rmtree(out / "checkpoints" / f"step-{step}")
            fine_tune(recipe.changed({"keep_checkpoints": 3}), out, resume=True)
        else:
            fine_tune(recipe.changed({"keep_checkpoints": 3}), out, overwrite=True)
        entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        wanted = [(entry.pop("step"), entry) for entry in entries]
        wanted = [(step, entry) for step, entry in wanted if step > start]
        trackio, wandb = (fakes[name][-1] for name in ("trackio", "wandb"))
        assert trackio.logged == wanted
        assert wandb.logged == [(None, {**entry, "step": step}) for step, entry in wanted]
        assert wandb.defined[-1] == ("*", "step")
        names = {"project": "project", "name": "out"}
        assert names.items() <= trackio.options.items() and names.items() <= wandb.options.items()
        assert trackio.options["resume"] == ("allow" if start else "never")
        assert (
            trackio.options["config"]["learning_rate"] == 5e-3 and trackio.options["config"] == wandb.options["config"]
        )
        assert (trackio.exit_codes, wandb.exit_codes) == ([None], [0])
    first, second, resumed = (run.options["id"] for run in fakes["wandb"])
    assert first != second == resumed
    assert not (out / "tensorboard").exists()
    assert capsys.readouterr().out == ""


def test_names_from_settings_and_environment(
    base: Path, data: Path, tmp_path: Path, fakes: dict[str, list[FakeRun]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "from-the-environment")
    monkeypatch.setenv("WANDB_RUN_ID", "id-of-a-sweep")
    recipe = recipe_of(base, data, track=["wandb", "trackio"], steps=1)
    fine_tune(recipe, tmp_path / "one")
    fine_tune(recipe.changed({"project": "mine", "run_name": "first"}), tmp_path / "two")
    found = [(run.options["project"], run.options["name"], run.options["id"]) for run in fakes["wandb"]]
    assert found == [("from-the-environment", "one", "id-of-a-sweep"), ("mine", "first", "id-of-a-sweep")]
    found = [(run.options["project"], run.options["name"]) for run in fakes["trackio"]]
    assert found == [(tmp_path.name, "one"), ("mine", "first")]


def test_a_failed_run_is_marked(base: Path, data: Path, tmp_path: Path, fakes: dict[str, list[FakeRun]]) -> None:
    class Failing(Recorder):
        def on_evaluate(self, event: Any) -> None:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fine_tune(recipe_of(base, data, track="wandb"), tmp_path / "out", callbacks=[Failing()])
    assert fakes["wandb"][0].exit_codes == [1] and fakes["wandb"][0].logged


@pytest.mark.parametrize("name", ["trackio", "wandb", "tensorboard"])
def test_a_missing_package_is_named(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BackendError, match=rf"track: {name} cannot be imported .*pip install {name}"):
        fine_tune(recipe_of(base, data, track=name), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tracker_that_cannot_start_leaves_nothing_behind(
    base: Path, data: Path, tmp_path: Path, fakes: dict[str, list[FakeRun]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: Any) -> None:
        raise ValueError("api_key not configured")

    monkeypatch.setattr(sys.modules["wandb"], "init", init)
    with pytest.raises(BackendError, match="track: wandb cannot start: api_key not configured"):
        fine_tune(recipe_of(base, data, track=["trackio", "wandb"]), tmp_path / "out")
    assert not (tmp_path / "out").exists() and fakes["trackio"][0].exit_codes == [None]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"track": ["mlflow"]}, r"track.*must be 'tensorboard', 'trackio', 'wandb' or 'none'"),
        ({"project": "mine"}, "project: is for trackers; give track: trackio or wandb too"),
    ],
)
def test_wrong_settings_are_named(base: Path, data: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        recipe_of(base, data, **change)


def test_all_trackers_finish_if_one_fails(
    base: Path, data: Path, tmp_path: Path, fakes: dict[str, list[FakeRun]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(*_: Any, **options: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(trackers.Trackio, "finish", finish)
    with pytest.raises(OSError, match="no network"):
        fine_tune(recipe_of(base, data, track=["trackio", "wandb"]), tmp_path / "out")
    assert fakes["wandb"][0].exit_codes == [0]


def test_metrics_are_json(tmp_path: Path) -> None:
    """JSON has neither NaN nor infinity, the perplexity of a loss above 700."""
    written = Metrics(tmp_path)
    written.write(1, {"perplexity": math.inf, "loss": 1.0, "kl": math.nan, "top1": [math.inf, math.nan, 0.5]})
    written.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 1.0, "top1": [null, null, 0.5]}\n'


def test_tensorboard_reads_what_metrics_wrote(tmp_path: Path) -> None:
    """In its own files, also of a run that was killed and went on from the step before."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, factor in ((0, 1.0), (2, 10.0)):
        tracker = TensorBoard(TrackedRun(tmp_path, "project", "name", "id", start, {}))
        written = Metrics(tmp_path, after=start, trackers=[tracker])
        for step in range(start + 1, 4):
            written.write(step, {"loss": step * factor, "accuracy": [0.5, step / 4]})
        written.close()
        tracker.finish(failed=False)
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert board.Tags()["scalars"] == ["loss", "accuracy/0", "accuracy/1"]
    wanted = {"loss": [1, 2, 30], "accuracy/0": [0.5] * 3, "accuracy/1": [0.25, 0.5, 0.75]}
    for tag, values in wanted.items():
        assert [(event.step, event.value) for event in board.Scalars(tag)] == list(enumerate(values, start=1))


@pytest.mark.parametrize(("track", "written"), [((), True), (("tensorboard",), True), (("none",), False)])
def test_tensorboard_is_the_default(
    base: Path, data: Path, tmp_path: Path, track: tuple[str, ...], written: bool
) -> None:
    fine_tune(recipe_of(base, data, track=track, steps=2), tmp_path / "out")
    assert (tmp_path / "out" / "tensorboard").exists() == written


def test_curves_are_drawn_at_the_end(base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From metrics.jsonl, into a PNG; without matplotlib a message says so, and an old PNG is not left there."""
    out, output = tmp_path / "out", Output()
    monkeypatch.setattr(training_run, "draw_curves", inspect.unwrap(training_run.draw_curves))
    fine_tune(recipe_of(base, data), out)
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")
    curves = read_curves(out / "metrics.jsonl")
    assert curves["loss"] == [(line["step"], line["loss"]) for line in lines(out, "loss")]
    assert [step for step, _ in curves["validation_loss"]] == [4, 8, 12]
    assert all(curves.values())
    monkeypatch.setattr("ligermodels.training.metrics.find_spec", lambda name: None)
    fine_tune(recipe_of(base, data, steps=1), out, overwrite=True, console=output.console)
    assert "curves.png: not drawn, needs matplotlib: pip install 'ligermodels[plot]'" in output.said
    assert not (out / "curves.png").exists()
