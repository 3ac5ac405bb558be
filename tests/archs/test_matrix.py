"""docs/matrix.md is what the tests say."""

import subprocess
import sys
from pathlib import Path


def test_the_page_names_every_family_and_capability_that_the_tests_show() -> None:
    """As long as they pass; a page written when one did not is refused too."""
    command = [sys.executable, str(Path(__file__).parents[1] / "helpers" / "matrix.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
