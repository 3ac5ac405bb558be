"""An end to waiting for a hub that stalls, or sends a few bytes a second."""

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
"""How long a hub may send less than RATE, where the environment's VARIABLE says nothing else."""
RATE = 1024
"""Bytes a second."""


def timeout() -> float:
    """The seconds that VARIABLE says, or SECONDS. Raises HubError for what is no number above 0."""
    text = os.environ.get(VARIABLE, "")
    try:
        found = float(text or SECONDS)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e9:
        raise HubError(f"{VARIABLE}: must be a number of seconds above 0, got {text!r}")
    return found


@contextmanager
def patient(name: str) -> Iterator[None]:
    """Meanwhile HubError, naming the repository, ends requests of huggingface_hub once no answer has been complete and
    less than RATE has arrived for `timeout()` seconds. huggingface_hub's own timeouts are of single reads and attempts:
    one byte in each of them is enough to go on for ever. Transfers by Xet have limits of their own.
    """
    watch, client = _Watch(name, timeout()), get_session()
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks.get("request", ()), watch.before],
        "response": [*hooks.get("response", ()), watch.within],
    }
    try:
        yield
    finally:  # another thread may have added its own since, or taken its own away
        client.event_hooks = {
            event: [hook for hook in found if hook not in (watch.before, watch.within)]
            for event, found in client.event_hooks.items()
        }


class _Watch:
    """Bytes since the last time that all was well."""

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
                f"{self.name}: the hub has sent {self.bytes:,} bytes in {waited:.0f} s; run again to go on, or give it "
                f"more time by {VARIABLE}"
            )
        self.since, self.bytes = time.monotonic(), 0

    def before(self, request: Any) -> None:
        """Of each request, and each attempt to repeat one."""
        if self.waiting:
            self.check()
        else:  # what came between was no waiting for an answer: a transfer by Xet, say
            self.restart()
        self.waiting = True
        limits = request.extensions.get("timeout", {})  # of connecting, reading and the like: some have none
        request.extensions["timeout"] = {
            each: self.seconds if limits.get(each) is None else limits[each]
            for each in ("connect", "read", "write", "pool")
        }

    def within(self, response: Any) -> None:
        """Watch the body of an answer."""
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
