"""The folder of a run is enough to resume it from any other folder: its files and code have absolute names there."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import losses
from safetensors import safe_open
from safetensors.torch import save_file

from ligermodels.data.files import absolute_name, data_files
from ligermodels.errors import CheckpointError, ConfigError
from ligermodels.training import FineTuningRecipe, MTPRecipe, fine_tune, train_mtp
from ligermodels.training.import_path import absolute_import, imported

pytestmark = pytest.mark.usefixtures("one_thread")

CODE = """
from ligermodels.training import Callback

class Count(Callback):
    steps = 0
    def on_step(self, event):
        self.steps += 1
    def state_dict(self):
        return {"steps": self.steps}
    def load_state_dict(self, state):
        self.steps = state["steps"]

def loss(log_probs, mask):
    return -log_probs

def reward(completions, **fields):
    return [float(len(completion)) for completion in completions]
"""
SETTINGS: dict[str, Any] = {
    "base": "model",
    "data": "data/*.jsonl",
    "max_bad_lines": 1,
    "validation_fraction": 0.2,
    "steps": 2,
    "seq_len": 64,
    "batch_tokens": 128,
    "excess_length_strategy": "truncate",
    "track": "none",
    "date": "2024-07-26",
}
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "code and files": (
        FineTuningRecipe,
        {"callback": "mine:Count", "loss": "mine:loss", "chat_template": "chatml", "tokenizer": "model"},
    ),
    "teacher": (FineTuningRecipe, {"objective": "distill", "teacher": "model", "chat_template": "own.jinja"}),
    "rewards": (
        FineTuningRecipe,
        {"objective": "grpo", "reward": ("mine:reward", "again:reward"), "data": "prompts.jsonl", "num_generations": 2}
        | {"max_completion_length": 8, "max_bad_lines": 0},
    ),
    "a word that is a folder too": (MTPRecipe, {"start_from": "new"}),
}


@pytest.fixture
def project(base: Path, data: Path, tmp_path: Path) -> Path:
    """A folder with a model, data and code; its name has characters of patterns."""
    folder = tmp_path / "my [project]"
    shutil.copytree(base, folder / "model")
    shutil.copytree(base, folder / "new")
    (folder / "data").mkdir()
    shutil.copy(data, folder / "data")
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "say {i}"}}\n' for i in range(8)))
    (folder / "own.jinja").write_text(
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    )
    for name in ("mine.py", "again.py"):
        (folder / name).write_text(CODE)
    return folder


@pytest.fixture
def forget() -> Iterator[Callable[[], None]]:
    """Forgets the modules of users, as a new process would."""

    def forget() -> None:
        for name in ("mine", "again"):
            sys.modules.pop(name, None)

    yield forget
    forget()


@pytest.mark.parametrize("case", RUNS)
def test_a_run_resumes_from_another_folder(
    case: str, project: Path, tmp_path: Path, forget: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe_class, changes = RUNS[case]
    recipe, train = (
        recipe_class().changed({**SETTINGS, **changes}),
        train_mtp if recipe_class is MTPRecipe else fine_tune,
    )
    monkeypatch.chdir(project)
    train(recipe, "runs/whole", device="cpu")
    forget()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    run = project / "runs/whole"
    stored = recipe_class.read(run / "recipe.yaml")
    assert stored.base == str(project / "model") and stored.steps == 2
    outcome = train(stored.changed({"steps": 3}), run, resume=True, device="cpu")
    assert outcome.step == len(losses(run)) == 3
    # The same relative names as before are the same recipe, also in a folder that has moved.
    forget()
    moved = project.rename(tmp_path / "moved")
    monkeypatch.chdir(moved)
    assert train(recipe.changed({"steps": 4}), moved / "runs/whole", resume=True, device="cpu").step == 4
    if "teacher" in changes:
        with safe_open(moved / "model/model.safetensors", "pt") as weights:
            other = {name: weights.get_tensor(name) + 1 for name in weights.keys()}  # noqa: SIM118
        shutil.copytree(moved / "model", moved / "other")
        save_file(other, moved / "other/model.safetensors")
        with pytest.raises(CheckpointError, match="teacher: differs from the start of the run: model"):
            train(recipe.changed({"teacher": "other"}), moved / "runs/whole", resume=True, device="cpu")


def test_absolute_names_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a[b]"
    folder.mkdir()
    for name in ("1.txt", "2.txt", "[3].txt"):
        (folder / name).write_text("words")
    monkeypatch.chdir(folder)
    names = {name: absolute_name(name) for name in ("1.txt", "[12].txt", "[3].txt", "hf:owner/name", ".")}
    assert names["hf:owner/name"] == "hf:owner/name"
    monkeypatch.chdir(tmp_path)
    files = {name: [file.path.name for file in data_files([names[name]])] for name in names if ":" not in name}
    assert files == {
        "1.txt": ["1.txt"],
        "[12].txt": ["1.txt", "2.txt"],
        "[3].txt": ["[3].txt"],
        ".": ["1.txt", "2.txt", "[3].txt"],
    }


def test_code_in_a_named_folder(tmp_path: Path, forget: Callable[[], None]) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"here = {name!r}")
    assert imported(f"{tmp_path}/one/mine:here", "loss") == "one"
    with pytest.raises(ConfigError, match=r"loss: .*two/mine:here: another module with this name has been imported"):
        imported(f"{tmp_path}/two/mine:here", "loss")
    with pytest.raises(ConfigError, match=f"there is no module 'other', neither installed nor in {tmp_path}/one"):
        imported(f"{tmp_path}/one/other:here", "loss")
    assert absolute_import("no_path") == "no_path"  # of which `imported` says what is missing
