"""Learning rates and weight decay by patterns of names, and the learning rate of LoRA."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner
from zoo import CONFIGS, GPT_OSS

import ligermodels as lm
from ligermodels.cli import app
from ligermodels.errors import ConfigError, InputError
from ligermodels.training import Console, FineTuningRecipe, MedusaRecipe, adamw, fine_tune, muon
from ligermodels.training.parameter_groups import parameter_groups
from ligermodels.training.run_state import optimizer_of


def groups_of(**patterns: Any) -> dict[str, tuple[float, float]]:
    """Name -> learning rate and weight decay."""
    model = lm.from_config(CONFIGS["llama-2"], device="meta")
    names = {id(p): name for name, p in model.named_parameters()}
    groups = parameter_groups([(model.parameters(), 1.0)], 0.5, names=names, **patterns)
    assert sum(len(group["params"]) for group in groups) == len(names)
    return {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}


def test_patterns_by_hand() -> None:
    """Whole names, modules, names in a block; the first that matches; also of vectors."""
    found = groups_of(
        learning_rate_patterns={"decoder.embed": 0.1, "mlp.down": 0.2, "mlp.*": 0.3, "decoder.blocks.1.*": 0.4},
        weight_decay_patterns={"head.weight": 0.0, "*norm*": 0.25},
    )
    wanted = {
        "decoder.embed.weight": (0.1, 0.5),
        "decoder.blocks.0.mlp.down.weight": (0.2, 0.5),
        "decoder.blocks.1.mlp.down.weight": (0.2, 0.5),
        "decoder.blocks.0.mlp.gate_up.weight": (0.3, 0.5),
        "decoder.blocks.0.mixer.o.weight": (1.0, 0.5),
        "decoder.blocks.1.mixer.o.weight": (0.4, 0.5),
        "decoder.norm.weight": (1.0, 0.25),
        "head.weight": (1.0, 0.0),
    }
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize("how", ["adamw", "muon", "recipe"])
def test_stacked_biases_of_experts_do_not_decay(how: str) -> None:
    """Two-dimensional as they are, one row for each expert. A pattern may give them a decay of their own."""
    model = lm.from_config(GPT_OSS, device="meta")
    names = {id(p): name for name, p in model.named_parameters()}
    if how == "recipe":
        recipe = FineTuningRecipe(base="a", data="b", weight_decay=0.5, weight_decay_patterns={"mlp.down_bias": 0.25})
        job: Any = SimpleNamespace(model=model, learning_rates=[(model.parameters(), 1.0)])
        optimizer: Any = optimizer_of(recipe, job)
    elif how == "muon":
        optimizer = muon(model, 1.0, weight_decay=0.5)
    else:
        optimizer = adamw(model.named_parameters(), 1.0, weight_decay=0.5)
    found = {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(found) == len(names)
    decays = {name.removeprefix("decoder.blocks.0.mlp."): decay for name, decay in found.items()}
    decays = {name: decay for name, decay in decays.items() if name in ("gate_up", "down", "gate_up_bias", "down_bias")}
    wanted = {"gate_up": 0.5, "down": 0.5, "gate_up_bias": 0.0, "down_bias": 0.25 if how == "recipe" else 0.0}
    assert decays == wanted


def test_a_pattern_that_matches_nothing_is_named() -> None:
    with pytest.raises(InputError, match=r"learning_rate_patterns: 'embed' matches no .*; .* decoder\.embed\."):
        groups_of(learning_rate_patterns={"embed": 0.1})
    with pytest.raises(InputError, match="weight_decay_patterns: 'lm_head'"):
        groups_of(weight_decay_patterns={"lm_head": 0.1})


def test_settings_of_patterns() -> None:
    flags, table = ("decoder.embed=1e-5", "mlp.*=2"), {"decoder.embed": 1e-5, "mlp.*": 2.0}
    assert FineTuningRecipe(learning_rate_patterns=flags) == FineTuningRecipe(learning_rate_patterns=table)
    recipe = FineTuningRecipe().changed({"learning_rate_patterns": table})
    assert FineTuningRecipe(**yaml.safe_load(yaml.safe_dump(recipe.settings()))) == recipe
    for wrong, message in (
        (("embed",), "learning_rate_patterns: must be PATTERN=NUMBER, got"),
        (("embed=fast",), "learning_rate_patterns: must be PATTERN=NUMBER, got"),
        ({"embed": -1.0}, "learning_rate_patterns.embed: must be greater than or equal to 0, got -1"),
    ):
        with pytest.raises(ConfigError, match=message):
            FineTuningRecipe(learning_rate_patterns=wrong)


def test_the_default_learning_rate_of_lora() -> None:
    """2e-4, and 2e-5 of the whole model, unless the user gave one, in whatever order."""
    lora = {"lora_rank": 8}
    assert FineTuningRecipe().learning_rate == 2e-5 and FineTuningRecipe(**lora).learning_rate == 2e-4
    assert FineTuningRecipe().changed(lora).learning_rate == 2e-4
    assert FineTuningRecipe().changed(lora).changed({"lora_rank": None, "seed": 1}).learning_rate == 2e-5
    assert FineTuningRecipe(learning_rate=2e-5).changed({"seed": 1}).changed(lora).learning_rate == 2e-5
    assert FineTuningRecipe().changed(lora).settings()["learning_rate"] == 2e-4
    assert FineTuningRecipe.read("fine-tuning").changed(lora).learning_rate == 2e-4
    assert FineTuningRecipe.read("fine-tuning").learning_rate == 2e-5
    assert MedusaRecipe().learning_rate == MedusaRecipe().changed({"seed": 1}).learning_rate == 5e-4


def test_a_run_has_them_and_says_them(base: Path, data: Path, tmp_path: Path) -> None:
    said: list[str] = []
    recipe = FineTuningRecipe(
        base=str(base), data=str(data), max_bad_lines=1, steps=2, seq_len=16, batch_tokens=32, lora_rank=2,
        excess_length_strategy="split", learning_rate_patterns={"mixer": 0.5}, schedule="constant", warmup_steps=0,
    )  # fmt: skip
    fine_tune(recipe, tmp_path / "out", console=Console(said.append))
    assert "adamw: learning rate 0.0002 (the default), mixer 0.5, schedule constant" in said
    relative = FineTuningRecipe(optimizer="adafactor", learning_rate=1e-3).optimizer_summary()
    assert "learning rate 0.001 times the root mean square of each parameter" in relative
    run = json.loads((tmp_path / "out/checkpoints/step-2/run.json").read_text())
    assert sorted({group["lr"] for group in run["parameter_groups"]}) == [2e-4, 0.5]
    with pytest.raises(InputError, match="learning_rate_patterns: 'nothing' matches no trained parameter"):
        fine_tune(recipe.changed({"learning_rate_patterns": {"nothing": 1.0}}), tmp_path / "none")


def test_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import ligermodels.training as training
    from ligermodels.training import Outcome

    seen: list[FineTuningRecipe] = []
    monkeypatch.setattr(training, "fine_tune", lambda recipe, *_, **__: seen.append(recipe) or Outcome(1, 1))
    arguments = ["train", "m", "--data", "x", "--out", str(tmp_path / "out"), "--lora-rank", "8"]
    arguments += ["--learning-rate-patterns", "mixer=1e-3", "--learning-rate-patterns", "mlp=0", "--schedule", "wsd"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert seen[0].learning_rate_patterns == {"mixer": 1e-3, "mlp": 0.0} and seen[0].schedule == "wsd"
    assert seen[0].learning_rate == 2e-4
