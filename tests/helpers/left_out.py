"""Imported by the server of forks where there is no GPU: its forks leave out the work that tests leave out, have the
command line built, and collect garbage as rarely as tests do."""

import gc

import typer.main
from repeated import leave_out

from ligermodels.cli import app

leave_out()
typer.main.get_command(app)
gc.set_threshold(20_000, 10, 100)
