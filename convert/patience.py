"""A time limit for a hub that stalls or sends only a few bytes per second."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub.utils import get_session

from ligermodels.errors import HubError

VARIABLE = "LIGERMODELS_HUB_TIMEOUT"
SECONDS = 60.0
"""Default of VARIABLE: seconds for which the hub may send less than RATE."""
RATE = 1024
"""Bytes per second."""


def timeout() -> float:
    """Seconds from the environment's VARIABLE, or SECONDS. HubError unless it is a number above 0."""
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text or SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise HubError(f"{VARIABLE}: must be a number of seconds above 0, got {text!r}")
    return seconds


@contextmanager
def patient(name: str) -> Iterator[None]:
    """Context manager that ends requests of huggingface_hub if the hub is too slow.

    It raises HubError, naming the repository `name`, after `timeout()` seconds without a complete answer and with fewer
    than RATE bytes per second. huggingface_hub's own timeouts are for single reads and attempts, so a byte in each of
    them lets a request run forever. Transfers by Xet have their own limits.
    """
    watch, client = _Watch(name, timeout()), get_session()
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks.get("request", ()), watch.before],
        "response": [*hooks.get("response", ()), watch.within],
    }
    try:
        yield
    finally:  # another thread may have added or removed hooks meanwhile
        client.event_hooks = {
            event: [hook for hook in current if hook not in (watch.before, watch.within)]
            for event, current in client.event_hooks.items()
        }


class _Watch:
    """Counts bytes since the last answer was complete or the rate was high enough."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds
        self.restart()

    def restart(self) -> None:
        self.since, self.bytes, self.waiting = time.monotonic(), 0, False

    def check(self) -> None:
        if (waited := time.monotonic() - self.since) < self.seconds:
            return
        if self.bytes < RATE * waited:
            raise HubError(
                f"{self.name}: the hub has sent {self.bytes:,} bytes in {waited:.0f} s; run again to continue, or "
                f"set {VARIABLE} to more seconds"
            )
        self.since, self.bytes = time.monotonic(), 0

    def before(self, request: Any) -> None:
        """Hook for each request and each repeated attempt."""
        if self.waiting:
            self.check()
        else:  # time before this request was not spent waiting for an answer (it may have been a transfer by Xet)
            self.restart()
        self.waiting = True
        limits = request.extensions.get("timeout", {})  # of connecting, reading, ...; some are unset
        request.extensions["timeout"] = {
            phase: self.seconds if limits.get(phase) is None else limits[phase]
            for phase in ("connect", "read", "write", "pool")
        }

    def within(self, response: Any) -> None:
        """Hook for each response: watch its body."""
        if response.status_code >= 400:
            return self.restart()
        base: Any = importlib.import_module(type(response).__module__.partition(".")[0]).SyncByteStream
        stream, watch = response.stream, self

        class Watched(base):
            def __iter__(self) -> Iterator[bytes]:
                for part in stream:
                    watch.bytes += len(part)
                    watch.check()
                    yield part
                watch.restart()

            def close(self) -> None:
                stream.close()

        response.stream = Watched()
