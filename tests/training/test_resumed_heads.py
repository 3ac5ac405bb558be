"""Runs of heads that resume: where the heads are that they started from, and how long the runs are."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ligermodels.errors import CheckpointError, ConfigError
from ligermodels.training import (
    DFlashRecipe,
    EagleRecipe,
    MedusaRecipe,
    MTPRecipe,
    train_dflash,
    train_eagle,
    train_mtp,
)
from ligermodels.training.extension import check_schedule

pytestmark = pytest.mark.usefixtures("one_thread")

NEW_HEADS = [
    (EagleRecipe, train_eagle, {"draft_vocab_size": 40}),
    (DFlashRecipe, train_dflash, {"block_size": 4, "num_layers": 1}),
]
COMMON = {
    "max_bad_lines": 1, "validation_fraction": 0.2, "seq_len": 16, "excess_length_strategy": "split",
    "batch_tokens": 32, "checkpoint_every": 1, "date": "2024-07-26", "track": "none",
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "train", "new_head"), [*NEW_HEADS, (MTPRecipe, train_mtp, {})], ids=["eagle", "dflash", "mtp"]
)
def test_heads_to_start_from_may_move_and_not_change(
    kind: type[Any], train: Callable[..., Any], new_head: dict[str, Any], base: Path, data: Path, tmp_path: Path
) -> None:
    recipe = kind(base=str(base), data=(str(data),), steps=1, **COMMON)
    first, moved, out = (tmp_path / name for name in ("first", "moved", "out"))
    train(recipe.changed(new_head), first)
    recipe = recipe.changed({"start_from": str(first)})
    train(recipe, out)
    first.rename(moved)
    longer = recipe.changed({"steps": 2})
    with pytest.raises(CheckpointError, match=r"start_from: .*first: no such folder; give the folder of these heads"):
        train(longer, out, resume=True)
    shutil.copytree(moved, first)
    config = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps({**config, "changed": 1}))
    with pytest.raises(CheckpointError, match=r"start_from: differs from the start of the run: config.json had"):
        train(longer, out, resume=True)
    shutil.rmtree(first)
    assert train(longer.changed({"start_from": str(moved)}), out, resume=True).finished
    assert kind.read(out / "recipe.yaml").start_from == str(moved)
    assert train(longer.changed({"start_from": None}), out, resume=True).finished  # as its checkpoint says


@pytest.mark.parametrize(("kind", "train", "new_head"), NEW_HEADS, ids=["eagle", "dflash"])
def test_only_for_mtp_heads_is_new_no_folder(
    kind: type[Any], train: Callable[..., Any], new_head: dict[str, Any], base: Path, data: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Heads of other kinds in a folder of this name are checked as those in any folder."""
    monkeypatch.chdir(tmp_path)
    common = {"base": str(base), "data": (str(data),), "steps": 1, **COMMON}
    train(kind(**common, **new_head), Path("new"))
    recipe = kind(**common, start_from="new")
    with pytest.raises(CheckpointError, match=r"^new: is the run's start_from, which its result would replace"):
        train(recipe, Path("new"), overwrite=True)
    train(recipe, Path("out"))
    config = json.loads(Path("new/config.json").read_text())
    Path("new/config.json").write_text(json.dumps({**config, "changed": 1}))
    with pytest.raises(CheckpointError, match=r"start_from: differs from the start of the run: config.json had"):
        train(recipe.changed({"steps": 2}), Path("out"), resume=True)


def test_a_new_mtp_head_in_a_folder_of_that_name(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`new` is no folder in start_from, so the result may be in one, and the run resumes with its new head."""
    monkeypatch.chdir(tmp_path)
    recipe = MTPRecipe(base=str(base), data=(str(data),), steps=1, start_from="new", **COMMON)
    assert train_mtp(recipe, Path("new")).finished
    longer = recipe.changed({"steps": 2})
    for start in ("new", str(tmp_path / "new")):  # the checkpoint has its start
        assert train_mtp(longer.changed({"start_from": start}), Path("new"), resume=True).finished
        assert MTPRecipe.read(Path("new/recipe.yaml")).start_from == "new"


@pytest.mark.parametrize("curve", ["constant", "linear", "sine"])
def test_a_loss_that_depends_on_the_number_of_steps(curve: str) -> None:
    recipe = MedusaRecipe(stage=2, schedule="constant", steps=8, heads_loss_weight_schedule=curve)
    checkpoint = {"recipe": recipe.settings(), "steps": 8, "warmup_steps": 0}
    assert check_schedule(recipe, 8, 0, 2, checkpoint)
    assert check_schedule(recipe.changed({"steps": 16}), 16, 0, 2, checkpoint) == (curve == "constant")
    if curve == "constant":
        assert check_schedule(recipe.changed({"steps": 4}), 4, 0, 2, checkpoint)
    else:
        with pytest.raises(ConfigError, match=r"would have 4; .* with heads_loss_weight_schedule constant"):
            check_schedule(recipe.changed({"steps": 4}), 4, 0, 2, checkpoint)
