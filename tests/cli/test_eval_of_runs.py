"""`eval --validation-of`: the validation split of runs, however they read their data."""

import json
from pathlib import Path
from typing import Any

import pytest
from runs import recipe_for
from typer.testing import CliRunner

from ligermodels.cli import app
from ligermodels.training import train_heads

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("changes", [{"streaming": True}, {"data_weights": (1.0, 2.0)}], ids=str)
def test_the_split_is_that_of_the_run(changes: dict[str, Any], base: Path, data: Path, tmp_path: Path) -> None:
    recipe = recipe_for(base, data, steps=1, seq_len=32)
    if "data_weights" in changes:
        second = tmp_path / "second.jsonl"
        second.write_text("".join(data.read_text().splitlines(keepends=True)[:30]))
        changes = {**changes, "data": (str(data), str(second))}
    scores = train_heads(recipe.changed(changes), tmp_path / "out").evaluation.scores
    command = ["medusa", "eval", base, tmp_path / "out", "--validation-of", tmp_path / "out", "--device", "cpu"]
    found = CliRunner().invoke(app, [*map(str, command), "--prompts", "0", "--json"])
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout)["targets"] == scores.counts.tolist()
