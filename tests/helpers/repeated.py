"""Work that packages repeat for each call in one process, done once or left out, so that tests take less time."""

import json
import sys
from functools import lru_cache
from pathlib import Path

import torch


def leave_out() -> None:
    """Of the modules that are imported by now: build the command line once, not for each call; let
    transformers log the kind of a config, not its text, which is made for each model though nothing shows it; and write
    the points of a run's curves without drawing them (`tests/training/test_trackers.py` draws some); save models of
    transformers without importing DeepSpeed, to see whether its engine is around them; and compile graphs without
    measuring, with emptied caches of the processor, how long their guards take. Without a GPU,
    `torch.manual_seed` does not write down, for each kind of GPU, the stack that it is called from."""
    if accelerate := sys.modules.get("accelerate.utils.other"):
        accelerate.is_deepspeed_available = lambda: False
    if not torch.cuda.is_available():
        for kind in (torch.cuda, torch.xpu, torch.mtia):
            kind.manual_seed_all = lambda seed: None
    if testing := sys.modules.get("typer.testing"):
        main = sys.modules["typer.main"]
        main.get_command = testing._get_command = lru_cache(maxsize=None)(main.get_command)
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = lambda manager, scope, repetitions: 0.0
    if transformers := sys.modules.get("transformers.configuration_utils"):
        transformers.PreTrainedConfig.__repr__ = lambda self: f"<{type(self).__name__}>"
    if run := sys.modules.get("ligermodels.training.run"):
        write_curves.__wrapped__ = run.draw_curves
        run.draw_curves = write_curves


def write_curves(folder: Path) -> str:
    """In place of `ligermodels.training.metrics.draw_curves`."""
    from ligermodels.training.folder import CURVES, METRICS
    from ligermodels.training.metrics import read_curves

    (folder / CURVES).write_text(json.dumps(read_curves(folder / METRICS)))
    return ""
