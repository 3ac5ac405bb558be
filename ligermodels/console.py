"""Output of commands: tables and progress bars on a terminal, plain lines elsewhere."""

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


class ProgressUpdate(Protocol):
    """Called with the amount done, the total, and an optional note."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


def console(*, stderr: bool = False) -> Console:
    """Standard output or standard error. Lines are not wrapped off a terminal."""
    found = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not found.is_terminal:
        found.width = 1000
    return found


def is_first_rank() -> bool:
    """Whether this is the only process, or the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def say(message: str) -> None:
    """Print a line on standard error, apart from the command's results."""
    screen = console(stderr=True)
    if screen.is_jupyter:  # rich would show a block of HTML for each line
        print(message, file=sys.stderr)
    else:
        screen.print(message, soft_wrap=True)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int] = ()) -> None:
    """Print a table on standard output; columns with an index in `numbers` are right-aligned."""
    screen = console()
    table = Table(box=SIMPLE_HEAD if screen.is_terminal else None, pad_edge=False, show_header=any(columns))
    right = set(numbers)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    with screen.capture() as shown:
        screen.print(table)
    for line in shown.get().splitlines():
        screen.out(line.rstrip(), highlight=False)


def print_json(content: Any) -> None:
    """Print `content` on standard output as JSON; nan and infinity become null."""
    print(json.dumps(_finite(content), ensure_ascii=False, indent=2))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def progress(what: str, *, in_bytes: bool = False) -> Iterator[ProgressUpdate]:
    """A progress bar on standard error, moved by calling what is yielded. Off a terminal, a line for each note; in a
    notebook, one line that is rewritten in place."""
    screen = console(stderr=True)
    if screen.is_jupyter:
        yield _notebook_line(what, in_bytes)
        return
    if not screen.is_terminal:
        yield lambda done, total, note="": say(f"{what}: {done} of {total}, {note}") if note else None
        return
    amount = DownloadColumn() if in_bytes else MofNCompleteColumn()
    note = TextColumn("{task.fields[note]}", markup=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), amount, TimeRemainingColumn(), note)
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task(what, total=None, note="")
        yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=note)


def _notebook_line(what: str, in_bytes: bool) -> ProgressUpdate:
    """Notebooks show every line that is written, one below the other, but can replace what they display."""
    from IPython.display import display  # type: ignore[import-not-found, unused-ignore]  # there, in a notebook

    shown, last = display({"text/plain": f"{what} ..."}, raw=True, display_id=True), -math.inf

    def update(done: int, total: int, note: str = "") -> None:
        nonlocal last
        if done < total and time.monotonic() - last < 0.1:  # each is a message to the browser
            return
        last = time.monotonic()
        amounts = [readable_bytes(n) if in_bytes else f"{n:,}" for n in (done, total)]
        bar = "█" * (20 * done // max(total, 1))
        text = f"{what} {bar:░<20} {' of '.join(amounts)}{note and ', '}{note}"
        shown.update({"text/plain": text}, raw=True)

    return update


def readable_bytes(count: float) -> str:
    """A number of bytes in binary units: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
