"""Recipes: what is shipped, what is refused and how it is named, and flags that win over them."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from ligermodels.cli import app
from ligermodels.errors import ConfigError
from ligermodels.parallel import ParallelPlan
from ligermodels.training import FineTuningRecipe, MedusaRecipe, Outcome, medusa, read_recipe
from ligermodels.training.recipe_file import recipe_text, shipped_recipes
from ligermodels.training.renamed import EVAL_FLAGS, SETTINGS, TRAIN_FLAGS


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["medusa", *map(str, arguments)])


@pytest.mark.parametrize("name", ["gemma-2", "llama-3", "mistral", "qwen2.5"])
def test_shipped_recipes_are_whole(name: str) -> None:
    recipe = read_recipe(name)
    assert name in shipped_recipes() and recipe.base and recipe.seq_len * recipe.micro_batch_size <= recipe.batch_tokens
    # What the authors of Medusa published: 5 heads of one layer, 5e-4 after 40 steps, 4096 tokens, two epochs.
    assert (recipe.stage, recipe.num_heads, recipe.num_layers) == (1, 5, 1)
    assert (recipe.learning_rate, recipe.decay, recipe.dtype) == (5e-4, 0.8, "bfloat16")
    assert (recipe.warmup_steps, recipe.min_lr_ratio, recipe.seq_len, recipe.epochs) == (40, 0, 4096, 2)
    printed = cli("recipe", name)
    assert printed.stdout == recipe_text(name) and yaml.safe_load(printed.stdout)["base"] == recipe.base
    assert name in cli("recipe").stdout.split()


def test_recipes_are_in_the_wheel() -> None:
    configured = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"ligermodels.training" = ["recipes/*/*.yaml"]' in configured and "pyyaml" in configured


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "learning_rate: 1e-3  # text, to YAML 1.1\nstage: 2\nheads_loss_weight: 1\n"
        "data: [a.jsonl, b.txt]\nsteps: null\nseed: -4\n"
    )
    recipe = read_recipe(path)
    assert (recipe.learning_rate, recipe.data, recipe.steps, recipe.seed) == (1e-3, ("a.jsonl", "b.txt"), None, -4)
    assert isinstance(recipe.heads_loss_weight, float) and recipe.num_heads == MedusaRecipe().num_heads
    path.write_text(yaml.safe_dump(recipe.settings()))
    assert read_recipe(path) == recipe
    path.write_text("date: 2025-01-31  # a date, to YAML\n")
    assert read_recipe(path).date == "2025-01-31"
    for mode in ("on", "off", "auto"):  # on and off are bool, to YAML 1.1
        path.write_text(f"cuda_graph: {mode}\n")
        assert read_recipe(path).cuda_graph == mode
        path.write_text(yaml.safe_dump(read_recipe(path).settings()))
        assert read_recipe(path).cuda_graph == mode
    path.write_text("")
    assert read_recipe(path) == MedusaRecipe()


WRONG = {
    "num_head: 3": "there is no setting 'num_head'; the nearest is 'num_heads'",
    "lr: 3": "there is no setting 'lr'; the nearest is 'learning_rate'",
    "bf16: 3": "there is no setting 'bf16'; the --help of the train command lists all",
    "learning-rate: 3": "no setting 'learning-rate'; the nearest is 'learning_rate'",
    "5: 3": "there is no setting 5",
    "parallel: {tensr: 2}": "parallel.tensr: there is no such setting; did you mean 'tensor'",
    "num_heads: 3\nnum_heads: 4": "key 'num_heads' is repeated",
    "num_heads: 2.5": "num_heads: must be a valid integer, got 2.5",
    "num_heads: true": "num_heads: must be a valid integer, got True",
    "num_heads: null": "num_heads: must be a valid integer, got None",
    "num_heads: 0": "num_heads: must be greater than or equal to 1, got 0",
    "validation_fraction: 1.0": "validation_fraction: must be less than 1, got 1.0",
    "validation_fraction: x": "validation_fraction: must be a valid number, got 'x'",
    "learning_rate: fast": "learning_rate: must be a valid number, got 'fast'",
    "learning_rate: true": "learning_rate: must be a valid number, got True",
    "learning_rate: .nan": "learning_rate: must be a finite number, got nan",
    "lm_head: mine": "lm_head: must be 'own' or 'shared', got 'mine'",
    "dtype: int8": "dtype: must be 'bfloat16', 'float32' or 'float64', got 'int8'",
    "dtype: float16": "dtype: must be 'bfloat16', 'float32' or",
    "callback: null": "callback: must be a list, got None",
    "data: [1]": "data.0: must be a valid string, got 1",
    "stage: 3": "stage: must be less than or equal to 2, got 3",
    "stage: 2\ndistill: 1": "distill: must be true or false, got 1",
    "distill: true": "distill: is for stage 2",
    "batch_tokens: 5000": "batch_tokens \\(5000\\) must be a multiple of seq_len",
    "batch_tokens: 8192\nmicro_batch_tokens: 6144": "a multiple of micro_batch_tokens \\(6144\\)",
    "epochs: 0": "epochs: must be greater than 0",
    "max_grad_norm: 0": "max_grad_norm: must be greater than 0, got 0",
    "beta1: 1.0": "beta1: must be less than 1, got 1.0",
    "beta2: -0.1": "beta2: must be greater than or equal to 0, got -0.1",
    "weight_decay: -1": "weight_decay: must be greater than or equal to 0, got -1",
    "seq_len: 6": "seq_len: sequences of 6 tokens have no target for the last of 5 heads; it must be at least 7",
    "heads_loss_weight: 0.5": "heads_loss_weight: is for stage 2; .*leave it out",
    "heads_loss_weight_schedule: sine": "heads_loss_weight_schedule: is for stage 2",
    "head_lr_multiplier: 1.0": "head_lr_multiplier: is for stage 2",
    "kl_to_reference: true": "kl_to_reference: is for stage 2",
    "activation_checkpointing: full": "activation_checkpointing: is for stage 2",
    "stage: 2\nkl_to_reference: true\nvalidation_fraction: 0": "kl_to_reference: needs a validation split",
    "stage: 2\nreference: cpu_offload": "reference: is for distill and kl_to_reference",
    "optimizer: adafactor\nbeta1: 0.8": "beta1: is a setting of AdamW",
    "optimizer: adafactor\nbeta2: 0.99": "beta2: is a setting of AdamW",
    "optimizer: adafactor\nrounding: nearest": "rounding: is a setting of AdamW",
    "validation_fraction: 0\nevaluate_every: 5": "evaluate_every: needs a validation split, .* otherwise leave it out",
    "validation_fraction: 0\nvalidation_tokens: 5": "validation_tokens: needs a validation split",
    "steps: 5\nepochs: 2": "epochs: has no effect beside steps",
    "checkpoint_every: null\nkeep_checkpoints: 3": "keep_checkpoints: has no effect where checkpoint_every is null",
    **{f"date: {text}": "date: must be YYYY-MM-DD" for text in ("2025-W03", "2025-1-31", "2025-02-30")},
    "date: 2025-01-31 12:00:00": "date: must be YYYY-MM-DD, got '2025-01-31 12:00:00'",
    "heads: 3\nnum_heads: 4": "'heads' is the old name of 'num_heads'; give one of the two",
    "heads: 0": "num_heads: must be greater than or equal to 1, got 0",
    "- num_heads": "must hold 'key: value' lines",
    "num_heads: [": "not YAML",
    "? [1, 2]\n: 3": "not YAML",
    f"steps: {'9' * 5000}": "not YAML",
}


@pytest.mark.filterwarnings("ignore:.*heads is now num_heads:DeprecationWarning")
@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"mine\.yaml: .*{WRONG[text]}"):
        read_recipe(path)


def test_names_of_settings_in_python() -> None:
    """As in a file; the message was "Extra inputs are not permitted"."""
    with pytest.raises(ConfigError, match="MedusaRecipe: there is no setting 'num_head'; the nearest is 'num_heads'"):
        MedusaRecipe(base="base", num_head=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="tensr: there is no such setting; did you mean 'tensor'"):
        ParallelPlan(tensr=2)  # type: ignore[call-arg]


def test_what_loses_its_meaning_is_as_by_default_again() -> None:
    """A flag resets what loses its meaning in the recipe; what is given beside it must have a meaning."""
    recipe = MedusaRecipe().changed({"stage": 2, "kl_to_reference": True, "reference": "cpu_offload", "epochs": 2})
    recipe = recipe.changed({"evaluate_every": 5})
    assert recipe.changed({"steps": 3}).epochs == 1 and recipe.changed({"seed": 1}).epochs == 2
    assert [recipe.changed({"steps": 3}).changed({"epochs": n}).settings()["steps"] for n in (1, 2)] == [None, None]
    first = recipe.changed({"stage": 1})
    assert (first.kl_to_reference, first.reference, first.evaluate_every) == (False, "device", 5)
    assert recipe.changed({"validation_fraction": 0}).evaluate_every is None
    with pytest.raises(ConfigError, match="the command line: kl_to_reference: is for stage 2"):
        recipe.changed({"stage": 1, "kl_to_reference": True}, "the command line")
    shipped = read_recipe("llama-3")
    assert shipped.changed({"optimizer": "adafactor"}).beta2 == MedusaRecipe().beta2 != shipped.beta2


def test_no_recipe_is_an_error(tmp_path: Path) -> None:
    for name in ("llama", tmp_path, tmp_path / "none.yaml"):
        with pytest.raises(ConfigError, match="llama-3, mistral"):
            read_recipe(name)
    (tmp_path / "latin.yaml").write_bytes(b"\xe9")
    with pytest.raises(ConfigError, match=r"latin\.yaml"):
        read_recipe(tmp_path / "latin.yaml")


def test_batch_sizes_and_the_schedule_of_the_heads_loss_weight() -> None:
    recipe = MedusaRecipe(seq_len=8, batch_tokens=96, micro_batch_tokens=24)
    assert (recipe.micro_batch_size, recipe.accumulation_steps) == (3, 4)
    recipe = MedusaRecipe(seq_len=8, batch_tokens=96)
    assert (recipe.micro_batch_size, recipe.accumulation_steps) == (12, 1)
    schedules = {"constant": [0.5, 0.5], "linear": [0.125, 0.5], "sine": [0.5 * math.sin(math.pi / 8), 0.5]}
    for schedule, wanted in schedules.items():
        found = MedusaRecipe(stage=2, heads_loss_weight=0.5, heads_loss_weight_schedule=schedule)
        assert [found.heads_loss_weight_at(step, 20) for step in (5, 20)] == pytest.approx(wanted)


def test_flags_win_over_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[MedusaRecipe, object]] = []

    def train_heads(recipe: MedusaRecipe, out: object, **options: object) -> Outcome:
        seen.append((recipe, out))
        return Outcome(1, 1)

    monkeypatch.setattr(medusa, "train_heads", train_heads)
    (tmp_path / "mine.yaml").write_text(
        "base: somewhere\ndata: x\nnum_heads: 3\nnum_layers: 2\nlm_head: shared\n"
        "max_grad_norm: null\nstage: 2\ndistill: true\nparallel: {replicate: 2, reduce_dtype: float32}\n"
    )
    given = ["--recipe", tmp_path / "mine.yaml", "--out", tmp_path / "out", "--num-heads", 4, "--lr", 0.25]
    assert cli("train", *given, "--data", "a", "--data", "b", "--heads-loss-weight-schedule", "sine").exit_code == 0
    recipe, out = seen[0]
    assert (recipe.base, recipe.num_heads, recipe.num_layers, recipe.lm_head, recipe.max_grad_norm) == (
        "somewhere",
        4,
        2,
        "shared",
        None,
    )
    assert (recipe.learning_rate, recipe.data, recipe.heads_loss_weight_schedule) == (0.25, ("a", "b"), "sine")
    assert out == tmp_path / "out"
    assert recipe.parallel == ParallelPlan(replicate=2, reduce_dtype="float32")
    more = ["--no-distill", "--set", "num_heads=6", "--shard", 4, "--set", "parallel={reduce_dtype: null}"]
    assert cli("train", "elsewhere", *given, *more).exit_code == 0 and seen[1][0].base == "elsewhere"
    assert seen[1][0].num_heads == 6 and seen[1][0].data == ("x",) and recipe.distill and not seen[1][0].distill
    assert seen[1][0].parallel == ParallelPlan(replicate=2, shard=4)

    # Every setting has a flag; a wrong one is refused before anything is done.
    shown = cli("train", "--help").stdout
    names = MedusaRecipe.model_fields.keys() | ParallelPlan.model_fields.keys()
    assert all(f"--{name.replace('_', '-')}" in shown for name in names - {"base", "parallel"})
    for arguments, words, code in (
        (["--recipe", "llama-3", "--out", "y"], "--data", 2),
        (["--data", "x", "--out", "y"], "BASE", 2),
        (["z", "--data", "x"], "--out", 2),
        (["z", "--data", "x", "--out", "y", "--validation-fraction", 2], "validation-fraction", 2),
        (["z", "--data", "x", "--out", "y", "--optimizer", "sgd"], "adafactor", 2),
        (["z", "--data", "x", "--out", "y", "--seq-len", 1000], "a multiple of", 1),
        (["z", "--data", "x", "--out", "y", "--shard", 0], "shard: must be at least 1, or -1", 1),
        (["z", "--data", "x", "--out", "y", "--set", "parallel={shrad: 2}"], "parallel.shrad: ", 1),
        (["z", "--data", "x", "--out", "y", "--recipe", "llama-4"], "llama-3", 1),
    ):
        result = cli("train", *arguments)
        assert result.exit_code == code and words in result.stderr, result.output
    assert len(seen) == 2


def test_old_names_work_and_warn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"heads": 3, "layers": 2, "length": 256, "held_out": 0.25, "held_out_tokens": 512, "lambda0": 0.5}
    values |= {"lambda0_schedule": "sine", "drift": True, "warmup": 7, "final_lr": 0.5, "grad_clip": 2.0}
    assert values.keys() == SETTINGS.keys()
    beside = {"stage": 2, "base": "somewhere", "data": "x"}
    wanted = MedusaRecipe().changed({**beside, **{SETTINGS[old]: value for old, value in values.items()}})
    wanted = wanted.changed({"reference": "cpu_offload"})
    old = {**values, "reference": "host"}
    (tmp_path / "old.yaml").write_text(yaml.safe_dump({**beside, **old}))
    with pytest.warns(DeprecationWarning) as seen:
        assert read_recipe(tmp_path / "old.yaml") == wanted
    told = [str(each.message) for each in seen]
    assert f"{tmp_path}/old.yaml: heads is now num_heads; the old name works for one more release" in told
    assert any("reference: host is now cpu_offload" in line for line in told) and len(told) == len(old)

    # As flags too, as two arguments or as one, and a flag that is off.
    recipes: list[MedusaRecipe] = []
    monkeypatch.setattr(medusa, "train_heads", lambda recipe, *_, **__: recipes.append(recipe) or Outcome(1, 1))
    del old["drift"]
    for join in (True, False):
        pairs = [(f"--{name.replace('_', '-')}", value) for name, value in {**beside, **old}.items() if name != "base"]
        flags = [f"{name}={value}" for name, value in pairs] if join else [each for pair in pairs for each in pair]
        result = cli("train", "somewhere", *flags, "--drift", "--out", tmp_path / "out")
        assert result.exit_code == 0 and recipes[-1] == wanted, result.output
        warned = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
        assert len(warned) == len(TRAIN_FLAGS) and "warning: --reference host is now cpu_offload" in result.stderr
    assert "--no-kl-to-reference" in cli("train", "--no-drift").stderr
    assert "--out" in cli("generate-data", "b", "--data", "x").stderr  # only that is missing
    assert "generate-data is now self-distillation-data" in cli("generate-data", "b", "--data", "x").stderr
    for old_flag, new in EVAL_FLAGS.items():
        assert f"{old_flag} is now {new}" in cli("eval", "b", "h", old_flag, "9").stderr
    assert not [line for line in cli("train", "--help").stdout.split() if line in TRAIN_FLAGS]


def test_recipes_are_read_without_torch() -> None:
    code = "import sys; from ligermodels.training import read_recipe; read_recipe('llama-3')"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"data": ("a", "b"), "data_weights": (1.0,)},
            "data_weights: must have a weight for each value of data, 2, got 1",
        ),
        ({"data": ("a", "b"), "data_weights": (1, 2), "streaming": True, "steps": 3}, "data_weights: counts documents"),
        ({"streaming": True, "steps": 3, "token_cache": False}, "token_cache: is for data with an index"),
        ({"objective": "dpo", "streaming": True, "steps": 3}, "streaming: is for texts and chats"),
        ({"objective": "dpo", "dataset_num_proc": 2}, "dataset_num_proc: is for texts and chats"),
        ({"track": ("none", "wandb")}, "track: has none and others"),
    ],
)
def test_settings_of_two_parts_that_exclude_one_another(settings: dict[str, Any], message: str) -> None:
    """Also where the second comes later: no setting is dropped for another without a word."""
    with pytest.raises(ConfigError, match=message):
        FineTuningRecipe(**settings)
    with pytest.raises(ConfigError, match=message):
        FineTuningRecipe().changed(settings)


def test_weights_are_not_dropped_where_streaming_is_asked_for_later() -> None:
    recipe = FineTuningRecipe(data=("a", "b"), data_weights=(1, 2))
    with pytest.raises(ConfigError, match="data_weights: counts documents"):
        recipe.changed({"streaming": True, "steps": 3})


def test_a_single_value_of_a_setting_that_takes_several() -> None:
    recipe = FineTuningRecipe(track=("trackio",), project="p", data=("a.jsonl",), data_weights=(1.0,))
    assert recipe.changed({"track": "wandb"}).project == "p"
    assert recipe.changed({"data": "b.jsonl"}).data_weights == (1.0,)
    assert FineTuningRecipe(data="a.jsonl").changed({"data_weights": 0.5}).data_weights == (0.5,)
