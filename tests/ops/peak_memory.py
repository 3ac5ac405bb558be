"""The peak memory of a linear head's loss, measured in a process of its own."""

import ctypes
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from children import forks
from loss_cases import targets

from ligermodels import ops

CLEAR = Path("/proc/self/clear_refs")
needs_linux = pytest.mark.skipif(not CLEAR.exists(), reason="needs Linux's record of peak memory")
T, H, V = 512, 32, 51200
ALLOWANCE = 5 * 2**20
"""What the matrix library packs, and the allocator's own."""
M_MMAP_THRESHOLD = -3
"""glibc's number of the size from which it maps memory; it raises the size by itself until one is given."""


def beyond_gradients(loss: str, dtype: str, budget: int, *, trained: bool = True, summed: bool = True) -> int:
    """Bytes at the peak of a forward and a backward pass, beyond the gradients and the sum of the weight's.

    loss: an expression of `ops`, `hidden` (T, H), `weight` (V, H), `target` (T,), `teacher` (a hidden and a weight of
        the same sizes) and `budget`. trained: whether the weight has a gradient, and `summed`, over chunks.
    """
    here, there = multiprocessing.Pipe(duplex=False)
    child = forks().Process(target=_measure, args=(there, loss, dtype, budget, trained, summed))
    child.start()
    there.close()
    try:
        used: int = here.recv()
    finally:
        child.join()
    return used


def _peak() -> int:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def _measure(answer: Connection, loss: str, dtype_name: str, budget: int, trained: bool, summed: bool) -> None:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 131072)
    torch.set_num_threads(1)  # each thread of the matrix library packs its own
    torch.backends.mkldnn.enabled = False  # it widens 16-bit operands to memory of its own
    dtype = getattr(torch, dtype_name)
    for rows, classes, limit in ((8, 512, 10**6), (T, V, budget)):  # a small one first, for what torch keeps
        hidden = torch.randn(rows, H, dtype=dtype, requires_grad=True)
        weight = torch.randn(classes, H, dtype=dtype, requires_grad=trained)
        names = {"teacher": [torch.randn(n, H, dtype=dtype) for n in (rows, classes)], "budget": limit, "ops": ops}
        names |= {"hidden": hidden, "weight": weight, "target": targets((rows,), classes, hidden.device)}
        CLEAR.write_text("5")
        before = _peak()
        eval(loss, names).backward()
        used = _peak() - before
    wide = 4 * weight.numel() if summed and dtype != torch.float32 else 0
    answer.send(used - hidden.nbytes - (weight.nbytes + wide if trained else 0))
