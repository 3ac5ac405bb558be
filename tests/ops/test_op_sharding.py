"""Ops on DTensors, in two processes; what these check is in `sharded_ops`."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ligermodels.ops.runtime.dispatch import INTERPRETED


@pytest.mark.kernels
@pytest.mark.skipif(not INTERPRETED, reason="Triton compiles here, and its interpreter may be too old for numpy")
def test_two_ranks() -> None:
    """By the reference, which is plain torch, and by the kernels, in Triton's interpreter."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    command = [sys.executable, str(Path(__file__).with_name("sharded_ops.py")), port]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    options: Any = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env=environment, **options) as ranks:
        try:
            errors = ranks.communicate(timeout=480)[1]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(ranks.pid, signal.SIGKILL)
    assert ranks.returncode == 0, errors
