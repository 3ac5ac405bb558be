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
from typing import Any

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


def with_fsdp2_on_cpu() -> None:
    """Let accelerate shard by FSDP2 on the CPU, where it would use DDP without a word."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    init = AcceleratorState.__init__

    def with_fsdp2(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = self.distributed_type = DistributedType.FSDP

    AcceleratorState.__init__ = with_fsdp2  # type: ignore[method-assign]


def deepspeed_on_cpu() -> None:
    """Let the next `Accelerator` of this process use DeepSpeed on the CPU, where it would use DDP without a word; with
    gloo, so that DeepSpeed compiles no extension."""
    import deepspeed
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ["ACCELERATE_USE_CPU"] = "true"
    PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    os.environ["ACCELERATE_USE_CPU"] = "false"


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
    if "accelerate" in sys.modules:
        with_fsdp2_on_cpu()
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
