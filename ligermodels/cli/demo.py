"""`ligermodels demo`."""

from pathlib import Path
from typing import Annotated

import typer


def demo(out: Annotated[Path, typer.Option(help="Output folder.")] = Path("demo-output")) -> None:
    """Run the whole workflow at a small size.

    Train a model on Python's own sources, then Medusa heads; generate with both; export them; fine-tune the model on
    chats, whole and by LoRA, and chat with it.
    """
    from ligermodels.demo import run_demo

    run_demo(out)
