"""SIGTERM as a flag that a run polls where it can stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Interrupted(Exception):
    """SIGTERM arrived; the current evaluation is abandoned."""


@contextmanager
def sigterm() -> Iterator[Callable[[], bool]]:
    """A function that returns whether SIGTERM has arrived. The signal does not end the process meanwhile."""
    arrived = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # other threads cannot handle signals
        yield arrived.is_set
        return
    before = signal.signal(signal.SIGTERM, lambda *_: arrived.set())
    try:
        yield arrived.is_set
    finally:
        signal.signal(signal.SIGTERM, before)


class AgreedStop:
    """`arrived`, agreed on by all ranks: True once it was on one of them. All ranks call it equally often.

    A call gives what was known at the call before, so that no rank waits for another.
    """

    def __init__(self, arrived: Callable[[], bool]) -> None:
        self._arrived, self._found = arrived, False
        self._flag: Tensor = torch.zeros(1)
        self._pending: dist.Work | None = None

    def __call__(self) -> bool:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._arrived()
        if self._pending is not None:
            self._pending.wait()
            self._found = self._found or bool(self._flag)
        self._flag = torch.tensor([float(self._arrived())])
        self._pending = dist.all_reduce(self._flag, dist.ReduceOp.MAX, async_op=True)
        return self._found


def until(stop: Callable[[], bool], items: Iterable[T]) -> Iterator[T]:
    """The items. Raises Interrupted as soon as `stop` returns True."""
    for item in items:
        if stop():
            raise Interrupted
        yield item
