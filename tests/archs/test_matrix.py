"""docs/matrix.md is what the tests say."""

import contextlib
import sys
from pathlib import Path
from typing import Any


def check(said: Path) -> None:
    """As the script does it, in a process of its own: pytest collects tests once in one."""
    import matrix

    with said.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        sys.exit(matrix.main(check=True))


def test_the_page_names_every_family_and_capability_that_the_tests_show(children: Any, tmp_path: Path) -> None:
    """As long as they pass; a page written when one did not is refused too."""
    child = children.Process(target=check, args=(tmp_path / "said",))
    child.start()
    child.join(300)
    assert child.exitcode == 0, (tmp_path / "said").read_text(encoding="utf-8")
