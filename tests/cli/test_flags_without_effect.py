"""Flags that would do nothing beside others are refused; names and flags that a command writes down are complete."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from runs import make_base
from typer.testing import CliRunner

import ligermodels as lm
from ligermodels.cli import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, "base", and heads on it, each under the name of its command."""
    folder = tmp_path_factory.mktemp("flags")
    base = folder / "base"
    base.mkdir()
    make_base(base)
    model = lm.from_pretrained(base)
    lm.MedusaModel.from_base(model, num_heads=2).save_pretrained(folder / "medusa")
    lm.MTPModel.from_base(model).save_head(folder / "mtp")
    lm.Eagle3Model.from_base(model).save_pretrained(folder / "eagle")
    lm.DFlashModel.from_base(model, 4, num_layers=1).save_pretrained(folder / "dflash")
    lm.DSparkModel.from_base(model, 4, num_layers=1).save_pretrained(folder / "dspark")
    (folder / "data.jsonl").write_text('{"text": "fine thanks"}\n' * 3)
    return folder


@pytest.fixture(autouse=True)
def within(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


SCORED = "medusa eval base medusa --data data.jsonl --device cpu --prompts 0 "
REFUSED = {
    SCORED + "--compare eagle": "--compare: is for decoding, and --prompts 0",
    SCORED + "--decode-batch-size 2": "--decode-batch-size: is for decoding",
    SCORED + "--max-new-tokens 4": "--max-new-tokens: is for decoding",
    SCORED + "--prompt-tokens 4": "--prompt-tokens: is for decoding",
    SCORED + "--draft-tree 2,2,4": "--draft-tree: is for decoding",
    SCORED + "--confidence-threshold 0.5": "--confidence-threshold: is for decoding",
    "medusa export base medusa new --max-shard-size 1GB": "--max-shard-size: is for full-hf",
    "medusa export base medusa new --base-model x": "--base-model: is for formats that name the model, and vllm",
    "medusa export base medusa new --profile full-hf --base-model x": "--base-model: is for formats",
    "mtp export base mtp new --alone --max-shard-size 1GB": "--max-shard-size: is for the model's checkpoint",
    "eagle export base eagle new --profile specforge --base-model x": "--base-model: is for speculators and deepspec",
    "dflash export base dflash new --profile z-lab --base-model x": "--base-model: is for speculators,",
    "dspark export base dspark new --profile deepspec --base-model x": "--base-model: is for speculators,",
}


@pytest.mark.parametrize("command", REFUSED)
def test_a_flag_without_effect_is_refused(folder: Path, command: str) -> None:
    result = CliRunner().invoke(app, command.split())
    assert (result.exit_code, REFUSED[command] in result.stderr) == (2, True), result.stderr
    assert not (folder / "new").exists()


@pytest.mark.parametrize("stored", [False, True], ids=["typed", "of the checkpoint"])
def test_sampling_at_temperature_0_names_the_flags(folder: Path, tmp_path: Path, stored: bool) -> None:
    """In place of the arguments of Python, which have other names."""
    base = shutil.copytree(folder / "base", tmp_path / "base")
    command, typed = f"generate {base} --prompt fine --device cpu --max-new-tokens 2", "--sample --temperature 0"
    if stored:
        (base / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.0}')
        typed = ""
    result = CliRunner().invoke(app, [*command.split(), *typed.split()])
    assert result.exit_code == 2 and "--temperature: must be above 0 to sample; --greedy decodes" in result.stderr
    assert CliRunner().invoke(app, [*command.split(), "--greedy"]).exit_code == 0


@pytest.mark.parametrize("command", ["generate base --prompt fine", "chat base"])
@pytest.mark.parametrize("flags", ["--greedy", "--sample --top-p 0.9", "--sample"])
def test_flags_replace_bad_options_of_the_checkpoint(folder: Path, tmp_path: Path, command: str, flags: str) -> None:
    base = shutil.copytree(folder / "base", tmp_path / "base")
    (base / "generation_config.json").write_text('{"do_sample": true, "top_p": 1.5}')
    arguments = f"{command.replace('base', str(base))} {flags} --device cpu --max-new-tokens 2".split()
    result = CliRunner().invoke(app, arguments, input="fine\n/exit\n")
    wanted = "field 'top_p' is not usable for generation: 1.5" if flags == "--sample" else ""
    assert (result.exit_code, wanted in result.stderr) == (1 if wanted else 0, True), result.stderr


@pytest.mark.parametrize("kind", ["eagle", "dflash", "dspark", "medusa --profile tgi"])
@pytest.mark.parametrize("named", [None, "base", "some/model"])
def test_exported_heads_name_a_folder_by_its_absolute_path(tmp_path: Path, kind: str, named: str | None) -> None:
    """Servers open the heads from other folders, where "base" is another one or a hub id."""
    name, *profile = kind.split()
    given = [] if named is None else ["--base-model", named]
    result = CliRunner().invoke(app, [name, "export", "base", name, str(tmp_path / "out"), *profile, *given])
    assert result.exit_code == 0, result.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    verifier = config.get("speculators_config", {}).get("verifier", {})
    found = verifier.get("name_or_path") or config["base_model_name_or_path"]
    assert found == (named if named == "some/model" else str(Path("base").resolve()))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_command_of_a_plan_trains_in_the_dtype_of_the_plan(tmp_path: Path, stored: str | None, dtype: str) -> None:
    """`train` takes the checkpoint's dtype, or float32, by default."""
    config = json.loads(Path("base/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | ({"torch_dtype": stored} if stored else {})))
    command = f"plan {tmp_path} --gpus 1 --memory 80GB --tokens 128 --seq-len 64 --dtype {dtype}"
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.stderr
    assert (f" --dtype {dtype} " in result.stderr) == (dtype != (stored or "float32"))


def test_the_command_of_a_plan_is_one_for_a_shell(tmp_path: Path) -> None:
    """A folder with a space is one word."""
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text(Path("base/config.json").read_text())
    command = ["plan", str(folder), "--gpus", "2", "--memory", "80GB", "--tokens", "128", "--seq-len", "64"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    printed = result.stderr.split("fastest by the arithmetic: ")[1]
    assert shlex.split(printed)[:3] == ["ligermodels", "train", str(folder)]
