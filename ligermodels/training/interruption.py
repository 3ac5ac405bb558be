"""SIGTERM as a question that is asked where a run can stop, not as the end of the process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Interrupted(Exception):
    """SIGTERM came, and what was under way is to be done again."""


@contextmanager
def sigterm() -> Iterator[Callable[[], bool]]:
    """A function that tells whether SIGTERM has come, which meanwhile does not end the process."""
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # Only that one may handle signals.
        yield came.is_set
        return
    before = signal.signal(signal.SIGTERM, lambda *_: came.set())
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGTERM, before)


def until(stop: Callable[[], bool], items: Iterable[T]) -> Iterator[T]:
    """The items, as long as `stop` does not tell to stop. Raises Interrupted then."""
    for item in items:
        if stop():
            raise Interrupted
        yield item
