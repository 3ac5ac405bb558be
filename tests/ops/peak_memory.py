"""The peak memory of a linear head's loss, measured in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CLEAR = Path("/proc/self/clear_refs")
needs_linux = pytest.mark.skipif(not CLEAR.exists(), reason="needs Linux's record of peak memory")
T, H, V = 512, 32, 51200
ALLOWANCE = 5 * 2**20
"""What the matrix library packs, and the allocator's own."""


def beyond_gradients(loss: str, dtype: str, budget: int, *, trained: bool = True, summed: bool = True) -> int:
    """Bytes at the peak of a forward and a backward pass, beyond the gradients and the sum of the weight's.

    loss: an expression of `ops`, `hidden` (T, H), `weight` (V, H), `target` (T,), `teacher` (a hidden and a weight of
        the same sizes) and `budget`. trained: whether the weight has a gradient, and `summed`, over chunks.
    """
    run = subprocess.run(
        [sys.executable, __file__, loss, dtype, str(budget), str(int(trained)), str(int(summed))],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        # Each thread of the matrix library packs its own; glibc else raises the size from which it maps memory.
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return int(run.stdout.split()[-1])


def _peak() -> int:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def _main(loss: str, dtype_name: str, budget: str, trained: str, summed: str) -> None:
    from loss_cases import targets

    from ligermodels import ops

    torch.backends.mkldnn.enabled = False  # it widens 16-bit operands to memory of its own
    dtype = getattr(torch, dtype_name)
    for rows, classes, limit in ((8, 512, 10**6), (T, V, int(budget))):  # a small one first, for what torch keeps
        hidden = torch.randn(rows, H, dtype=dtype, requires_grad=True)
        weight = torch.randn(classes, H, dtype=dtype, requires_grad=trained == "1")
        names = {"teacher": [torch.randn(n, H, dtype=dtype) for n in (rows, classes)], "budget": limit, "ops": ops}
        names |= {"hidden": hidden, "weight": weight, "target": targets((rows,), classes, hidden.device)}
        CLEAR.write_text("5")
        before = _peak()
        eval(loss, names).backward()
        used = _peak() - before
    wide = 4 * weight.numel() if summed == "1" and dtype != torch.float32 else 0
    print(used - hidden.nbytes - (weight.nbytes + wide if weight.requires_grad else 0))


if __name__ == "__main__":
    _main(*sys.argv[1:])
