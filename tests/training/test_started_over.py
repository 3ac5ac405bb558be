"""A run that starts over in a folder leaves nothing of the earlier result there, and can be resumed at once."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from runs import losses

from ligermodels.errors import CheckpointError
from ligermodels.training import Callback, FineTuningRecipe, MedusaRecipe, fine_tune, train_heads

pytestmark = pytest.mark.usefixtures("one_thread")


class Killed(Callback):
    def on_step(self, event: Any) -> None:
        raise RuntimeError("killed")


@pytest.mark.parametrize("lora_ranks", [(None, 2), (2, None)])
def test_a_model_and_an_adapter_are_never_in_one_folder(
    base: Path, data: Path, tmp_path: Path, lora_ranks: tuple[int | None, int | None]
) -> None:
    settings: dict[str, Any] = {"base": str(base), "data": (str(data),), "max_bad_lines": 1, "steps": 2, "seq_len": 64}
    settings |= {"batch_tokens": 64, "validation_fraction": 0.0, "track": ("none",), "date": "2024-07-26"}
    first, second = (FineTuningRecipe(**settings, lora_rank=rank) for rank in lora_ranks)
    out, alone = tmp_path / "out", tmp_path / "alone"
    fine_tune(first, out, device="cpu")
    with pytest.raises(RuntimeError, match="killed"):
        fine_tune(second, out, device="cpu", overwrite=True, callbacks=[Killed()])
    fine_tune(second, out, device="cpu", resume=True)
    fine_tune(second, alone, device="cpu")
    assert {path.name for path in out.iterdir()} == {path.name for path in alone.iterdir()}
    assert losses(out) == losses(alone)


@pytest.mark.parametrize("setting", ["base", "start_from"])
def test_what_a_run_reads_is_not_its_folder(
    setting: str, base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a base whose tokenizer gets new tokens, in a copy, and heads in the home folder."""
    out = tmp_path / "out"
    shutil.copytree(base, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = FineTuningRecipe(base=out, data=str(data), chat_template="phi", steps=1) if setting == "base" else None
    heads = MedusaRecipe(base=base, data=str(data), start_from="~/out", steps=1)
    with pytest.raises(CheckpointError, match=f"is the run's {setting}, which its result would replace"):
        fine_tune(recipe, out, overwrite=True) if recipe else train_heads(heads, out, overwrite=True)
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}
