"""Errors for tensors that are larger than memory, before memory is allocated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ligermodels.errors import InputError, LigerModelsError
from ligermodels.ops.runtime.library import is_fake

CGROUP = Path("/sys/fs/cgroup/memory.max")


def total_memory(device: torch.device) -> int | None:
    """Bytes of memory of a device, used or free; None if torch cannot tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type != "cpu":
        return None
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(size, int(CGROUP.read_text()))
    except (OSError, ValueError):  # no cgroup, or "max"
        return size


@contextmanager
def memory_for(
    what: str, device: torch.device, needed: int = 0, kind: type[LigerModelsError] = InputError
) -> Iterator[None]:
    """Context manager for an allocation that raises an error with the number of bytes if memory is too small.

    Args:
        what: name of the tensors, for the message.
        device: the device.
        needed: bytes, if known; otherwise 0.
        kind: class of the error.
    """
    total = total_memory(device)
    if total is not None and needed > total:
        raise kind(f"{what} needs {needed:,} bytes, and {device} has {total:,} in all")
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # of a GPU: its message is complete, and callers catch this class
    except (MemoryError, RuntimeError, TypeError) as error:
        # torch raises TypeError for a size beyond int64, and RuntimeError for a size beyond the memory.
        text = " ".join(str(error).split())
        if isinstance(error, MemoryError) or any(part in text for part in ("can't allocate memory", "verflow")):
            least = text.partition("you tried to allocate ")[2].partition(" bytes")[0]
            size = f"at least {int(least):,}" if least.isdigit() else "too many"
            raise kind(f"{what} needs {size} bytes, more memory than there is on {device}") from None
        raise


def own_storage(view: Tensor) -> Tensor:
    """The memory of a view as a tensor with a storage of its own, that begins where the view begins.

    For the part of a decoding state that one layer changes. If an op changes two inputs with one storage, Inductor
    (torch 2.13) copies one of them from the wrong place in the storage, and decoding reads wrong keys and values.
    """
    return view if is_fake(view) else torch.from_dlpack(view)
