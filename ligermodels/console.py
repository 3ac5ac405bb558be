"""Output of commands: tables and progress bars on a terminal, plain lines elsewhere."""

import errno
import io
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text


class ProgressUpdate(Protocol):
    """Called with the amount done, the total, and an optional note."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


def console(*, stderr: bool = False) -> Console:
    """A console for standard output or standard error. Lines are wrapped only on a terminal."""
    screen = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not screen.is_terminal:
        screen.width = 1000
    return screen


class _Terminal(io.FileIO):
    """A terminal that may be closed while the process runs: later output is dropped, where it would be an error."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(data).nbytes


def outlive_terminal() -> None:
    """Replace `sys.stdout` and `sys.stderr`, where they are a terminal, by streams that drop what is written after the
    terminal was closed. A run can so write its checkpoint."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.isatty():
            stream.flush()
            raw = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True))


def is_first_rank() -> bool:
    """Whether this is the only process, or rank 0 of torchrun."""
    return os.environ.get("RANK", "0") == "0"


def say(message: str) -> None:
    """Print a line on standard error; results go to standard output."""
    screen = console(stderr=True)
    if screen.is_jupyter:  # rich would show a block of HTML for each line
        print(message, file=sys.stderr)
    else:
        screen.print(message, soft_wrap=True)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int] = ()) -> None:
    """Print a table on standard output.

    If it is wider than the terminal, text is folded, and columns that do not fit go into further tables below, with the
    first column repeated. Numbers are not folded.

    Args:
        columns: titles of the columns.
        rows: the cells of each row.
        numbers: indices of the columns of numbers, to align right.
    """
    screen, rows, right = console(), list(rows), set(numbers)
    least = [_least_width(column, (row[i] for row in rows), i in right) for i, column in enumerate(columns)]
    for group in _groups(least, screen.width):
        table = Table(box=SIMPLE_HEAD if screen.is_terminal else None, pad_edge=False, show_header=any(columns))
        for i in group:
            justify: Literal["left", "right"] = "right" if i in right else "left"
            table.add_column(columns[i], justify=justify, overflow="fold", min_width=least[i])
        for row in rows:
            table.add_row(*(row[i] for i in group))
        with screen.capture() as shown:
            screen.print(table)
        for line in shown.get().splitlines():
            screen.out(line.rstrip(), highlight=False)


GAP = 3
"""Largest number of characters between two columns and around a table."""
FOLDED = 16
"""Text in table cells is folded to at least this number of characters."""


def _least_width(column: str, cells: Iterable[str], is_number: bool) -> int:
    """Width of a column: its longest number, or FOLDED characters of its longest text, and each word of its title."""
    longest = max(map(cell_len, cells), default=0)
    return max(longest if is_number else min(longest, FOLDED), *map(cell_len, column.split()), 1)


def _groups(widths: Sequence[int], width: int) -> list[list[int]]:
    """The columns of each table, for as few tables as possible: the first column, and others that fit the width."""
    groups, used = [[0]], GAP + widths[0]
    for i in range(1, len(widths)):
        if used + GAP + widths[i] > width and len(groups[-1]) > 1:
            groups.append([0])
            used = GAP + widths[0]
        groups[-1].append(i)
        used += GAP + widths[i]
    return groups


def print_json(content: Any) -> None:
    """Print `content` on standard output as JSON; nan and infinity become null."""
    print(json.dumps(_finite(content), ensure_ascii=False, indent=2))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_finite(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def progress(title: str, *, in_bytes: bool = False) -> Iterator[ProgressUpdate]:
    """A progress bar on standard error; call the yielded function to move it.

    Without a terminal it prints a line for each note, and every LINE_SECONDS seconds; in a notebook it rewrites one
    line in place.
    """
    screen = console(stderr=True)
    if screen.is_jupyter:
        yield _notebook_line(title, in_bytes)
        return
    if not screen.is_terminal:
        yield _plain_lines(title, in_bytes)
        return
    amount = DownloadColumn() if in_bytes else MofNCompleteColumn()
    # A title that is too long is folded, so that the amount and the time are always complete.
    description = TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold"))
    columns = (description, BarColumn(bar_width=20), amount, TimeRemainingColumn())
    # By default rich knows no speed, and so no remaining time, from updates that are more than 30 seconds apart.
    with _Bar(*columns, console=screen, transient=True, speed_estimate_period=math.inf) as bar:
        task = bar.add_task(title, total=None, note="")
        yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=note)


class _Bar(Progress):
    """A progress bar with the note below it."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(task.fields["note"], overflow="fold") for task in self.tasks if task.fields["note"])


LINE_SECONDS = 10.0
"""Seconds between two lines of progress without a note, where there is no terminal."""


def _plain_lines(title: str, in_bytes: bool) -> ProgressUpdate:
    last = time.monotonic()

    def update(done: int, total: int, note: str = "") -> None:
        nonlocal last
        if note or time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            say(f"{title}: {_amounts(done, total, in_bytes)}{note and ', '}{note}")

    return update


def _amounts(done: int, total: int, in_bytes: bool) -> str:
    return " of ".join(readable_bytes(n) if in_bytes else f"{n:,}" for n in (done, total))


def _notebook_line(title: str, in_bytes: bool) -> ProgressUpdate:
    """Notebooks show all printed lines, one below the other, but can replace a displayed object."""
    from IPython.display import display  # type: ignore[import-not-found, unused-ignore]  # installed in a notebook

    shown, last = display({"text/plain": f"{title} ..."}, raw=True, display_id=True), -math.inf

    def update(done: int, total: int, note: str = "") -> None:
        nonlocal last
        if done < total and time.monotonic() - last < 0.1:  # each update is a message to the browser
            return
        last = time.monotonic()
        bar = "█" * (20 * done // max(total, 1))
        text = f"{title} {bar:░<20} {_amounts(done, total, in_bytes)}{note and ', '}{note}"
        shown.update({"text/plain": text}, raw=True)

    return update


def readable_bytes(count: float) -> str:
    """A number of bytes in binary units: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
