"""Processes that encode documents.

They are new Python processes, not forks, so threads, locks and CUDA contexts of this process do not matter,
and they import neither the user's main module nor torch. They end with this process, however it ends, since their
standard input ends then. They run in sessions of their own, so that Ctrl-C reaches only this process.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, cast

from ligermodels.data.encoding import Content, Encoded, Encoder
from ligermodels.data.rendering import end_process, start_process
from ligermodels.errors import InputError, LigerModelsError

MOST = 16
"""Largest default number of processes: more than this are seldom needed to keep a GPU busy."""

Task = tuple[Sequence[Content], "Future[list[Encoded]]"]


def default_count() -> int:
    """CPUs that this process may use, divided among the ranks of the machine (LOCAL_WORLD_SIZE), from 1 to MOST."""
    cpus = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with suppress(OSError, ValueError):  # the limit of a container
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cpus = min(cpus, int(quota) / int(period))
    return max(1, min(MOST, int(cpus / local_ranks())))


def local_ranks() -> int:
    """Number of ranks on this machine."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(text)) if text.isdigit() else 1


class Workers:
    """Processes that encode documents. They start with the first tasks.

    Args:
        encoder: encodes the documents.
        count: number of processes.
    """

    def __init__(self, encoder: Encoder, count: int) -> None:
        self._encoder, self._tasks = pickle.dumps(encoder), SimpleQueue[Task | None]()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._is_closed = False
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, contents: Sequence[Content]) -> Future[list[Encoded]]:
        """Encode documents: see `Encoder.documents`. The result raises InputError if a process ends unexpectedly."""
        future: Future[list[Encoded]] = Future()
        if self._is_closed:
            future.cancel()
        self._tasks.put((contents, future))
        return future

    def close(self) -> None:
        """End the processes. Tasks that have not ended are cancelled."""
        self._is_closed = True
        for process in list(self._processes):
            process.kill()
        for _ in self._threads:
            self._tasks.put(None)

    def _serve(self) -> None:
        """Give tasks to a process, in a thread of its own."""
        process: subprocess.Popen[bytes] | None = None
        while (task := self._tasks.get()) is not None:
            contents, future = task
            if self._is_closed or not future.set_running_or_notify_cancel():
                future.cancel()
                continue
            try:
                try:
                    process = process or self._start()
                    answer = _ask(process, contents)
                except (EOFError, OSError, pickle.UnpicklingError):  # it was killed: once more, in another process
                    self._end(process)
                    process = None if self._is_closed else self._start()
                    answer = _ask(process, contents) if process else InputError("tokenising was ended")
            except (EOFError, OSError, pickle.UnpicklingError) as error:
                code = self._end(process)
                process = None
                answer = InputError(
                    f"data: a process that tokenises ended unexpectedly, with code {code} ({error or 'no answer'}); it "
                    "may have run out of memory: give a smaller dataset_num_proc, or 0 to tokenise in this process"
                )
            except BaseException as error:  # the waiting thread must not wait for ever
                answer = error
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        self._end(process)

    def _start(self) -> subprocess.Popen[bytes]:
        process = start_process("workers", env={**os.environ, "TOKENIZERS_PARALLELISM": "false"})
        self._processes.add(process)
        stdin = cast(IO[bytes], process.stdin)
        stdin.write(self._encoder)
        return process

    def _end(self, process: subprocess.Popen[bytes] | None) -> int | None:
        """End a process, and return its exit code."""
        if process is None:
            return None
        self._processes.discard(process)
        return end_process(process)


def _ask(process: subprocess.Popen[bytes], contents: Sequence[Content]) -> Any:
    """The encoded documents, or an exception."""
    stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
    stdin.write(pickle.dumps(contents))
    stdin.flush()
    return pickle.load(stdout)


# -- in the other process ----------------------------------------------------------------------------------------------


def serve() -> None:
    """Encode documents from standard input until it ends."""
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of libraries go to standard error
    encoder: Encoder = pickle.load(tasks)
    answer: Any
    with suppress(EOFError, BrokenPipeError):
        while True:
            contents = pickle.load(tasks)
            try:
                answer = encoder.documents(contents)
            except LigerModelsError as error:
                answer = error
            answers.write(pickle.dumps(answer))
            answers.flush()
    os._exit(0)  # without flushing pipes that nobody reads
