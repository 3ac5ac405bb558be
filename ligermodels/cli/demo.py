"""`ligermodels demo`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def demo(
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("demo-output"),
    size: Annotated[
        Literal["cpu", "gpu"],
        typer.Option(help="cpu: minutes on any machine; gpu: larger, and the speed of decoding on a GPU."),
    ] = "cpu",
    draft_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds of training of Medusa, EAGLE-3 and DSpark heads each, which are then compared; 0 leaves them "
            "out.  [default: 60 with --size gpu, else 0]",
        ),
    ] = None,
    only_drafts: Annotated[
        bool, typer.Option("--only-drafts", help="Train the model, and compare these heads, without the other stages.")
    ] = False,
) -> None:
    """Run the whole workflow at a small size.

    Train a model on Python's own sources, then Medusa heads; generate with both; export the heads; fine-tune the model
    on chats, whole and by LoRA, and ask it questions. With --size gpu the model has 270 M parameters, and the demo
    measures the speed-up of decoding with the heads, in batches of 1, 4 and 16, in place of fine-tuning. It also trains
    Medusa, EAGLE-3 and DSpark heads on that model, each in the same time, and compares decoding with them.
    """
    from ligermodels.demo import DemoSettings, GpuDemoSettings, run_demo

    chosen: dict[str, Any] = {} if draft_seconds is None else {"draft_seconds": draft_seconds}
    if only_drafts:
        chosen |= {"medusa_stages": False, "chat_steps": 0}
    run_demo(out, GpuDemoSettings(**chosen) if size == "gpu" else DemoSettings(**chosen))
