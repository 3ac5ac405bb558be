"""What a new user types by mistake is an error that says what is wrong, before anything else is printed."""

import shutil
from pathlib import Path

import pytest
from runs import make_base
from typer.testing import CliRunner

import ligermodels as lm
from ligermodels.cli import app
from ligermodels.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "base").mkdir()
    make_base(folder / "base")
    model = lm.from_pretrained(folder / "base")
    lm.MedusaModel.from_base(model, num_heads=2).save_pretrained(folder / "medusa")
    lm.MTPModel.from_base(model).save_head(folder / "mtp")
    lm.Eagle3Model.from_base(model).save_pretrained(folder / "eagle")
    lora = lm.from_pretrained(folder / "base")
    lm.add_lora(lora, r=2)
    lm.save_adapter(lora, folder / "adapter")
    (folder / "config").mkdir()
    shutil.copy(folder / "base" / "config.json", folder / "config")
    (folder / "unfinished").mkdir()
    for name in ("recipe.yaml", "content.json"):
        (folder / "unfinished" / name).write_text("{}")
    (folder / "texts.jsonl").write_text('{"text": "fine thanks"}\n' * 3)
    (folder / "misspelt.jsonl").write_text('{"txt": "fine"}\n' * 2)
    return folder


GENERATE = "generate base --prompt fine --device cpu --max-new-tokens 2 "
DISTILL = "train base --objective distill --data texts.jsonl --out new --device cpu "
MISTAKES = {
    "lora to-hf base new": "error: base: holds no adapter in PEFT's format (no adapter_config.json)",
    "lora from-hf base new": "error: base: holds no adapter in PEFT's format",
    "lora merge base medusa new": "error: medusa: holds no adapter in PEFT's format",
    "medusa eval base medusa --prompts 0 --validation-of no-run": "error: --validation-of no-run: holds no run",
    "export base new --heads eagle": "such as `ligermodels eagle export`",
    "data misspelt.jsonl --model base": "in any of the 2 documents (2 are unusable: see the messages about them)",
    "train config --data misspelt.jsonl --out new --lora-rank 2": "without weights (no model.safetensors), and LoRA",
    "medusa train config --data misspelt.jsonl --out new": "config: is a config without weights (no model.safetensors)",
    DISTILL + "--teacher adapter": "error: teacher: adapter/config.json: no such file; the folder holds an adapter",
    DISTILL + "--teacher medusa": "error: teacher: config.json: describes Medusa heads, without a model",
    "info unfinished": "the folder holds a run that has not written its result; `train --resume --out FOLDER`",
    "chat unfinished": "unfinished/config.json: no such file; the folder holds a run that has not written its result",
    GENERATE + "--quantize int5": "error: Invalid value for '--quantize': 'int5' is not one of",
    GENERATE + "--heads eagle --draft-tree 2,999999,3": "error: --draft-tree: has 999999 candidates per token, but",
    GENERATE + "--heads adapter": "error: adapter: holds a LoRA adapter and no draft heads; load_adapter opens it",
    GENERATE + "--heads mtp --draft-tree 2,999999,3": "error: --draft-tree: has 999999 candidates per token, but",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_said(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code in (1, 2) and MISTAKES[command] in result.stderr, result.output
    assert not result.stdout and not (folder / "new").exists()


def test_a_folder_without_an_adapter_is_said_in_python(folder: Path) -> None:
    model = lm.from_pretrained(folder / "base")
    with pytest.raises(ConfigError, match=r"adapter_config\.json: no such file; is this the folder of an adapter\?"):
        lm.load_adapter(model, folder / "base")


def test_results_are_printed_before_a_plot_that_cannot_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("ligermodels.cli.plot.require_plotting", lambda path: None)

    def full(path: Path, results: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("ligermodels.cli.plot.plot_scores", full)
    command = "medusa eval base medusa --data texts.jsonl --prompts 0 --device cpu --plot scores.png"
    for options, words in (("", "tokens per step"), (" --json", '"expected_tokens_per_step"')):
        result = CliRunner().invoke(app, (command + options).split())
        assert result.exit_code == 1 and "No space left on device: 'scores.png'" in result.stderr
        assert words in result.stdout
