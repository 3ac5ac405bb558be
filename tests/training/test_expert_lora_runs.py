"""Runs that train LoRA on the experts of a mixture: the setting, QLoRA, resuming, and the formats of the adapter."""

import warnings
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
from ligermodels.errors import AdapterWarning
from ligermodels.training import fine_tune


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    folder = tmp_path / "mixture"
    size = tokenizer_of("qwen2.5", folder).backend.get_vocab_size()
    make_checkpoint(folder, {**CONFIGS["qwen3_moe-normalised"], "vocab_size": size, "num_hidden_layers": 1})
    save_template("qwen2.5", folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return path


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_experts_of_a_run(quantize: Any, mixture: Path, text: Path, tmp_path: Path) -> None:
    recipe = recipe_for(mixture, text, steps=6, lora_rank=3, lora_targets=["all-linear", "experts"], quantize=quantize)
    recipe = recipe.changed({"learning_rate": 2e-2, "checkpoint_every": 3})
    fine_tune(recipe, tmp_path / "run")
    found = [loss for _, loss, _ in losses(tmp_path / "run")]
    assert found[-1] < found[0]
    tensors = load_file(tmp_path / "run" / "adapter_model.safetensors")
    stem = "base_model.model.model.layers.0.mlp.experts"
    assert tensors[f"{stem}.base_layer.lora_B.weight"].any() and tensors[f"{stem}.lora_B.weight"].any()

    # The run's checkpoint in the servers' format, and back.
    for source, out, form in (("run", "servers", "per_expert"), ("servers", "again", "target_parameters")):
        command = ["lora", "to-hf", str(tmp_path / source), str(tmp_path / out), "--expert-format", form]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.stderr
    assert f"{stem}.4.gate_proj.lora_A.weight" in load_file(tmp_path / "servers" / "adapter_model.safetensors")
    ids = torch.randint(3, 100, (2, 17), generator=torch.Generator().manual_seed(0))
    logits = [
        lm.load_adapter(lm.from_pretrained(mixture), tmp_path / name)(ids).logits
        for name in ("run", "servers", "again")
    ]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[2], logits[0], rtol=1e-5, atol=1e-5)
    info = CliRunner().invoke(app, ["info", str(tmp_path / "run"), "--json"]).stdout
    assert '"gate_up_proj"' in info and '"rank": 3' in info
    merged = CliRunner().invoke(
        app, ["lora", "merge", str(mixture), str(tmp_path / "run"), str(tmp_path / "merged")], catch_exceptions=False
    )
    assert merged.exit_code == 0
    torch.testing.assert_close(lm.from_pretrained(tmp_path / "merged")(ids).logits, logits[0], rtol=1e-4, atol=1e-4)


def test_a_run_says_that_experts_are_left_out(mixture: Path, text: Path, tmp_path: Path) -> None:
    with pytest.warns(AdapterWarning, match="--lora-targets experts"):
        fine_tune(recipe_for(mixture, text, steps=1, lora_rank=3), tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error", AdapterWarning)
        fine_tune(recipe_for(mixture, text, steps=1, lora_rank=3, lora_targets=["experts"]), tmp_path / "experts")
