"""SIGTERM, SIGHUP and Ctrl-C as a flag that a run reads after each step."""

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

from ligermodels.training.callback import Callback

T = TypeVar("T")

SAVING = "interrupted: finishing the step and saving a checkpoint; Ctrl-C again ends the run at once"


class Interrupted(Exception):
    """A signal arrived; the current evaluation is abandoned."""


class Arrived:
    """Whether SIGTERM, SIGHUP or SIGINT (Ctrl-C) has arrived, and whether the first one was Ctrl-C."""

    def __init__(self) -> None:
        self._first: int | None = None

    def __call__(self) -> bool:
        return self._first is not None

    @property
    def is_ctrl_c(self) -> bool:
        return self._first == signal.SIGINT

    def handle(self, number: int, _: object) -> None:
        """Note the signal. A second Ctrl-C raises KeyboardInterrupt; not under torchrun: it repeats the signal of
        the terminal."""
        if self._first is None:
            self._first = number
        elif number == signal.SIGINT and int(os.environ.get("WORLD_SIZE", 1)) == 1:
            raise KeyboardInterrupt


@contextmanager
def stop_signals(say: Callable[[str], object]) -> Iterator[Arrived]:
    """Catch SIGTERM, SIGHUP (of a terminal that is closed) and Ctrl-C: they set a flag, and only a second Ctrl-C ends
    the process; `say` is called with a message about this. A handler of SIGINT or SIGHUP other than Python's default
    stays in place, as under nohup, which ignores SIGHUP."""
    arrived, before = Arrived(), dict[int, Any]()

    def handle(number: int, frame: object) -> None:
        is_first = not arrived()
        arrived.handle(number, frame)
        if is_first and arrived.is_ctrl_c:
            # In another thread: the signal may have arrived in the middle of other output.
            threading.Thread(target=say, args=(SAVING,)).start()

    if threading.current_thread() is threading.main_thread():  # other threads cannot handle signals
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, handle)
        for caught, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
            if signal.getsignal(caught) is default:
                before[caught] = signal.signal(caught, handle)
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class AgreedStop(Callback):
    """Ends training after a signal: `should_stop` returns True on all ranks once a signal has arrived on one of them.

    All ranks must call it equally often. With several ranks a call returns the answer to the previous call, so that no
    rank waits for another.
    """

    def __init__(self, arrived: Callable[[], bool]) -> None:
        self._arrived, self._agreed = arrived, False
        self._flag: Tensor = torch.zeros(1)
        self._pending: dist.Work | None = None

    def should_stop(self) -> bool:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._arrived()
        if self._pending is not None:
            self._pending.wait()
            self._agreed = self._agreed or bool(self._flag)
        self._flag = torch.tensor([float(self._arrived())])
        self._pending = dist.all_reduce(self._flag, dist.ReduceOp.MAX, async_op=True)
        return self._agreed


def until(stop: Callable[[], bool], items: Iterable[T]) -> Iterator[T]:
    """Iterate over `items`. Raises Interrupted as soon as `stop` returns True."""
    for item in items:
        if stop():
            raise Interrupted
        yield item
