"""Ops on DTensors, in two processes; what these check is in `sharded_ops`."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.kernels
def test_two_ranks() -> None:
    """By the reference, which is plain torch, and by the kernels, in Triton's interpreter."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    command = [sys.executable, str(Path(__file__).with_name("sharded_ops.py"))]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen([*command, str(rank), port], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=480)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors)
