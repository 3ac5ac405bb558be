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


@pytest.mark.parametrize(
    ("closed", "command", "code", "out", "err"),
    [((0, 1), ("generate", "--device", "cpu"), 1, "", "prompt 1 is empty"), ((0, 2), ("info",), 0, "model type", "")],
)
def test_a_closed_stream_is_no_error(
    checkpoint: Path, closed: tuple[int, ...], command: tuple[str, ...], code: int, out: str, err: str
) -> None:
    """Python has None in place of the stream."""
    ended = subprocess.run(
        [sys.executable, "-m", "ligermodels", command[0], str(checkpoint), *command[1:]],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: close(*closed),
    )
    assert ended.returncode == code
    assert out in ended.stdout and err in ended.stderr and "Traceback" not in ended.stderr


def test_results_for_a_closed_stream_are_no_error(checkpoint: Path, tmp_path: Path, children: Any) -> None:
    process = children.Process(target=info_without_stdout, args=(checkpoint, tmp_path / "stderr"))
    process.start()
    process.join()
    assert process.exitcode == 0 and "Traceback" not in (tmp_path / "stderr").read_text()


def info_without_stdout(checkpoint: Path, errors: Path) -> None:
    """What `ligermodels info` does as a process with a closed standard output."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    os.close(1)
    sys.stdout = None  # type: ignore[assignment]
    sys.argv = ["ligermodels", "info", str(checkpoint)]
    runpy.run_module("ligermodels", run_name="__main__", alter_sys=True)
