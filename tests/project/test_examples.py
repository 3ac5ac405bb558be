"""examples/: every script and notebook runs from top to bottom, in an empty folder, on the tiny model that it makes."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ligermodels import console

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = Path(__file__).parents[2] / "examples"
WRITES = {
    "fine_tune": "tuned/model.safetensors",
    "lora": "adapter/adapter_model.safetensors",
    "medusa": "heads-vllm/model.safetensors",
    "mtp": "with-mtp/model.safetensors",
    "from_transformers": "from-transformers/model.safetensors",
    "trainer": "trainer-out/model.safetensors",
    "dpo": "tiny-llama/model.safetensors",
    "several_gpus": "sharded-out/model.safetensors",
    "long_sequences": "tiny-llama/model.safetensors",
}
"""Script -> a file that it leaves. custom_architecture.py and small_model.py are imported."""
NEEDS = {"trainer": ("accelerate", "datasets")}
NOTEBOOKS = {"load_verify_train_export": "exported/config.json", "medusa": "heads-tgi/medusa_lm_head.safetensors"}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, current, and examples/ where Python looks for a script's neighbours."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    return tmp_path


@pytest.mark.parametrize("name", WRITES)
def test_a_script_runs(name: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    for _ in range(2):  # the second run finds the files of the first
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert (desk / WRITES[name]).stat().st_size > 0


def test_two_ranks_share_a_model(desk: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*torchrun, str(EXAMPLES / "several_gpus.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "rank 0: step 2" in done.stdout and "rank 1: step 2" in done.stdout
    assert (desk / WRITES["several_gpus"]).stat().st_size > 0


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str, desk: Path) -> None:
    """Its cells one after another, as a kernel would, but in this process."""
    notebook = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["language"]) == (4, "python")
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 4 and not any(cell["outputs"] for cell in cells)
    for i, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"{name}, cell {i}", "exec"), names)
    assert (desk / NOTEBOOKS[name]).stat().st_size > 0


def test_every_example_is_run_and_listed() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py")} - {"small_model", "custom_architecture"}
    notebooks = {path.stem for path in EXAMPLES.glob("*.ipynb")}
    assert (scripts, notebooks) == (WRITES.keys(), NOTEBOOKS.keys())
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"({path.name})" in listed for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))


def test_progress_in_a_notebook_is_one_line_that_is_replaced(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    shown: list[str] = []

    def display(content: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw and display_id
        return SimpleNamespace(update=lambda content, raw: shown.append(content["text/plain"]))

    module = ModuleType("IPython.display")
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with console.progress("training") as show:
        for step in range(1000):
            show(step + 1, 1000, "loss 2")
    console.say("done")
    assert len(shown) < 50 and shown[-1] == "training ████████████████████ 1,000 of 1,000, loss 2"
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "done\n")
