"""Callbacks of runs: events, stopping, states in checkpoints, early stopping and the best checkpoint."""

import json
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import equal_heads, losses, recipe_for
from test_run_console import Output, settings
from torch import Tensor

import ligermodels as lm
from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.training import Callback, EarlyStopping, Event, FineTuningRecipe, fine_tune, train_heads
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.counting import data_messages
from ligermodels.training.objectives import LossEvaluation

pytestmark = pytest.mark.usefixtures("one_thread")


class Recorder(Callback):
    """Everything that it was told; a checkpoint keeps it."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.told, self.models, self.stop_at = list[Any](), list[Any](), stop_at

    def on_step(self, event: Event) -> None:
        loss, norm = event.metrics["loss"], event.metrics["grad_norm"]
        assert isinstance(loss, Tensor) and loss.ndim == norm.ndim == 0 and not loss.requires_grad
        self.told.append(["step", event.step, float(loss), float(norm), event.metrics["learning_rate"]])
        self.models.append(event.model)
        self.stop = event.step == self.stop_at

    def on_evaluate(self, event: Event) -> None:
        self.told.append(["evaluate", event.step, dict(event.metrics)])

    def on_save(self, event: Event) -> None:
        assert event.folder is not None and (event.folder / "manifest.json").is_file()
        assert event.folder.name == f"step-{event.step}"
        self.models.append(event.step)

    def state_dict(self) -> dict[str, Any]:
        return {"told": self.told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.told = list(state["told"])


def recipe_of(base: Path, data: Path, **changes: Any) -> FineTuningRecipe:
    options: dict[str, Any] = {"steps": 12, "evaluate_every": 4, "checkpoint_every": 3, "learning_rate": 5e-3}
    return FineTuningRecipe(**settings(base, data, **(options | changes)))


def lines(out: Path, name: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [entry for entry in entries if name in entry]


@pytest.mark.parametrize("micro_batch_tokens", [64, 32])
def test_events_of_a_run(base: Path, data: Path, tmp_path: Path, micro_batch_tokens: int) -> None:
    """Losses and evaluations of metrics.jsonl; checkpoints that are complete; the model itself."""
    recorder = Recorder()
    recipe = recipe_of(base, data, micro_batch_tokens=micro_batch_tokens)
    fine_tune(recipe, tmp_path / "out", callbacks=[recorder])
    steps = [event for event in recorder.told if event[0] == "step"]
    found = lines(tmp_path / "out", "loss")
    wanted = [[line[key] for key in ("step", "loss", "grad_norm", "learning_rate")] for line in found]
    assert [event[1:] for event in steps] == [pytest.approx(line, rel=1e-6) for line in wanted]
    evaluations = [event for event in recorder.told if event[0] == "evaluate"]
    assert [event[1] for event in evaluations] == [4, 8, 12]
    for event, line in zip(evaluations, lines(tmp_path / "out", "validation_loss"), strict=True):
        assert event[2] == {"loss": line["validation_loss"], "perplexity": line["validation_perplexity"]}
    assert [model for model in recorder.models if isinstance(model, int)] == [3, 6, 9, 12]
    assert isinstance(recorder.models[0], lm.CausalLM)


def test_a_callback_ends_the_run(base: Path, data: Path, tmp_path: Path) -> None:
    """After the step at which it sets `stop`, with a last evaluation and the result; the steps before are the same."""
    recipe, output = recipe_of(base, data), Output()
    whole = fine_tune(recipe, tmp_path / "whole")
    outcome = fine_tune(recipe, tmp_path / "out", callbacks=[Recorder(stop_at=5)], console=output.console)
    assert (outcome.step, outcome.steps, outcome.stopped_early, outcome.finished) == (5, 12, True, True)
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")[:5] and not whole.stopped_early
    evaluated = lines(tmp_path / "out", "validation_loss")
    assert [line["step"] for line in evaluated] == [4, 5]
    assert evaluated[-1]["validation_loss"] == outcome.evaluation.loss
    assert "stopped early, after step 5 of 12" in output.said
    assert (tmp_path / "out" / "model.safetensors").is_file()
    # Without the callback it resumes to the end, and its result is the same.
    resumed = fine_tune(recipe, tmp_path / "out", resume=True)
    assert resumed.step == 12 and losses(tmp_path / "out") == losses(tmp_path / "whole")
    assert equal_heads(tmp_path / "out", tmp_path / "whole")


@pytest.mark.parametrize("start", [8, 12])
def test_states_resume_exactly(base: Path, data: Path, tmp_path: Path, start: int) -> None:
    """Each event once: also the evaluation of a step whose checkpoint was written before it."""
    recipe = recipe_of(base, data, checkpoint_every=1, keep_checkpoints=12)
    recorders = [Recorder(), Recorder()]
    fine_tune(recipe, tmp_path / "out", callbacks=recorders)
    for step in range(start + 1, 13):
        shutil.rmtree(tmp_path / "out" / "checkpoints" / f"step-{step}")
    again = [Recorder(), Recorder()]
    fine_tune(recipe, tmp_path / "out", callbacks=again, resume=True)
    assert [each.told for each in again] == [each.told for each in recorders]
    output = Output()
    fine_tune(recipe, tmp_path / "out", resume=True, console=output.console)
    name = "test_callbacks.Recorder"
    assert f"callbacks: the checkpoint has a state of {name}, which the run does not have now" in output.said


def test_heads_have_the_same_events(base: Path, data: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    train_heads(recipe_for(base, data, steps=4, evaluate_every=2), tmp_path / "out", callbacks=[recorder])
    kinds = [event[:2] for event in recorder.told]
    assert kinds == [["step", 1], ["step", 2], ["evaluate", 2], ["step", 3], ["step", 4], ["evaluate", 4]]
    assert recorder.told[2][2].keys() == {"loss", "top1", "top5"}


@pytest.mark.parametrize("state", [{"tensor": torch.ones(2)}, {"counts": [{1: 2}]}], ids=["tensor", "key"])
def test_other_states_than_json_are_named(base: Path, data: Path, tmp_path: Path, state: dict[str, Any]) -> None:
    class Wrong(Callback):
        def state_dict(self) -> dict[str, Any]:
            return state

    with pytest.raises(InputError, match=r"state_dict of .*Wrong must hold JSON types"):
        fine_tune(recipe_of(base, data), tmp_path / "out", callbacks=[Wrong()])


class OtherArguments(Callback):
    def on_step(self, event: Event, **more: Any) -> None: ...

    def on_save(self) -> None:  # type: ignore[override]
        ...


def with_period(every: Any) -> Recorder:
    recorder = Recorder()
    recorder.every = every
    return recorder


WRONG: list[tuple[dict[str, Any], list[Any], type[Exception], str]] = [
    ({}, [Recorder], InputError, r"callbacks: must be instances of Callback.*; give an instance of the class"),
    ({}, [print], InputError, r"callbacks: must be instances of Callback"),
    ({}, [OtherArguments()], InputError, r"callbacks: OtherArguments.on_save: must take the arguments \(self, event\)"),
    (
        {"callback": "test_callbacks:OtherArguments"},
        [],
        InputError,
        r"callbacks: OtherArguments.on_save: must take the arguments \(self, event\)",
    ),
    ({}, [Recorder(), with_period(0)], InputError, "Recorder.every: must be"),
    ({}, [with_period(2.5)], InputError, "Recorder.every: must be"),
    ({"callback": "nothing"}, [], ConfigError, r"callback: must be module:name, such as my_code:name; got 'nothing'"),
    (
        {"callback": "no_such_module:A"},
        [],
        ConfigError,
        r"callback: no_such_module:A: there is no module 'no_such_module', neither installed nor in",
    ),
    ({"callback": "a/mine.py:A"}, [], ConfigError, r"callback: a/mine.py:A: names a file; give its module, a/mine:A"),
    ({"callback": "json:Nothing"}, [], ConfigError, r"callback: json:Nothing: Nothing does not exist in"),
    ({"callback": "json:dumps"}, [], ConfigError, r"callback: json:dumps: is not a subclass of ligermodels.training"),
    ({"callback": "ligermodels.training:EarlyStopping"}, [], ConfigError, r"must be made without arguments"),
]


@pytest.mark.parametrize(("change", "callbacks", "error", "words"), WRONG)
def test_wrong_callbacks_are_named(
    base: Path,
    data: Path,
    tmp_path: Path,
    change: dict[str, Any],
    callbacks: Sequence[Any],
    error: type[Exception],
    words: str,
) -> None:
    with pytest.raises(error, match=words):
        fine_tune(recipe_of(base, data, **change), tmp_path / "out", callbacks=callbacks)
    assert not (tmp_path / "out").exists()


def test_a_callback_by_its_import_path(base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a module of the current folder, from the command line; recipe.yaml keeps it, so a resumed run has it too."""
    from typer.testing import CliRunner

    from ligermodels.cli import app

    code = "from ligermodels.training import Callback\nclass Two(Callback):\n    def on_step(self, event):\n"
    (tmp_path / "my_callbacks.py").write_text(code + "        self.stop = event.step == 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    flags = "--steps 5 --seq-len 16 --batch-tokens 64 --max-bad-lines 1 --device cpu --packing-strategy wrapped"
    flags += " --callback my_callbacks:Two"
    result = CliRunner().invoke(app, ["train", str(base), "--data", str(data), "--out", "out", *flags.split()])
    assert result.exit_code == 0, result.output
    assert "stopped early, after step 2 of 5" in result.stderr and "wrote out" in result.stderr
    assert FineTuningRecipe.read(tmp_path / "out" / "recipe.yaml").callback == (f"{tmp_path}/my_callbacks:Two",)


SCRIPT = [5.0, 4.0, 4.5, 3.95, 3.9, 4.2, 4.1, 4.0]
"""Validation losses."""


@pytest.mark.parametrize(
    ("patience", "threshold", "script", "stops"),
    [
        (2, 0.0, SCRIPT, 7),
        (3, 0.0, SCRIPT, 8),
        (4, 0.0, SCRIPT, None),
        (2, 0.1, SCRIPT, 4),  # 3.95 and 3.9 are the best, and no improvement
        (1, 0.0, [4.0, 4.0], 2),
        (2, 0.0, [float("nan"), 3.0, float("nan"), float("nan")], 4),
        (1, 0.0, [float("nan")], 1),
    ],
)
def test_early_stopping_counts_as_transformers_does(
    patience: int, threshold: float, script: list[float], stops: int | None
) -> None:
    pytest.importorskip("accelerate")  # the arguments of transformers' Trainer need it
    from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

    ours, theirs = EarlyStopping(patience, threshold), EarlyStoppingCallback(patience, threshold)
    arguments = TrainingArguments(
        "unused", metric_for_best_model="loss", greater_is_better=False, load_best_model_at_end=False
    )
    state, found, wanted = TrainerState(), None, None
    for step, loss in enumerate(script, start=1):
        control = TrainerControl()
        ours.on_evaluate(Event(step, 10, None, {"loss": loss}))
        theirs.on_evaluate(arguments, state, control, {"eval_loss": loss})
        if state.best_metric is None or loss < state.best_metric:  # as the Trainer does afterwards
            state.best_metric = None if loss != loss else loss
        found = step if found is None and ours.should_stop() else found
        wanted = step if wanted is None and control.should_training_stop else wanted
        again = EarlyStopping(patience, threshold)
        again.load_state_dict(json.loads(json.dumps(ours.state_dict())))
        ours = again
    assert found == stops
    if script[0] == script[0]:
        assert wanted == stops


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Evaluations return SCRIPT's losses, in the order of the evaluated models; grows with each evaluation."""
    seen: dict[bytes, float] = {}
    calls: list[int] = []

    def evaluate(model: lm.CausalLM, batches: Any) -> float:
        calls.append(1)
        key = model.head.weight.detach().numpy().tobytes()
        if key not in seen:
            seen[key] = SCRIPT[len(seen)]
        return seen[key]

    monkeypatch.setattr("ligermodels.training.objectives.evaluate", evaluate)
    return calls


@pytest.mark.parametrize(("every", "steps", "warns"), [(10, 3, True), (10, 20, True), (10, 30, True), (10, 31, False)])
def test_early_stopping_that_cannot_come_is_said(every: int, steps: int, warns: bool) -> None:
    """The first evaluation is the best one so far, and two more come before the last step from 31 steps on."""
    recipe = FineTuningRecipe(evaluate_every=every, early_stopping_patience=2)
    said = [line for line in data_messages(recipe, steps, 10, 2, {}) if line.startswith("early_stopping_patience: ")]
    assert bool(said) == warns


def test_the_best_checkpoint_is_kept_and_written(base: Path, data: Path, tmp_path: Path, scripted: list[int]) -> None:
    """Best of the evaluations at 2, 4, ... is step 10; patience 2 ends at 14. Checkpoints at 3, 6, ... are rotated."""
    output = Output()
    recipe = recipe_of(base, data, steps=20, evaluate_every=2, early_stopping_patience=2, load_best_model_at_end=True)
    outcome = fine_tune(recipe, tmp_path / "out", console=output.console)
    assert (outcome.step, outcome.best_step, outcome.stopped_early, outcome.finished) == (14, 10, True, True)
    assert outcome.evaluation == LossEvaluation(3.9) and len(scripted) == 7
    assert Checkpoints(tmp_path / "out" / "checkpoints").steps() == [10, 12, 14]
    assert "the result is the model of step 10, which has the lowest validation loss" in output.said
    fine_tune(recipe_of(base, data, steps=20, evaluate_every=2), tmp_path / "plain", callbacks=[Recorder(stop_at=10)])
    assert equal_heads(tmp_path / "out", tmp_path / "plain")

    # Resumed with more patience, it continues its count and keeps its best: one more evaluation, and the same result.
    longer = fine_tune(recipe.changed({"early_stopping_patience": 3}), tmp_path / "out", resume=True)
    assert (longer.step, longer.best_step, longer.evaluation.loss) == (16, 10, 3.9)
    assert equal_heads(tmp_path / "out", tmp_path / "plain")
    # Resumed again, nothing is left to do.
    before = losses(tmp_path / "out")
    again = fine_tune(recipe.changed({"early_stopping_patience": 3}), tmp_path / "out", resume=True)
    assert again == longer and losses(tmp_path / "out") == before


class Cut(Callback):
    """Ends the run after the step `step`."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, event: Event) -> None:
        if event.step == self.step + 1:
            raise CheckpointError("cut")


@pytest.mark.usefixtures("scripted")
def test_a_run_that_is_cut_has_the_same_best(base: Path, data: Path, tmp_path: Path) -> None:
    """Cut after a step with an evaluation, with a checkpoint, with the best of both, and with neither."""
    recipe = recipe_of(base, data, steps=20, evaluate_every=2, early_stopping_patience=2, load_best_model_at_end=True)
    whole = fine_tune(recipe, tmp_path / "whole")

    for step in (4, 9, 10, 13):
        out = tmp_path / f"cut-{step}"
        with pytest.raises(CheckpointError, match="cut"):
            fine_tune(recipe, out, callbacks=[Cut(step)])
        assert fine_tune(recipe, out, resume=True) == whole, step
        assert losses(out) == losses(tmp_path / "whole"), step
        found, wanted = (lines(each, "validation_loss") for each in (out, tmp_path / "whole"))
        assert found == wanted and equal_heads(out, tmp_path / "whole"), step


def test_an_evaluation_whose_loss_was_not_a_number_is_repeated(base: Path, data: Path, tmp_path: Path) -> None:
    """metrics.jsonl has no NaN: a run that resumes at that step evaluates again, and does not compare other metrics."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    recipe = recipe_of(base, data, steps=8, evaluate_every=2, checkpoint_every=2, early_stopping_patience=9)
    fine_tune(recipe, whole)
    with pytest.raises(CheckpointError, match="cut"):
        fine_tune(recipe, out, callbacks=[Cut(4)])
    path, left = out / "metrics.jsonl", []
    for line in map(json.loads, path.read_text().splitlines()):
        left.append({name: value for name, value in line.items() if (line["step"], name) != (4, "validation_loss")})
    path.write_text("".join(json.dumps(line) + "\n" for line in left))
    assert fine_tune(recipe, out, resume=True).step == 8
    assert lines(out, "validation_loss") == lines(whole, "validation_loss")


@pytest.mark.usefixtures("scripted")
def test_settings_added_on_resuming_begin_there(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not know the evaluations before, of which one was lower, and say so; also when the run resumes again."""
    recipe = recipe_of(base, data, steps=4, evaluate_every=2, checkpoint_every=4)
    monkeypatch.setattr(sys.modules[__name__], "SCRIPT", [1.0, *SCRIPT[1:]])  # the lowest: step 2, without a checkpoint
    fine_tune(recipe, tmp_path / "out")
    output = Output()
    recipe = recipe.changed({"steps": 8, "load_best_model_at_end": True, "early_stopping_patience": 5})
    best = fine_tune(recipe, tmp_path / "out", resume=True, console=output.console).best_step
    said = "the result is the model of step 8, which has the lowest validation loss of the evaluations since step 4"
    assert best == 8 and said in output.said
    for name in ("EarlyStopping", "BestCheckpoint"):
        assert any(f"no state of ligermodels.training.early_stopping.{name}, which begins at step 4" in line
                   for line in output.said)  # fmt: skip
    again = Output()
    fine_tune(recipe, tmp_path / "out", resume=True, console=again.console)
    assert said in again.said and not any("no state of" in line for line in again.said)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"early_stopping_patience": 2, "evaluate_every": None}, "early_stopping_patience: compares evaluations; give"),
        (
            {"load_best_model_at_end": True, "validation_fraction": 0.0, "evaluate_every": None},
            "load_best_model_at_end",
        ),
        ({"early_stopping_threshold": 0.1}, "early_stopping_threshold: is for early stopping"),
        ({"early_stopping_patience": 0}, "early_stopping_patience: must be greater than or equal to 1"),
    ],
)
def test_settings_without_effect(base: Path, data: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        recipe_of(base, data, **change)


@pytest.mark.parametrize(
    ("name", "words"), [("on_evaluation", "did you mean 'on_evaluate'?"), ("on_log", "runs call on_")]
)
def test_a_method_that_no_run_calls_is_a_warning(name: str, words: str) -> None:
    with pytest.warns(UserWarning, match=f"Mine.{name}: is never called") as warned:
        mine = type("Mine", (Callback,), {name: lambda self, event: None, "on_step": lambda self, event: None})
    assert len(warned) == 1 and words in str(warned[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        type("More", (mine,), {"once": None})  # its methods were named where they are defined
