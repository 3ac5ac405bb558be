"""Tests on two or more processes with gloo, or each with a GPU."""

import faulthandler
import multiprocessing
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
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

WORLD = 2
LIMIT = 240
"""Seconds for the work of all ranks."""


def in_two_ranks(work: Callable[..., None], folder: Path, *arguments: Any) -> None:
    """Run `work(rank, folder, mesh, *arguments)` in two processes; an error of either fails with its traceback."""
    in_ranks(WORLD, work, folder, *arguments)


def in_ranks(world: int, work: Callable[..., None], folder: Path, *arguments: Any, device: str = "cpu") -> None:
    """The same in `world` processes, with `device` "cuda" on a GPU each, and with NCCL beside gloo."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in (folder / "rendezvous", *folder.glob("error-*")):  # of an earlier call
        left.unlink(missing_ok=True)
    deadline = time.monotonic() + LIMIT
    start: Any = forks() if device == "cpu" else multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with tempfile.TemporaryDirectory() as done:
        workers = [
            start.Process(target=_enter, args=(work, rank, world, device, folder, Path(done), arguments), daemon=True)
            for rank in range(world)
        ]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(max(0.0, deadline - time.monotonic()))
            # Before any rank is killed: the others then report that they have lost it.
            errors = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)  # the cause comes first
            messages = [path.read_text() for path in (*errors, *sorted(Path(done).glob("crash-*")))]
            exits = [worker.exitcode for worker in workers]
        finally:
            for worker in workers:
                if worker.pid is not None:
                    worker.kill()
            for worker in workers:
                if worker.pid is not None:
                    worker.join()
    outcome = f"exit codes of the ranks, None after {LIMIT} s: {exits}"
    assert exits == [0] * world and not any(messages), "\n".join([outcome, *messages])


def _enter(
    work: Callable[..., None], rank: int, world: int, device: str, folder: Path, done: Path, arguments: tuple[Any, ...]
) -> None:
    faulthandler.enable((done / f"crash-{rank}").open("w"))
    try:
        torch.set_num_threads(1)
        rendezvous = f"file://{folder}/rendezvous"
        backend, gpu = "gloo", None
        if device == "cuda":
            backend, gpu = "cpu:gloo,cuda:nccl", torch.device("cuda", rank)
            torch.cuda.set_device(gpu)
        options: dict[str, Any] = {"timeout": timedelta(seconds=60), "device_id": gpu}
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world, **options)
        work(rank, folder, init_device_mesh(device, (world,)), *arguments)
        # Not gloo's barrier: the rank that leaves it first may end while the other still reads from it.
        (done / str(rank)).touch()
        deadline = time.monotonic() + 60
        while not all((done / str(each)).exists() for each in range(world)) and time.monotonic() < deadline:
            time.sleep(0.01)
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # Without gloo's teardown, in which the rank that is later may abort.


def by_first_rank(
    plain: nn.Module, loss: Callable[[nn.Module], Tensor], total: Callable[[Tensor], Tensor] = torch.mean
) -> Tensor:
    """The loss or losses of a model that every rank has whole, and in `plain` the gradients of their total.

    Only the first rank computes them. Call `zero_grad` before.

    Args:
        plain: the model.
        loss: gives the losses, of any shape.
        total: makes one number of them.
    """
    parameters = list(plain.parameters())
    results: list[Any] = [None]
    if dist.get_rank() == 0:
        losses = loss(plain)
        total(losses).backward()
        results = [(losses.detach(), [p.grad is not None for p in parameters])]
    dist.broadcast_object_list(results)
    found, trained = results[0]
    parameters = [p for p, is_trained in zip(parameters, trained, strict=True) if is_trained]
    if parameters:
        flat = torch.cat([(torch.empty_like(p) if p.grad is None else p.grad).detach().flatten() for p in parameters])
        dist.broadcast(flat, 0)
        for p, gradient in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = gradient.view_as(p).to(p.dtype)  # `flat` has the widest dtype
    return found


def tokens_of_first_rank(generate: Callable[[], Tensor]) -> Tensor:
    """What `generate` of a model that every rank has whole returns; only the first rank calls it."""
    results = [generate() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(results)
    assert isinstance(results[0], Tensor)
    return results[0]


def own_parts(found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's part of both tensors, without communication if `found` is sharded evenly or not at all."""
    if not isinstance(found, DTensor):
        return found, wanted
    if not all(type(placement) in (Shard, Replicate) for placement in found.placements):
        return found.full_tensor(), wanted
    parts = distribute_tensor(wanted, found.device_mesh, found.placements, src_data_rank=None)
    return found.to_local(), parts.to_local()
