"""Ctrl-C before a command runs exits as later on, without a traceback."""

import subprocess
import sys

import pytest

IMPORTS = """
import sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
"""
BUILDS = """
import typer.main
def interrupted(*_):
    raise KeyboardInterrupt
typer.main.get_command = interrupted
"""


@pytest.mark.parametrize("before", [IMPORTS, BUILDS], ids=["imported", "built"])
def test_an_interrupt_at_the_start(before: str) -> None:
    run = "import runpy; sys.argv = ['ligermodels', 'info']; runpy.run_module('ligermodels', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", f"import sys\n{before}\n{run}"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
