"""`ligermodels lora`: adapters in PEFT's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ligermodels.cli import options
from ligermodels.console import say

app = typer.Typer(no_args_is_help=True)


@app.command()
def merge(
    path: options.Checkpoint,
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="A folder, or a hub id, in PEFT's format.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    dtype: options.DtypeOption = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Write a checkpoint with a LoRA adapter added to its weights."""
    import ligermodels as lm

    model = options.load(path, dtype, "cpu")
    lm.merge_lora(lm.load_adapter(model, adapter)).save_pretrained(out, overwrite=overwrite)
    say(f"wrote {out}")
