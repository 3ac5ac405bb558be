"""Runs of LoRA that train modules whole (`lora_modules_to_save`): the adapter, also merged; checkpoints; resumed."""

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import save_template, tokenizer_of
from runs import losses
from safetensors.torch import load_file
from test_fine_tuning import recipe_for
from typer.testing import CliRunner
from zoo import CONFIGS, make_checkpoint

import ligermodels as lm
from ligermodels.cli import app
from ligermodels.errors import ConfigError, InputError
from ligermodels.training import fine_tune
from ligermodels.training import step as taken

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.arange(3, 60)[None]
EMBEDDING, HEAD = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return path


def base(tmp_path: Path, *, tied: bool) -> Path:
    folder = tmp_path / "base"
    size = tokenizer_of("qwen2.5", folder).backend.get_vocab_size()
    config = {**CONFIGS["qwen2"], "vocab_size": size, "num_hidden_layers": 1, "tie_word_embeddings": tied}
    make_checkpoint(folder, config)
    save_template("qwen2.5", folder)
    return folder


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("tied", [True, False])
def test_a_run(tied: bool, text: Path, tmp_path: Path) -> None:
    folder = base(tmp_path, tied=tied)
    settings = {"lora_rank": 2, "lora_targets": ["q_proj"], "lora_modules_to_save": ["embed_tokens", "norm"]}
    recipe = recipe_for(folder, text, steps=6, checkpoint_every=3, learning_rate=2e-2, **settings)
    fine_tune(recipe, tmp_path / "run")
    found = [loss for _, loss, _ in losses(tmp_path / "run")]
    assert found[-1] < found[0]
    stored = load_file(tmp_path / "run" / "adapter_model.safetensors")
    original = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert not torch.equal(stored[EMBEDDING], original) and (HEAD in stored) == tied
    assert not tied or torch.equal(stored[HEAD], stored[EMBEDDING])
    config = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert set(config["modules_to_save"]) >= {"model.embed_tokens", "model.norm"}
    assert config.get("ensure_weight_tying", False) == tied

    # Its checkpoint as an adapter, and the adapter written again.
    for source, out in (("run", "first"), ("first", "again")):
        run("lora", "to-hf", tmp_path / source, tmp_path / out)
        tensors = load_file(tmp_path / out / "adapter_model.safetensors")
        assert tensors.keys() == stored.keys() and all(torch.equal(tensors[name], stored[name]) for name in stored)
    model = lm.load_adapter(lm.from_pretrained(folder), tmp_path / "again").eval()
    run("lora", "merge", folder, tmp_path / "run", tmp_path / "merged")
    merged = lm.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    assert merged.config.head.tied == tied
    assert "embed_tokens" in run("info", tmp_path / "run", "--json")


def test_the_bias_of_a_trained_router_is_in_the_adapter(text: Path, tmp_path: Path) -> None:
    """It is a buffer, not trained; PEFT opens no adapter without it."""
    folder = tmp_path / "base"
    size = tokenizer_of("qwen2.5", folder).backend.get_vocab_size()
    make_checkpoint(folder, {**CONFIGS["deepseek_v3"], "vocab_size": size, "num_hidden_layers": 2})
    settings = {"lora_rank": 2, "lora_targets": ["o_proj"], "lora_modules_to_save": ["gate"]}
    fine_tune(recipe_for(folder, text, steps=1, **settings), tmp_path / "run")
    run("lora", "to-hf", tmp_path / "run", tmp_path / "again")
    found, again = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("run", "again"))
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(found[f"base_model.model.{bias}"], load_file(folder / "model.safetensors")[bias])
    assert again.keys() == found.keys() and all(torch.equal(again[name], found[name]) for name in found)


def test_a_stopped_run_goes_on_with_the_same_bits(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = base(tmp_path, tied=True)
    recipe = recipe_for(folder, text, steps=6, checkpoint_every=100, lora_rank=2, lora_modules_to_save=["embed_tokens"])
    fine_tune(recipe, tmp_path / "whole")
    moved, calls = taken.on_device, itertools.count()

    def stop(*arguments: Any) -> Any:
        if next(calls) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return moved(*arguments)

    with monkeypatch.context() as broken:
        broken.setattr(taken, "on_device", stop)
        assert fine_tune(recipe, tmp_path / "run").stopped
    assert 0 < len(losses(tmp_path / "run")) < 6
    assert fine_tune(recipe, tmp_path / "run", resume=True).finished
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    found, wanted = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("run", "whole"))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_setting_that_does_not_fit_is_named(text: Path, tmp_path: Path) -> None:
    folder = base(tmp_path, tied=True)
    with pytest.raises(ConfigError, match="lora_modules_to_save: is for LoRA"):
        fine_tune(recipe_for(folder, text, lora_modules_to_save=["embed_tokens"]), tmp_path / "run")
    with pytest.raises(InputError, match=r"lora_modules_to_save: 'wte' matches no module; there are .*embed_tokens"):
        fine_tune(recipe_for(folder, text, lora_rank=2, lora_modules_to_save=["wte"]), tmp_path / "run")
    name = "lora_trainable_token_indices"
    with pytest.raises(ConfigError, match=f"{name}: is for LoRA"):
        fine_tune(recipe_for(folder, text, **{name: [3]}), tmp_path / "run")
    with pytest.raises(InputError, match=rf"{name}: must lie in \[0, "):
        fine_tune(recipe_for(folder, text, lora_rank=2, **{name: [3, 100_000]}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_that_trains_rows(tied: bool, text: Path, tmp_path: Path) -> None:
    """By the command, with a quantised base; its checkpoint goes on, and is an adapter."""
    folder = base(tmp_path, tied=tied)
    common = ["--data", text, "--lora-rank", 2, "--lora-targets", "q_proj", "--device", "cpu", "--dtype", "float32"]
    common += ["--lora-trainable-token-indices", 70, "--lora-trainable-token-indices", 5, "--validation-fraction", 0]
    common += ["--seq-len", 32, "--batch-tokens", 64, "--checkpoint-every", 2, "--lr", 0.02]
    run("train", folder, "--out", tmp_path / "run", "--steps", 2, *common)
    run("train", folder, "--out", tmp_path / "run", "--steps", 4, *common, "--resume")
    run("lora", "to-hf", tmp_path / "run", tmp_path / "again")
    stored, again = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("run", "again"))
    assert again.keys() == stored.keys() and all(torch.equal(again[name], stored[name]) for name in stored)
    rows = {name: tensor for name, tensor in stored.items() if "lora" not in name}
    assert len(rows) == (1 if tied else 2) and {len(tensor) for tensor in rows.values()} == {2}
    original = load_file(folder / "model.safetensors")["model.embed_tokens.weight"][[70, 5]]
    assert not torch.equal(rows["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"], original)
    run("lora", "merge", folder, tmp_path / "run", tmp_path / "merged")
    model = lm.load_adapter(lm.from_pretrained(folder), tmp_path / "run").eval()
    merged = lm.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    assert "70" in run("info", tmp_path / "run", "--json")
