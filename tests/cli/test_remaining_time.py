"""The remaining time beside a progress bar, for updates that are far apart, and of a run that resumes."""

import io
import re

import pytest
from rich.console import Console

import ligermodels.console


@pytest.mark.parametrize(
    ("seconds", "start", "remaining"), [(1, 0, "0:01:10"), (100, 0, "1:56:40"), (100, 500, "0:33:20")]
)
def test_the_remaining_time(monkeypatch: pytest.MonkeyPatch, seconds: int, start: int, remaining: str) -> None:
    """Updates after every ten steps of 1,000 (of the resumed run, from step 500 on), with so many seconds between."""
    now, shown = [0.0], io.StringIO()
    screen = Console(file=shown, force_terminal=True, color_system=None, width=200, get_time=lambda: now[0])
    monkeypatch.setattr(ligermodels.console, "console", lambda **_: screen)
    with ligermodels.console.progress("training") as update:
        for step in range(start + 10, start + 310, 10):
            now[0] += seconds
            update(step, 1000, "loss 1.0")
        screen.print("", end="")  # shows the bar as it is now
    assert re.findall(rf"{start + 300}/1000 +(\d+:\d+:\d+)", shown.getvalue())[-1] == remaining
