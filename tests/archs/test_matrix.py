"""docs/matrix.md is what the tests say."""

import contextlib
import sys
from pathlib import Path
from typing import Any

import matrix


def check(said: Path) -> None:
    """As the script does it, in a process of its own: pytest collects tests once in one."""
    with said.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        sys.exit(matrix.main(check=True))


def test_the_page_names_every_family_and_capability_that_the_tests_show(children: Any, tmp_path: Path) -> None:
    """As long as they pass; a page written when one did not is refused too."""
    child = children.Process(target=check, args=(tmp_path / "said",))
    child.start()
    child.join(300)
    assert child.exitcode == 0, (tmp_path / "said").read_text(encoding="utf-8")


def test_a_type_is_tested_or_its_refusal_is() -> None:
    """Of `nativize`: "error" is written for types that the test of refusals has, as long as it passes."""
    tests = matrix.Matrix()
    tests.unused.clear()
    for family, configs in tests.configs.items():
        for capability in matrix.CAPABILITIES:
            tests.cells[family, capability] = {f"test[{config}]" for config in configs}
    assert tests.faults() == [] and tests._cell("cohere2", "nativize") == "✓"
    tests.cells["cohere2", "nativize"].clear()
    assert tests.faults() == ["no test shows nativize of cohere2, or its refusal"]
    tests.refusals["cohere2", "nativize"].add("refused[cohere2]")
    assert tests.faults() == [] and tests._cell("cohere2", "nativize") == "error"
    tests.passed["refused[cohere2]"] = False
    assert tests._cell("cohere2", "nativize") == "✗"
