"""Commands in a terminal that is closed while they run, as by the loss of an ssh connection."""

import fcntl
import os
import pty
import runpy
import signal
import sys
import termios
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import losses, recipe_for

from ligermodels.training import train_heads
from ligermodels.training.checkpoints import Checkpoints


def run_in(terminal: str, arguments: list[str], *, nohup: bool) -> None:
    """What a shell does that starts the command line in a terminal."""
    os.setsid()
    device = os.open(terminal, os.O_RDWR)
    fcntl.ioctl(device, termios.TIOCSCTTY, 0)
    for descriptor in (0, 1, 2):
        os.dup2(device, descriptor)
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115
    signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    torch.set_num_threads(1)
    sys.argv = ["ligermodels", *arguments]
    runpy.run_module("ligermodels", run_name="__main__", alter_sys=True)


@pytest.mark.parametrize("nohup", [False, True])
def test_a_run_whose_terminal_is_closed(base: Path, data: Path, tmp_path: Path, children: Any, nohup: bool) -> None:
    """It saves a checkpoint and ends; under nohup it trains on. In neither case does a message end it."""
    recipe = recipe_for(base, data, steps=30, checkpoint_every=100, evaluate_every=None, report_every=1)
    file, out = tmp_path / "recipe.json", tmp_path / "out"
    file.write_text(recipe.model_dump_json())
    arguments = ["medusa", "train", "--recipe", str(file), "--out", str(out), "--device", "cpu"]
    controller, device = pty.openpty()
    terminal = os.ttyname(device)
    child = children.Process(target=run_in, args=(terminal, arguments), kwargs={"nohup": nohup})
    child.start()
    shown = bytearray()

    def read() -> None:
        with suppress(OSError):  # from the moment that no process has the terminal
            while not losses(out):
                shown.extend(os.read(controller, 4096))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    deadline = time.monotonic() + 60
    while child.is_alive() and not losses(out) and time.monotonic() < deadline:
        time.sleep(0.01)
    reader.join(1)
    os.close(device), os.close(controller)
    child.join(60)
    assert child.exitcode == (0 if nohup else 143), shown
    steps = Checkpoints(out / "checkpoints").steps()
    assert (steps == [30]) if nohup else (0 < steps[-1] < 30)
    assert (out / "model.safetensors").exists() == nohup
    if not nohup:
        assert train_heads(recipe, out, resume=True).finished and len(losses(out)) == 30
