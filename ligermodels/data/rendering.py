"""Chat templates are rendered in a separate process, with limits of time and memory.

A template is a program that comes with a checkpoint. jinja2's sandbox protects Python's objects, but does not stop
endless loops, or texts larger than memory, often made by a single C call (`'x' * 10 ** 11`). The process starts at the
first use (0.1 s), renders all templates, and starts again after a limit has ended it.
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
from functools import lru_cache
from typing import IO, Any, NoReturn, cast

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ligermodels.errors import CheckpointError, InputError

SECONDS, BYTES = 10, 1 << 30
"""Limits of one rendering, in seconds, and of the memory of the process."""

START, END = "\ufdd0", "\ufdd1"
"""Marks that `{% generation %}` writes around a text: Unicode noncharacters, so that no text has and no template trims
them."""

# -- in this process ---------------------------------------------------------------------------------------------------


def render(name: str, source: str, now: datetime, variables: Mapping[str, Any] | None) -> str:
    """Render a template.

    Args:
        name: name of the template, for messages.
        source: the jinja2 template.
        now: the time that `strftime_now` writes in the template.
        variables: variables of the template, values that JSON can encode; None only compiles the template.

    Returns:
        The text; "" for None.

    Raises:
        CheckpointError: `source` is no jinja2 template, or needs more than SECONDS or BYTES.
        InputError: the template refuses the variables, or JSON cannot encode them.
    """
    (answer,) = render_all(name, source, now, [variables])
    return text_of_answer(name, answer)


def render_all(
    name: str, source: str, now: datetime, variables: Sequence[Mapping[str, Any] | None]
) -> list[tuple[str, str]]:
    """Render a template several times, in one exchange with the process.

    The time limit applies to each rendering, the memory limit to all together.

    Args:
        name: name of the template, for messages.
        source: the jinja2 template.
        now: the time that `strftime_now` writes in the template.
        variables: for each rendering the variables of the template, values that JSON can encode, or None.

    Returns:
        An answer per rendering, for `text_of_answer`. Empty if one of several renderings ended the process: render
        each alone.

    Raises:
        InputError: JSON cannot encode the variables.
    """
    try:
        request = json.dumps([SECONDS, source, now.isoformat(), variables], default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{name}: messages and variables must be values that JSON can encode: {error}") from None
    answers, limit = _process.ask(f"{len(variables)} {request}", len(variables))
    if limit is None:
        return answers
    return [("template", limit)] if len(variables) == 1 else []


def text_of_answer(name: str, answer: tuple[str, str]) -> str:
    """The text of an answer of `render_all`. Raises InputError or CheckpointError, with `name`, if rendering failed."""
    status, text = answer
    if status == "text":
        return text
    raise (InputError if status == "chat" else CheckpointError)(f"{name}: {text}")


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"got a {type(value).__name__}")


def start_process(module: str, **options: Any) -> subprocess.Popen[bytes]:
    """Run `serve` of a module of this folder in a new Python process, with pipes for its input and output.

    It is in a new session, so that Ctrl-C reaches only this process. `options` are options of Popen.
    """
    program = f"import sys; sys.path[:] = sys.argv[1:]; from ligermodels.data.{module} import serve; serve()"
    command, pipe = [sys.executable, "-c", program, *sys.path], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True, **options)


def end_process(process: subprocess.Popen[bytes]) -> int:
    """End a process with pipes for its input and output, and return its exit code."""
    process.kill()  # A process that has ended keeps its exit code.
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            cast(IO[bytes], pipe).close()
    return process.wait()


class _Process:
    """The rendering process; it answers one request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None

    def ask(self, request: str, count: int) -> tuple[list[tuple[str, str]], str | None]:
        """Answers to the `count` renderings of a request, and None; or none, and the limit that ended the process."""
        with self._lock:
            if self._running is not None and self._running.poll() is not None:
                self._stop()  # it was killed while it waited for a request
            process = self._running = self._running or start_process("rendering", stderr=subprocess.DEVNULL)
            stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
            try:
                stdin.write(f"{request}\n".encode())
                stdin.flush()
                lines = [line for _ in range(count) if (line := stdout.readline()).endswith(b"\n")]
            except BrokenPipeError:
                lines = []
            except BaseException:  # Ctrl-C: the next request would read the answer to this one
                self._stop()
                raise
            if len(lines) == count:
                return [(status, text) for status, text in map(json.loads, lines)], None
            code = self._stop()
        slow = code == -signal.SIGALRM
        return [], f"takes more than {SECONDS} s" if slow else f"ended the process that renders it ({code})"

    def _stop(self) -> int:
        """End the process, if it still runs, and return its exit code."""
        process, self._running = self._running, None
        return 0 if process is None else end_process(process)

    close = _stop


_process = _Process()
atexit.register(_process.close)


def _after_fork() -> None:
    global _process
    _process = _Process()  # The existing process answers the parent.


os.register_at_fork(after_in_child=_after_fork)

# -- in the other process ----------------------------------------------------------------------------------------------


class _GenerationTag(Extension):
    """The tag `{% generation %} ... {% endgeneration %}`: it marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012  (as the base class declares it)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
        return f"{START}{caller()}{END}"


def serve() -> None:
    """Answer requests until standard input ends, with a line for each rendering."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)  # `ulimit -v` may have set a limit, and it cannot be raised
    limit = BYTES if hard == resource.RLIM_INFINITY else min(BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    too_large = "template", f"takes more than {BYTES >> 20} MiB of memory"
    for line in sys.stdin.buffer:
        count, _, request = line.partition(b" ")
        try:
            seconds, source, now, renderings = json.loads(request)
        except MemoryError:
            if int(count) > 1:
                return  # The memory may be enough for each rendering alone.
            seconds, source, now, renderings = 0, None, "", [None]
        for variables in renderings:
            signal.setitimer(signal.ITIMER_REAL, seconds)  # The signal ends the process even within a C call.
            try:
                answer = json.dumps(too_large if source is None else _answer(source, now, variables))
            except MemoryError:
                answer = json.dumps(too_large)
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.stdout.buffer.write(f"{answer}\n".encode())
        sys.stdout.buffer.flush()


def _answer(source: str, now: str, variables: dict[str, Any] | None) -> tuple[str, str]:
    """("text", the rendered text), or ("template" or "chat", the error)."""
    try:
        template = _compiled(source)
    except MemoryError:
        raise
    except Exception as error:  # jinja2 and Python's compiler may raise any error
        return "template", f"not a jinja2 template: {error or type(error).__name__}"
    if variables is None:
        return "text", ""
    try:
        return "text", template.render(strftime_now=datetime.fromisoformat(now).strftime, **variables)
    except MemoryError:
        raise
    except Exception as error:  # templates may raise any error
        return "chat", f"refuses the chat: {str(error)[:1000] or type(error).__name__}"


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` with transformers' arguments; jinja2's own escapes <, >, & and ' for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
