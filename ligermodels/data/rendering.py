"""Chat templates are rendered in a process of their own, with limits of time and memory.

A template is a program that comes with a checkpoint. jinja2's sandbox keeps it from Python's objects, but not from
loops that never end or texts that no memory holds, most of which are single calls of C (`'x' * 10 ** 11`). The process
starts at the first use (0.1 s), serves all templates of this one, and is started anew after a limit has ended it.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache, partial
from typing import IO, Any, NoReturn, cast

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ligermodels.errors import CheckpointError, InputError

SECONDS, BYTES = 10, 1 << 30
"""Limits of one rendering: of time, and of the memory of the process."""

START, END = "\ufdd0", "\ufdd1"
"""What `{% generation %}` writes around a text: noncharacters, which are not valid in text and which no template trims.
"""

# -- in this process ---------------------------------------------------------------------------------------------------


def render(name: str, source: str, now: datetime, variables: Mapping[str, Any] | None) -> str:
    """The text of the template `source` with `variables`, which are what JSON can hold. Without any it is compiled.

    Args:
        name: of the template, for messages.
        now: what `strftime_now` writes.

    Raises:
        CheckpointError: it is no jinja2 template, or needs more than SECONDS or BYTES.
        InputError: it refuses the variables, or JSON cannot hold them.
    """
    (answer,) = render_all(name, source, now, [variables])
    return text_of(name, answer)


def render_all(
    name: str, source: str, now: datetime, variables: Sequence[Mapping[str, Any] | None]
) -> list[tuple[str, str]]:
    """What `text_of` takes, for each of several `variables`; arguments are as of `render`.

    They take one exchange with the process. The limit of time is that of each rendering, and that of memory of all of
    them; where one of several ends the process the result is empty, and each can still be rendered alone.

    Raises InputError where JSON cannot hold the variables.
    """
    try:
        known = json.dumps([SECONDS, source, now.isoformat(), variables], default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{name}: messages and variables must be what JSON can hold: {error}") from None
    found, limit = _process.ask(f"{len(variables)} {known}", len(variables))
    if limit is None:
        return found
    return [("template", limit)] if len(variables) == 1 else []


def text_of(name: str, answer: tuple[str, str]) -> str:
    """The text of what `render_all` gives. Raises as `render`."""
    kind, text = answer
    if kind == "text":
        return text
    raise (InputError if kind == "chat" else CheckpointError)(f"{name}: {text}")


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"got a {type(value).__name__}")


class _Process:
    """The process that renders, one request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None

    def ask(self, request: str, count: int) -> tuple[list[tuple[str, str]], str | None]:
        """What `_answer` gives, for each of the `count` variables in the request, and None; or, where the process has
        ended, the limit that ended it."""
        with self._lock:
            process = self._running = self._running or self._start()
            stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
            try:
                stdin.write(f"{request}\n".encode())
                stdin.flush()
                lines = [line for _ in range(count) if (line := stdout.readline()).endswith(b"\n")]
            except BrokenPipeError:
                lines = []
            except BaseException:  # Ctrl-C: its answer would be taken for that of the next request
                self._stop()
                raise
            if len(lines) == count:
                return [(kind, text) for kind, text in map(json.loads, lines)], None
            code = self._stop()
        slow = code == -signal.SIGALRM
        return [], f"takes more than {SECONDS} s" if slow else f"ended the process that renders it ({code})"

    def _start(self) -> subprocess.Popen[bytes]:
        program = "import sys; sys.path[:] = sys.argv[1:]; from ligermodels.data.rendering import serve; serve()"
        command = [sys.executable, "-c", program, *sys.path]
        pipe = subprocess.PIPE
        # A session of its own: Ctrl-C is for the process that started it.
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True)

    def _stop(self) -> int:
        """End the process, if it has not ended, and return its exit code."""
        process, self._running = self._running, None
        if process is None:
            return 0
        process.kill()  # One that has ended keeps its exit code.
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):
                cast(IO[bytes], pipe).close()
        return process.wait()

    close = _stop


_process = _Process()
atexit.register(_process.close)


def _after_fork() -> None:
    global _process
    _process = _Process()  # The other one answers the process that was forked.


os.register_at_fork(after_in_child=_after_fork)

# -- in the other process ----------------------------------------------------------------------------------------------


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks what the assistant generates."""

    tags = {"generation"}  # noqa: RUF012  (as the base class declares it)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
        return f"{START}{caller()}{END}"


def serve() -> None:
    """Answer requests, a line for each of a request's variables, until standard input ends."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)  # `ulimit -v` may have set one, which cannot be raised
    limit = BYTES if hard == resource.RLIM_INFINITY else min(BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    too_large = "template", f"takes more than {BYTES >> 20} MiB of memory"
    for line in sys.stdin.buffer:
        count, _, known = line.partition(b" ")
        try:
            seconds, source, now, variables = json.loads(known)
        except MemoryError:
            if int(count) > 1:
                return  # Each may have enough alone.
            seconds, source, now, variables = 0, None, "", [None]
        for each in variables:
            signal.setitimer(signal.ITIMER_REAL, seconds)  # Its signal ends the process, whatever that is at.
            try:
                answer = json.dumps(too_large if source is None else _answer(source, now, each))
            except MemoryError:
                answer = json.dumps(too_large)
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.stdout.buffer.write(f"{answer}\n".encode())
        sys.stdout.buffer.flush()


def _answer(source: str, now: str, variables: dict[str, Any] | None) -> tuple[str, str]:
    """("text", what was rendered), or what is wrong with the "template", or with the "chat"."""
    try:
        template = _compiled(source)
    except MemoryError:
        raise
    except Exception as error:  # jinja2 and Python's compiler may raise anything
        return "template", f"not a jinja2 template: {error or type(error).__name__}"
    if variables is None:
        return "text", ""
    try:
        return "text", template.render(strftime_now=datetime.fromisoformat(now).strftime, **variables)
    except MemoryError:
        raise
    except Exception as error:  # templates may raise anything
        return "chat", f"refuses the chat: {str(error)[:1000] or type(error).__name__}"


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    # jinja2's own escapes <, >, & and ' for HTML.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
