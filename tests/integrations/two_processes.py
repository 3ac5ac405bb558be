"""Programs on two processes as torchrun starts them, by forks of one server that has imported their packages."""

import multiprocessing
import os
import runpy
import socket
import sys
import traceback
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

RANKS = 2
# Importing these packages starts no thread; a fork would lose it.
PRELOADED = ["accelerate", "deepspeed", "lightning", "ligermodels.archs", "ligermodels.integrations", "trl", "ranks"]
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


@cache
def forks() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # packages that are not installed are passed over
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        first = context.Process(target=int)  # with it the server starts
        first.start()
    first.join()
    return context


def run_rank(rank: int, port: int, program: Path, arguments: tuple[str, ...], work: Path) -> None:
    """Runs a program as torchrun runs it; its output goes to `work/RANK.log`."""
    log = os.open(work / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "GROUP_RANK": 0}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    os.environ.update({**ENVIRONMENT, **{name: str(value) for name, value in variables.items()}})
    os.chdir(work)
    sys.argv, sys.path[:0] = [str(program), *arguments], [str(program.parent)]
    try:
        runpy.run_path(str(program), run_name="__main__")
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def on_two_processes(program: Path, *arguments: str, work: Path, timeout: float = 400) -> list[str]:
    """Runs a program on two ranks, and returns the output of each.

    Args:
        program: a Python file.
        arguments: of the program.
        work: the folder that it runs in, and the logs.
        timeout: for both ranks, in seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [forks().Process(target=run_rank, args=(i, port, program, arguments, work)) for i in range(RANKS)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(timeout)
        if each.exitcode != 0:  # the others would wait for it
            for other in ranks:
                other.kill()
    logs = [(work / f"{i}.log").read_text() for i in range(RANKS)]
    assert [each.exitcode for each in ranks] == [0] * RANKS, "\n".join(logs)
    return logs
