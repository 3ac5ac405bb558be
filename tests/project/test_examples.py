"""examples/: every script and notebook runs from top to bottom, in an empty folder, on the tiny model that it makes."""

import importlib.util
import json
import os
import runpy
import socket
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

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


def one_of_two(rank: int, port: int, folder: Path) -> None:
    """What torchrun starts: the script, with the environment of a rank."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = ["several_gpus.py"]
    with open(f"said-{rank}", "w", encoding="utf-8") as said, redirect_stdout(said):
        runpy.run_path(str(EXAMPLES / "several_gpus.py"), run_name="__main__")


def test_two_ranks_share_a_model(desk: Path, children: Any) -> None:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        port = server.getsockname()[1]
    ranks = [children.Process(target=one_of_two, args=(rank, port, desk)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(200)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert all(f"rank {rank}: step 2" in (desk / f"said-{rank}").read_text(encoding="utf-8") for rank in range(2))
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
