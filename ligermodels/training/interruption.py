"""SIGTERM as a flag that a run polls where it can stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

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


def until(stop: Callable[[], bool], items: Iterable[T]) -> Iterator[T]:
    """The items. Raises Interrupted as soon as `stop` returns True."""
    for item in items:
        if stop():
            raise Interrupted
        yield item
