"""`--gpus N`: one process (rank) per GPU, with the environment variables of torchrun."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ligermodels.console import say
from ligermodels.errors import BackendError

Gpus = Annotated[
    int | None,
    typer.Option(min=1, help="GPUs to train on: starts a process for each. With --device cpu, that many processes."),
]

ARGUMENTS = "ligermodels.arguments"
"""Key of the command line's arguments in `typer.Context.meta`."""
PROGRAM = (
    f"import sys; sys.path[:] = sys.argv.pop(1).split({os.pathsep!r}); from ligermodels.__main__ import main; main()"
)
"""What a rank runs, with the path of this process: `-m` would import modules of the current folder before others."""
SHARED = "LIGERMODELS_RANKS"
"""Environment variable of the ranks: a folder where the first rank to say something leaves a file."""
STOPPED, INTERRUPTED = 128 + signal.SIGTERM, 128 + signal.SIGINT
"""Exit codes of a run that SIGTERM or SIGHUP, or Ctrl-C, stopped."""
SECONDS_AFTER_FAILURE = 10
"""How long the other ranks may take to end after one has failed; some wait for it on the GPU, and never would."""


def is_first_to(message: str) -> bool:
    """Whether no other rank of `--gpus` has asked this for `message`; True in a process that `--gpus` did not start."""
    if (shared := os.environ.get(SHARED)) is None:
        return True
    try:
        (Path(shared) / hashlib.sha256(message.encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def launch(ctx: typer.Context, gpus: int | None, device: str | None) -> None:
    """Run the command in `gpus` processes and exit with their exit code; return if `gpus` is None or 1.

    SIGTERM, SIGHUP and Ctrl-C go to all processes: the run saves its checkpoint, however long that takes. A second
    Ctrl-C ends them at once. If a process fails, its error is printed, and the others are ended.

    Args:
        ctx: context of the command.
        gpus: number of processes.
        device: "cuda" or None for GPUs, "cpu" for processes on the CPU.

    Raises:
        typer.BadParameter: torchrun has started this process, or `device` names a single GPU.
        BackendError: there are fewer GPUs.
        typer.Exit: the processes have ended.
    """
    if gpus is None:
        return
    _check(gpus, device)
    if gpus > 1:
        path = os.pathsep.join(sys.path)
        raise typer.Exit(run_ranks(gpus, [sys.executable, "-c", PROGRAM, path, *_without_gpus(ctx.meta[ARGUMENTS])]))


def _check(gpus: int, device: str | None) -> None:
    import torch

    from ligermodels.parallel.ranks import launched, world_size

    if launched():
        raise typer.BadParameter(
            f"torchrun has started this process, as one of {world_size()}; leave out --gpus or torchrun",
            param_hint="--gpus",
        )
    if device == "cpu":
        return
    if device not in (None, "cuda"):
        raise typer.BadParameter(f"must be cuda or cpu beside --gpus, got {device}", param_hint="--device")
    if (count := torch.cuda.device_count()) < gpus:
        cpu = "" if count else f"; --device cpu starts {gpus} processes on the CPU"
        raise BackendError(f"--gpus {gpus}: torch finds {count} GPUs here{cpu}")


def _without_gpus(arguments: Sequence[str]) -> Iterator[str]:
    rest = iter(arguments)
    for argument in rest:
        if argument == "--gpus":
            next(rest)
        elif not argument.startswith("--gpus="):
            yield argument


def run_ranks(count: int, command: Sequence[str]) -> int:
    """Run `command` in `count` processes; see `launch`. Returns the exit code of the first that failed, or 0."""
    from torch.distributed import TCPStore

    # This process has the ranks' store, as torchrun's does, so that no other process can take its port.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as shared:
        environment = {
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // count)),
            **os.environ,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            SHARED: shared,
        }
        processes: list[subprocess.Popen[bytes]] = []
        with _forwarding_signals(processes) as are_interrupted:
            try:
                for rank in range(count):
                    names = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    processes.append(subprocess.Popen(command, env={**environment, **names}))
                rank, code = _wait(processes)
            finally:
                _kill(processes)
    if are_interrupted():
        say("interrupted")
        return INTERRUPTED
    if code >= 0:
        return code
    hint = "; the kernel sends it if the host has no memory left" if -code == signal.SIGKILL else ""
    say(f"rank {rank}: ended by {signal.Signals(-code).name}{hint}")
    return 128 - code


@contextmanager
def _forwarding_signals(processes: list[subprocess.Popen[bytes]]) -> Iterator[Callable[[], bool]]:
    """Send signals that this process gets to all of `processes`; from the second Ctrl-C on, SIGKILL. Yields a function:
    whether there has been a second one."""
    num_interrupts = 0

    def forward(number: int, _: object) -> None:
        nonlocal num_interrupts
        num_interrupts += number == signal.SIGINT
        for process in processes:
            process.send_signal(number if num_interrupts < 2 else signal.SIGKILL)

    before = dict[signal.Signals, Any]()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # by nohup, or for a job in the background
            before[number] = signal.signal(number, forward)
    try:
        yield lambda: num_interrupts >= 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int]:
    """Wait for all processes; if one fails, end the others after SECONDS_AFTER_FAILURE. Returns number and exit code of
    the first that failed, or else that did not exit with 0; (0, 0) if all did."""
    failed, deadline = None, math.inf
    while True:
        codes = [(rank, process.poll()) for rank, process in enumerate(processes)]
        if failed is None:
            failed = next(((rank, code) for rank, code in codes if code not in (None, 0, STOPPED, INTERRUPTED)), None)
            deadline = math.inf if failed is None else time.monotonic() + SECONDS_AFTER_FAILURE
        ended = [(rank, code) for rank, code in codes if code is not None]
        if len(ended) == len(processes):
            return failed or next((each for each in ended if each[1]), (0, 0))
        if time.monotonic() > deadline:
            _kill(processes)
        time.sleep(0.05)


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()
