"""The command line as a process with a closed standard stream, as by `<&-` or `>&-`, and in some daemons."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import make_base


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("closed-streams")
    make_base(folder)
    return folder


def close(*streams: int) -> None:
    for stream in streams:
        os.close(stream)


def test_a_closed_stream_is_no_error(checkpoint: Path) -> None:
    """Python has None in place of the stream."""
    ended = subprocess.run(
        [sys.executable, "-m", "ligermodels", "generate", str(checkpoint), "--device", "cpu"],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: close(0, 1),
    )
    assert ended.returncode == 1
    assert "prompt 1 is empty" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize(("closed", "text"), [((0, 2), "model type"), ((1,), "")])
def test_results_beside_a_closed_stream_and_for_one(
    closed: tuple[int, ...], text: str, checkpoint: Path, tmp_path: Path, children: Any
) -> None:
    process = children.Process(target=info_without, args=(closed, checkpoint, tmp_path / "shown"))
    process.start()
    process.join()
    shown = (tmp_path / "shown").read_text()
    assert process.exitcode == 0 and text in shown and "Traceback" not in shown


def info_without(closed: tuple[int, ...], checkpoint: Path, shown: Path) -> None:
    """What `ligermodels info` does as a process with closed streams; the other outputs go to a file."""
    file = os.open(shown, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    close(*closed)
    for stream in closed:
        setattr(sys, ("stdin", "stdout", "stderr")[stream], None)
    sys.argv = ["ligermodels", "info", str(checkpoint)]
    runpy.run_module("ligermodels", run_name="__main__", alter_sys=True)
