"""The command line as a process with a closed standard stream, as by `<&-` or `>&-`, and in some daemons."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import make_base


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("closed-streams")
    make_base(folder)
    return folder


@pytest.mark.parametrize(
    ("closed", "command", "code", "out", "err"),
    [
        (0, ("generate", "--device", "cpu"), 1, "", "prompt 1 is empty"),
        (1, ("info",), 0, "", ""),
        (2, ("info",), 0, "model type", ""),
    ],
)
def test_a_closed_stream_is_no_error(
    checkpoint: Path, closed: int, command: tuple[str, ...], code: int, out: str, err: str
) -> None:
    """Python has None in place of the stream."""
    ended = subprocess.run(
        [sys.executable, "-m", "ligermodels", command[0], str(checkpoint), *command[1:]],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: os.close(closed),
    )
    assert ended.returncode == code
    assert out in ended.stdout and err in ended.stderr and "Traceback" not in ended.stderr
