"""Callbacks get the model itself in every kind of run, and what they do with its mode ends with their call."""

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import STAGE_2, losses, make_pairs, recipe_for

import ligermodels as lm
from ligermodels.training import Callback, Event, FineTuningRecipe, fine_tune, train_heads

pytestmark = pytest.mark.usefixtures("one_thread")


def recipe_of(base: Path, data: Path, **changes: Any) -> FineTuningRecipe:
    settings = {
        "base": str(base),
        "data": str(data),
        "steps": 2,
        "seq_len": 64,
        "batch_tokens": 128,
        "report_every": 10,
    }
    return FineTuningRecipe().changed({**settings, "validation_fraction": 0.2, "track": "none", **changes})


class Sampling(Callback):
    """Samples from the model in every event, and leaves it in evaluation mode."""

    def __init__(self) -> None:
        self.kinds = set[type]()

    def on_step(self, event: Event) -> None:
        self.kinds.add(type(event.model))
        event.model.eval().generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)

    on_evaluate = on_save = on_step


@pytest.mark.parametrize("settings", [{}, {"objective": "dpo"}, {"objective": "kto"}, {"loss": "beside:loss"}], ids=str)
def test_the_model_of_an_event(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_pairs(pairs := tmp_path / "pairs.jsonl")
    # The loss imports a module beside it when it is called.
    Path("beside.py").write_text(
        "def loss(log_probs, mask):\n    from beside_it import SIGN\n    return SIGN * log_probs\n"
    )
    Path("beside_it.py").write_text("SIGN = -1.0\n")
    (tmp_path / "texts.jsonl").write_text('{"text": "the cat sat on the mat"}\n' * 8)
    data = pairs if "objective" in settings else tmp_path / "texts.jsonl"
    fine_tune(recipe_of(base, data, **settings), "out", device="cpu", callbacks=[sampling := Sampling()])
    assert sampling.kinds == {lm.CausalLM}


def test_the_model_of_an_event_of_heads(base: Path, data: Path, tmp_path: Path) -> None:
    recipe = recipe_for(base, data, **STAGE_2).changed({"steps": 3})
    train_heads(recipe, tmp_path / "out", device="cpu", callbacks=[sampling := Sampling()])
    assert sampling.kinds == {lm.MedusaModel}


def test_evaluation_mode_ends_with_the_call(base: Path, data: Path, tmp_path: Path) -> None:
    """With dropout, whose losses differ in evaluation mode."""
    recipe = recipe_of(base, data, max_bad_lines=1, steps=4, lora_rank=2, lora_dropout=0.5, learning_rate=0.1)
    fine_tune(recipe, tmp_path / "plain", device="cpu")
    fine_tune(recipe, tmp_path / "sampled", device="cpu", callbacks=[Sampling()])
    assert losses(tmp_path / "sampled") == losses(tmp_path / "plain")
