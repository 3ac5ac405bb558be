"""Recipes: what is shipped, what is refused and how it is named, and flags that win over them."""

import math
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from ligermodels.cli import app
from ligermodels.errors import ConfigError
from ligermodels.training import Recipe, read_recipe
from ligermodels.training import run as runs
from ligermodels.training.recipe import recipe_text, shipped_recipes


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["medusa", *map(str, arguments)])


@pytest.mark.parametrize("name", ["gemma-2", "llama-3", "mistral", "qwen2.5"])
def test_shipped_recipes_are_whole(name: str) -> None:
    recipe = read_recipe(name)
    assert name in shipped_recipes() and recipe.base and recipe.length * recipe.micro_batch_rows <= recipe.batch_tokens
    # What the authors of Medusa published: 5 heads of one layer, 5e-4 after 40 steps, rows of 4096, two epochs.
    assert (recipe.stage, recipe.heads, recipe.layers, recipe.learning_rate, recipe.decay) == (1, 5, 1, 5e-4, 0.8)
    assert (recipe.warmup, recipe.final_lr, recipe.length, recipe.epochs, recipe.dtype) == (40, 0, 4096, 2, "bfloat16")
    printed = cli("recipe", name)
    assert printed.stdout == recipe_text(name) and yaml.safe_load(printed.stdout)["base"] == recipe.base
    assert name in cli("recipe").stdout.split()


def test_recipes_are_in_the_wheel() -> None:
    configured = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert '"ligermodels.training" = ["recipes/*.yaml"]' in configured and "pyyaml" in configured


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "learning_rate: 1e-3  # text, to YAML\nstage: 2\nlambda0: 1\ndata: [a.jsonl, b.txt]\nsteps: null\nseed: -4\n"
    )
    recipe = read_recipe(path)
    assert (recipe.learning_rate, recipe.data, recipe.steps, recipe.seed) == (1e-3, ("a.jsonl", "b.txt"), None, -4)
    assert isinstance(recipe.lambda0, float) and recipe.heads == Recipe().heads
    path.write_text(yaml.safe_dump(recipe.settings()))
    assert read_recipe(path) == recipe
    path.write_text("date: 2025-01-31  # a date, to YAML\n")
    assert read_recipe(path).date == "2025-01-31"
    path.write_text("")
    assert read_recipe(path) == Recipe()


WRONG = {
    "head: 3": "there is no setting 'head'; the nearest is 'heads'",
    "lr: 3": "there is no setting 'lr'; the nearest is",
    "learning-rate: 3": "no setting 'learning-rate'; the nearest is 'learning_rate'",
    "5: 3": "there is no setting 5",
    "heads: 3\nheads: 4": "key 'heads' stands twice",
    "heads: 2.5": "heads: must be a whole number, got 2.5",
    "heads: true": "heads: must be a whole number, got True",
    "heads: null": "heads: must be a whole number, got None",
    "heads: 0": "heads: must be at least 1, got 0",
    "held_out: 1.5": "held_out: must be from 0 to 1, got 1.5",
    "learning_rate: fast": "learning_rate: must be a number, got 'fast'",
    "learning_rate: .nan": "learning_rate: must be a number, got nan",
    "lm_head: mine": "lm_head: must be own or shared, got 'mine'",
    "dtype: int8": "dtype: must be bfloat16 or float32 or float64 or null, got 'int8'",
    "dtype: float16": "dtype: must be bfloat16 or float32 or",
    "data: [1]": "data: must be a list of texts",
    "stage: 3": "stage: must be from 1 to 2, got 3",
    "stage: 2\ndistill: 1": "distill: must be true or false, got 1",
    "distill: true": "distill: is for stage 2",
    "batch_tokens: 5000": "batch_tokens \\(5000\\) must be a multiple of micro_batch_tokens \\(5000\\), and that",
    "batch_tokens: 8192\nmicro_batch_tokens: 6144": "a multiple of micro_batch_tokens \\(6144\\)",
    "epochs: 0": "epochs: must be above 0",
    "grad_clip: 0": "grad_clip: must be above 0, got 0",
    "beta1: 1.0": "beta1: must be at least 0 and below 1, got 1.0",
    "beta2: -0.1": "beta2: must be at least 0 and below 1, got -0.1",
    "weight_decay: -1": "weight_decay: must be at least 0, got -1",
    "length: 6": "length: rows of 6 tokens have no target for the last of 5 heads; it must be at least 7",
    "lambda0: 0.5": "lambda0: is for stage 2; .*leave it out",
    "lambda0_schedule: sine": "lambda0_schedule: is for stage 2",
    "head_lr_multiplier: 1": "head_lr_multiplier: is for stage 2",
    "drift: true": "drift: is for stage 2",
    "stage: 2\ndrift: true\nheld_out: 0": "drift: is of what is held out",
    "stage: 2\nreference: host": "reference: is for distill and drift",
    "optimizer: adafactor\nbeta1: 0.8": "beta1: is AdamW's",
    "optimizer: adafactor\nbeta2: 0.99": "beta2: is AdamW's",
    "optimizer: adafactor\nrounding: nearest": "rounding: is AdamW's",
    "held_out: 0\nevaluate_every: 5": "evaluate_every: is of what is held out, and held_out is 0; leave it out",
    "held_out: 0\nheld_out_tokens: 5": "held_out_tokens: is of what is held out",
    "steps: 5\nepochs: 2": "epochs: means nothing beside steps",
    "checkpoint_every: null\nkeep_checkpoints: 3": "keep_checkpoints: means nothing where checkpoint_every is null",
    **{f"date: {text}": "date: must be YYYY-MM-DD" for text in ("2025-W03", "2025-1-31", "2025-02-30")},
    "date: 2025-01-31 12:00:00": "date: must be YYYY-MM-DD, got '2025-01-31 12:00:00'",
    "- heads": "must hold 'key: value' lines",
    "heads: [": "not YAML",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"mine\.yaml: .*{WRONG[text]}"):
        read_recipe(path)


def test_what_loses_its_meaning_is_as_by_default_again() -> None:
    """A flag wins over the recipe, with all that follows from it; what is given beside it must still have a meaning."""
    recipe = Recipe().changed({"stage": 2, "drift": True, "reference": "host", "epochs": 2, "evaluate_every": 5})
    assert recipe.changed({"steps": 3}).epochs == 1 and recipe.changed({"seed": 1}).epochs == 2
    assert [recipe.changed({"steps": 3}).changed({"epochs": n}).settings()["steps"] for n in (1, 2)] == [None, None]
    first = recipe.changed({"stage": 1})
    assert (first.drift, first.reference, first.evaluate_every) == (False, "device", 5)
    assert recipe.changed({"held_out": "0"}).evaluate_every is None
    with pytest.raises(ConfigError, match="the command line: drift: is for stage 2"):
        recipe.changed({"stage": 1, "drift": True}, "the command line")
    shipped = read_recipe("llama-3")
    assert shipped.changed({"optimizer": "adafactor"}).beta2 == Recipe().beta2 != shipped.beta2


def test_no_recipe_is_an_error(tmp_path: Path) -> None:
    for name in ("llama", tmp_path, tmp_path / "none.yaml"):
        with pytest.raises(ConfigError, match="llama-3, mistral"):
            read_recipe(name)
    (tmp_path / "latin.yaml").write_bytes(b"\xe9")
    with pytest.raises(ConfigError, match=r"latin\.yaml"):
        read_recipe(tmp_path / "latin.yaml")


def test_batches_and_the_way_of_lambda0() -> None:
    recipe = Recipe(length=8, batch_tokens=96, micro_batch_tokens=24)
    assert (recipe.micro_batch_rows, recipe.accumulate) == (3, 4)
    assert (Recipe(length=8, batch_tokens=96).micro_batch_rows, Recipe(length=8, batch_tokens=96).accumulate) == (12, 1)
    ways = {"constant": [0.5, 0.5], "linear": [0.125, 0.5], "sine": [0.5 * math.sin(math.pi / 8), 0.5]}
    for way, wanted in ways.items():
        found = Recipe(stage=2, lambda0=0.5, lambda0_schedule=way)
        assert [found.lambda0_at(step, 20) for step in (5, 20)] == pytest.approx(wanted)


def test_flags_win_over_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Recipe, object]] = []

    def train_heads(recipe: Recipe, out: object, **options: object) -> runs.Outcome:
        seen.append((recipe, out))
        return runs.Outcome(1, 1)

    monkeypatch.setattr(runs, "train_heads", train_heads)
    (tmp_path / "mine.yaml").write_text(
        "base: somewhere\ndata: x\nheads: 3\nlayers: 2\nlm_head: shared\ngrad_clip: null\nstage: 2\ndistill: true\n"
    )
    given = ["--recipe", tmp_path / "mine.yaml", "--out", tmp_path / "out", "--heads", 4, "--lr", 0.25]
    assert cli("train", *given, "--data", "a", "--data", "b", "--lambda0-schedule", "sine").exit_code == 0
    recipe, out = seen[0]
    assert (recipe.base, recipe.heads, recipe.layers, recipe.lm_head, recipe.grad_clip) == (
        "somewhere",
        4,
        2,
        "shared",
        None,
    )
    assert (recipe.learning_rate, recipe.data, recipe.lambda0_schedule) == (0.25, ("a", "b"), "sine")
    assert out == tmp_path / "out"
    assert cli("train", "elsewhere", *given, "--no-distill").exit_code == 0 and seen[1][0].base == "elsewhere"
    assert seen[1][0].data == ("x",) and recipe.distill and not seen[1][0].distill

    # Every setting has a flag; a wrong one is refused before anything is done.
    shown = cli("train", "--help").stdout
    assert all(f"--{each.name.replace('_', '-')}" in shown for each in fields(Recipe) if each.name != "base")
    for arguments, words, code in (
        (["--recipe", "llama-3", "--out", "y"], "--data", 2),
        (["--data", "x", "--out", "y"], "BASE", 2),
        (["z", "--data", "x"], "--out", 2),
        (["z", "--data", "x", "--out", "y", "--held-out", 2], "held-out", 2),
        (["z", "--data", "x", "--out", "y", "--optimizer", "sgd"], "adafactor", 2),
        (["z", "--data", "x", "--out", "y", "--length", 1000], "a multiple of", 1),
        (["z", "--data", "x", "--out", "y", "--recipe", "llama-4"], "llama-3", 1),
    ):
        result = cli("train", *arguments)
        assert result.exit_code == code and words in result.stderr, result.output
    assert len(seen) == 2


def test_recipes_are_read_without_torch() -> None:
    code = "import sys; from ligermodels.training import read_recipe; read_recipe('llama-3')"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)
