"""Buckets of weights for other processes: through shared memory here, through CUDA IPC on a GPU."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from children import forks
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.integrations.vllm.shared_buckets import SharedBuckets, read_bucket, reader_of

READERS = 2
ON_GPU = [("cuda:0", "cuda:0"), ("cuda:0", "cuda:1"), ("cuda:0", "cpu"), ("cpu", "cuda:0")]
PAIRS = [("cpu", "cpu"), *(pytest.param(*pair, marks=pytest.mark.gpu) for pair in ON_GPU)]


def buckets(device: str) -> list[list[tuple[str, Tensor]]]:
    """Buckets of several dtypes, of which the second needs a larger buffer and the third a smaller one."""
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(300, 257, generator=generator)
    kinds = [
        ("odd", large[:3, :5]),
        ("transposed", large[:7, :9].T),
        ("half", large[:1].bfloat16()),
        ("codes", large.to(torch.float8_e4m3fn)[:11]),
        ("number", torch.tensor(7)),
        ("flags", large[0] > 0),
        ("nothing", large[:0]),
        ("double", large[:2].double()),
    ]
    parts = [kinds, [("large", large), ("one", large[:1, :1])], [(name, -tensor.float()) for name, tensor in kinds]]
    return [[(name, tensor.to(device)) for name, tensor in part] for part in parts]


def read(pipe: Connection, device: torch.device, rank: int) -> None:
    """A reader: answers each message until None. A message is (handles, table), or "resources" of the process."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    pipe.send(reader_of(device))
    while (message := pipe.recv()) is not None:
        if message == "resources":
            pipe.send(resources())
            continue
        handles, table = message
        pipe.send([(name, tensor.to("cpu", copy=True)) for name, tensor in read_bucket(handles[rank], table, device)])


def resources() -> dict[str, int]:
    """What a leak of this process would add to."""
    maps = Path("/proc/self/maps").read_text()
    return {"files": len(os.listdir("/proc/self/fd")), "maps": maps.count("ligermodels-weights")}


@contextmanager
def readers(device: str, count: int = READERS) -> Iterator[list[Any]]:
    """Pipes to processes that read buckets into tensors on `device`."""
    context: Any = forks() if device == "cpu" else multiprocessing.get_context("spawn")
    pipes = []
    for rank in range(count):
        pipe, theirs = context.Pipe()
        context.Process(target=read, args=(theirs, torch.device(device), rank), daemon=True).start()
        theirs.close()
        pipes.append(pipe)
    try:
        yield pipes
    finally:
        for pipe in pipes:
            pipe.send(None)


def answers(pipes: list[Any], message: Any = None) -> list[Any]:
    """What each reader answers."""
    for pipe in pipes if message is not None else ():
        pipe.send(message)
    for pipe in pipes:
        assert pipe.poll(120), "a reader did not answer"
    return [pipe.recv() for pipe in pipes]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_readers_get_all_values(source: str, target: str) -> None:
    """Of each bucket, in one buffer; and repeated updates leave no memory, mapping or file behind in any process."""
    device, is_direct = torch.device(source), "cpu" not in (source, target)
    if target == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with readers(target) as pipes:
        described = answers(pipes)
        found: list[dict[str, int]] = []
        for _ in range(3):
            with SharedBuckets(device, described) as shared:
                assert shared.device.type == ("cuda" if is_direct else "cpu")
                for bucket in buckets(source):
                    for theirs in answers(pipes, shared.pack(bucket)):
                        assert [name for name, _ in theirs] == [name for name, _ in bucket]
                        for (_, tensor), (_, wanted) in zip(theirs, bucket, strict=True):
                            assert tensor.dtype == wanted.dtype and torch.equal(tensor, wanted.cpu())
            found.append(
                {
                    f"{rank} {name}": n
                    for rank, x in enumerate([resources(), *answers(pipes, "resources")])
                    for name, n in x.items()
                }
            )
            if device.type == "cuda":
                torch.cuda.ipc_collect()
                found[-1]["bytes"] = torch.cuda.memory_allocated()
        assert found[1] == found[0] == found[2]
        assert not any(number for name, number in found[0].items() if name.endswith("maps"))


def test_the_buffer_holds_one_bucket() -> None:
    """However many are sent: at most the largest."""
    with SharedBuckets(torch.device("cpu"), [reader_of(torch.device("cpu"))]) as shared:
        sizes = []
        for bucket in buckets("cpu"):
            ((_, _, nbytes),), table = shared.pack(bucket)
            sizes.append(nbytes)
            assert all(start % 64 == 0 for *_, start in table)
        largest = sum(-(-tensor.nbytes // 256) * 256 for _, tensor in buckets("cpu")[1])
        assert sizes[0] < sizes[1] == sizes[2] == largest


def test_errors() -> None:
    """A reader on another host; memory that cannot be opened, as after the sender has ended."""
    cpu = torch.device("cpu")
    with pytest.raises(InputError, match="engine: a worker runs on another host or in another container"):
        SharedBuckets(cpu, [reader_of(cpu), {**reader_of(cpu), "host": "elsewhere"}])
    with SharedBuckets(cpu, [reader_of(cpu)]) as shared:
        (handle,), table = shared.pack(buckets("cpu")[0])
    with pytest.raises(
        InputError, match=r"engine: a worker cannot open the trainer's shared memory, /proc/\d+/fd/\d+ "
    ):
        read_bucket(handle, table, cpu)
