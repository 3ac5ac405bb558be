"""Tests on two or more processes with gloo."""

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from children import forks
from torch.distributed.device_mesh import init_device_mesh

WORLD = 2


def in_two_ranks(work: Callable[..., None], folder: Path, *arguments: Any) -> None:
    """Run `work(rank, folder, mesh, *arguments)` in two processes; an error of either fails with its traceback."""
    in_ranks(WORLD, work, folder, *arguments)


def in_ranks(world: int, work: Callable[..., None], folder: Path, *arguments: Any) -> None:
    """The same in `world` processes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rendezvous").unlink(missing_ok=True)  # of an earlier call
    done = Path(tempfile.mkdtemp())
    workers = [
        forks().Process(target=_enter, args=(work, rank, world, folder, done, arguments)) for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(240)
        worker.kill()
    errors = [path.read_text() for path in sorted(folder.glob("error-*"))]
    assert not errors, errors[0]
    assert [worker.exitcode for worker in workers] == [0] * world


def _enter(
    work: Callable[..., None], rank: int, world: int, folder: Path, done: Path, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        work(rank, folder, init_device_mesh("cpu", (world,)), *arguments)
        # Not gloo's barrier: the rank that leaves it first may end while the other still reads from it.
        (done / str(rank)).touch()
        deadline = time.monotonic() + 60
        while not all((done / str(each)).exists() for each in range(world)) and time.monotonic() < deadline:
            time.sleep(0.01)
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # Without gloo's teardown, in which the rank that is later may abort.
