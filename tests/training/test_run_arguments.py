"""Arguments of runs that would have had another effect than they say."""

from pathlib import Path
from typing import Any

import pytest

from ligermodels.errors import CheckpointError, InputError
from ligermodels.training import Callback, EarlyStopping, FineTuningRecipe, dry_run, fine_tune
from ligermodels.training.folder import require_usable

pytestmark = pytest.mark.usefixtures("one_thread")


def recipe_of(base: Path, data: Path) -> FineTuningRecipe:
    settings: dict[str, Any] = {"base": base, "data": data, "max_bad_lines": 1, "steps": 2, "seq_len": 64}
    return FineTuningRecipe(**settings, batch_tokens=64, validation_fraction=0.0, track="none")


def test_a_callback_that_has_ended_an_earlier_run(base: Path, data: Path, tmp_path: Path) -> None:
    """The second run would be finished before its first step."""

    class Stops(Callback):
        def on_step(self, event: Any) -> None:
            self.stop = True

    callback, recipe = Stops(), recipe_of(base, data)
    assert fine_tune(recipe, tmp_path / "first", callbacks=[callback]).step == 1
    with pytest.raises(
        InputError, match="callbacks: Stops ends the run before its first step, as after an earlier run"
    ):
        fine_tune(recipe, tmp_path / "second", callbacks=[callback])
    assert not (tmp_path / "second").exists()
    callback.stop = False
    assert fine_tune(recipe, tmp_path / "second", callbacks=[callback]).step == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "patience: must be a whole number of at least 1, got 0"),
        ((1.5,), "patience: must be a whole number of at least 1, got 1.5"),
        ((1, -0.1), "threshold: must be a number of at least 0, got -0.1"),
    ],
)
def test_numbers_of_early_stopping(arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        EarlyStopping(*arguments)


@pytest.mark.parametrize("flag", ["resume", "overwrite"])
@pytest.mark.parametrize("function", [fine_tune, dry_run])
def test_flags_are_true_or_false(flag: str, function: Any, base: Path, data: Path, tmp_path: Path) -> None:
    """overwrite="no" would overwrite."""
    with pytest.raises(InputError, match=f"^{flag}: must be True or False, got 'no'"):
        function(recipe_of(base, data), tmp_path / "out", **{flag: "no"})


@pytest.mark.parametrize("flag", ["resume", "overwrite", None])
def test_a_file_as_output(flag: str | None, tmp_path: Path) -> None:
    """No flag helps, so that no message may name one."""
    (tmp_path / "out").write_text("mine")
    with pytest.raises(CheckpointError, match=r"out: is a file; give a folder$"):
        require_usable(tmp_path / "out", resume=flag == "resume", overwrite=flag == "overwrite")
    assert (tmp_path / "out").read_text() == "mine"


def test_data_without_a_document(base: Path, tmp_path: Path) -> None:
    """A smaller validation split does not help."""
    (tmp_path / "empty.txt").touch()
    recipe = recipe_of(base, tmp_path / "empty.txt").changed({"validation_fraction": 0.1}, "the test")
    with (
        pytest.warns(UserWarning, match="holds no document"),
        pytest.raises(InputError, match=r"^there is no document"),
    ):
        fine_tune(recipe, tmp_path / "out")
