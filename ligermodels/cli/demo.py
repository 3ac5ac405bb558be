"""`ligermodels demo`."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def demo(
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("demo-output"),
    size: Annotated[
        Literal["cpu", "gpu"],
        typer.Option(help="cpu: minutes on any machine; gpu: larger, and the speed of decoding on a GPU."),
    ] = "cpu",
) -> None:
    """Run the whole workflow at a small size.

    Train a model on Python's own sources, then Medusa heads; generate with both; export them; fine-tune the model on
    chats, whole and by LoRA, and chat with it. With --size gpu the model has 270 M parameters, and what is measured is
    how much faster the heads make decoding, in batches of 1, 4 and 16.
    """
    from ligermodels.demo import run_demo, run_gpu_demo

    if size == "gpu":
        run_gpu_demo(out)
    else:
        run_demo(out)
