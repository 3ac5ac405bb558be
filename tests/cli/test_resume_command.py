"""`--resume --out FOLDER` is the whole command: model, data and settings are in the folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import equal_heads, losses, recipe_for
from typer.testing import CliRunner, Result

from ligermodels.cli import app
from ligermodels.training import (
    DFlashRecipe,
    DSparkRecipe,
    EagleRecipe,
    FineTuningRecipe,
    MedusaRecipe,
    MTPRecipe,
    TrainingRecipe,
)
from ligermodels.training.folder import RECIPE

pytestmark = pytest.mark.usefixtures("one_thread")

COMMANDS: dict[str, type[TrainingRecipe]] = {
    "train": FineTuningRecipe,
    "medusa train": MedusaRecipe,
    "mtp train": MTPRecipe,
    "eagle train": EagleRecipe,
    "dflash train": DFlashRecipe,
    "dspark train": DSparkRecipe,
}


def run(command: str, *arguments: object) -> Result:
    return CliRunner().invoke(app, [*command.split(), *map(str, arguments), "--device", "cpu"])


def ok(result: Result) -> Result:
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def recipe_file(base: Path, data: Path, tmp_path: Path) -> Any:
    def write(command: str) -> Path:
        fields = COMMANDS[command].model_fields
        settings = {name: value for name, value in recipe_for(base, data).settings().items() if name in fields}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(settings))
        return path

    return write


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_is_resumed_by_its_folder_alone(command: str, recipe_file: Any, tmp_path: Path) -> None:
    file, out = recipe_file(command), tmp_path / "out"
    ok(run(command, "--recipe", file, "--out", out, "--steps", 3, "--warmup-steps", 2, "--min-lr-ratio", 1))
    before = losses(out)
    shown = ok(run(command, "--resume", "--out", out)).output
    assert "resuming after step 3 of 3" in shown and losses(out) == before
    # What is given changes the run, or is an error that names it; the rest stays as it is in the folder.
    refused = run(command, "--resume", "--out", out, "--lr", 1e-4)
    assert refused.exit_code == 1 and "learning_rate was 0.005, is 0.0001; leave it out" in refused.stderr
    shown = ok(run(command, "--resume", "--out", out, "--steps", 4, "--keep-checkpoints", 1)).output
    assert "extended from 3 to 4 steps" in shown and len(losses(out)) == 4
    written = COMMANDS[command].read(out / RECIPE)
    changes = {"steps": 4, "warmup_steps": 2, "min_lr_ratio": 1.0, "keep_checkpoints": 1}
    assert written == COMMANDS[command].read(file).changed(changes)


def test_a_run_without_a_checkpoint_starts_over_with_its_settings(recipe_file: Any, tmp_path: Path) -> None:
    file, out, whole = recipe_file("medusa train"), tmp_path / "out", tmp_path / "whole"
    ok(run("medusa train", "--recipe", file, "--out", whole))
    out.mkdir()
    for name in (RECIPE, "content.json"):
        (out / name).write_bytes((whole / name).read_bytes())
    ok(run("medusa train", "--resume", "--out", out))
    assert losses(out) == losses(whole) and equal_heads(out, whole)


def test_a_folder_without_a_run_or_with_a_run_of_another_command_is_named(recipe_file: Any, tmp_path: Path) -> None:
    where = run("train", "--resume")
    assert where.exit_code == 2 and "--out: give the folder of the run to resume" in where.stderr
    nothing = run("train", "--resume", "--out", tmp_path / "out")
    assert nothing.exit_code == 2 and f"no run in {tmp_path / 'out'} to take it from" in nothing.stderr
    assert "MODEL" in nothing.stderr and not (tmp_path / "out").exists()
    ok(run("medusa train", "--recipe", recipe_file("medusa train"), "--out", tmp_path / "heads", "--steps", 1))
    for command in ("train", "mtp train", "eagle train"):
        other = run(command, "--resume", "--out", tmp_path / "heads")
        assert other.exit_code == 1 and "resume the run with the command that started it" in other.stderr
    assert json.loads((tmp_path / "heads/content.json").read_text())
