"""Processes that have imported everything before they begin: forks of one server, which imports it once."""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch

# What the processes of most tests use. To import it runs no operation of torch's and so starts no thread, which a fork
# would be without.
PRELOADED = [
    "pytest",
    "torch._dynamo.testing",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.parallel",
    "torch.utils.tensorboard",
    "ligermodels.archs",
    "ligermodels.cli",
    "ligermodels.parallel",
    "ligermodels.speculative.joint",
    "ligermodels.training.dspark",
    "ligermodels.training.eagle",
    "ligermodels.training.fine_tuning",
    "ligermodels.training.medusa",
    "ligermodels.training.mtp",
    "runs",
    "typer.testing",
    "zoo",
]


@cache
def forks() -> ForkServerContext:
    """The context to make them from. Their environment is that of the first call."""
    context = multiprocessing.get_context("forkserver")
    without_gpu = [] if torch.cuda.is_available() else ["left_out"]
    context.set_forkserver_preload([*PRELOADED, *without_gpu, "frozen"])
    with pytest.MonkeyPatch.context() as environment:
        # The server looks for modules where Python does, and ignores those that it does not find.
        environment.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        first = context.Process(target=int)  # With it the server starts.
        first.start()
    first.join()
    return context


class Command:
    """`subprocess.Popen` of `python -m MODULE ...` or `python -c PROGRAM ...`, as far as the launcher of ranks uses it:
    a fork runs the module or program.

    Args:
        command: the Python, "-m" and the module or "-c" and the program, and its arguments.
        env: all environment variables of the process.
        out: a file that gets what the process writes, to stdout and to stderr.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, out: Path) -> None:
        assert command[0] == sys.executable and command[1] in ("-m", "-c"), command
        self._process: Any = forks().Process(target=_run, args=(list(command[1:]), dict(env), os.getcwd(), out))
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode  # type: ignore[no-any-return]

    def wait(self) -> int | None:
        self._process.join()
        return self.poll()

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self._process.pid, number)


def _run(command: list[str], env: dict[str, str], folder: str, out: Path) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    kind, code, *arguments = command
    sys.argv = [code if kind == "-m" else kind, *arguments]
    if kind == "-c":
        exec(code, {"__name__": "__main__"})
        return
    sys.path.insert(0, folder)  # as `python -m` does
    runpy.run_module(code, run_name="__main__", alter_sys=True)
