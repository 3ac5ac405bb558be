"""SIGTERM and Ctrl-C as a flag that a run polls where it can stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

SAVING = "interrupted: finishing the step and saving a checkpoint; Ctrl-C again ends the run at once"


class Interrupted(Exception):
    """A signal arrived; the current evaluation is abandoned."""


class Arrived:
    """Whether SIGTERM or SIGINT (Ctrl-C) has arrived, and whether the first one was Ctrl-C."""

    def __init__(self) -> None:
        self._first: int | None = None

    def __call__(self) -> bool:
        return self._first is not None

    @property
    def is_ctrl_c(self) -> bool:
        return self._first == signal.SIGINT

    def handle(self, number: int, _: object) -> None:
        """Note the signal. Ctrl-C for the second time raises KeyboardInterrupt; not under torchrun, which sends its
        processes a signal that the terminal has sent them already."""
        if self._first is None:
            self._first = number
        elif number == signal.SIGINT and int(os.environ.get("WORLD_SIZE", 1)) == 1:
            raise KeyboardInterrupt


@contextmanager
def stop_signals(say: Callable[[str], object]) -> Iterator[Arrived]:
    """Whether SIGTERM or Ctrl-C has arrived. Meanwhile neither ends the process, until a second Ctrl-C; `say` gets a
    message about that. A handler of SIGINT that is not Python's own is left in place."""
    arrived, before = Arrived(), dict[int, Any]()

    def handle(number: int, frame: object) -> None:
        is_first = not arrived()
        arrived.handle(number, frame)
        if is_first and arrived.is_ctrl_c:
            # In a thread of its own: the signal may have come in the middle of other output.
            threading.Thread(target=say, args=(SAVING,)).start()

    if threading.current_thread() is threading.main_thread():  # other threads cannot handle signals
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, handle)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            before[signal.SIGINT] = signal.signal(signal.SIGINT, handle)
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
