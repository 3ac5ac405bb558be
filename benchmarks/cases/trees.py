"""Helpers to compare two trees of this project: the environment of a process, models, steps and times."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.cases.models import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"head_dim": 16, "vocab_size": 128, "num_hidden_layers": 2, "query_pre_attn_scalar": 16}
TINY |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

Step = Callable[[], Any]


# -- models and steps --------------------------------------------------------------------------------------------------


def model_of(config: dict[str, Any], tiny: bool = False) -> Any:
    """A model with random weights: bfloat16 on the GPU; `tiny`, float32 on the CPU."""
    import torch

    import ligermodels as lm

    torch.manual_seed(0)
    return lm.from_config(config, dtype=torch.float32 if tiny else torch.bfloat16, device="cpu" if tiny else "cuda")


def config_of(name: str, tiny: bool = False, layers: int | None = None) -> dict[str, Any]:
    """Config of a model.

    Args:
        name: Name of the model.
        tiny: Use sizes that a CPU runs.
        layers: Number of layers; the vocabulary is cut by the same factor.
    """
    config = CONFIGS[name]
    if tiny:
        return config | {key: value for key, value in TINY.items() if key in config or key == "head_dim"}
    if layers is None:
        return config
    vocab = config["vocab_size"] * layers // config["num_hidden_layers"] // 64 * 64
    return config | {"num_hidden_layers": layers, "vocab_size": vocab}


def tokens(config: dict[str, Any], batch: int, length: int, tiny: bool, ignored: float = 0.0) -> tuple[Any, Any]:
    """Random token ids and labels.

    Args:
        config: Config of the model.
        batch: Sequences.
        length: Tokens per sequence.
        tiny: Use 2 x 16 tokens on the CPU.
        ignored: Fraction of labels that are -100.
    """
    import torch

    device = "cpu" if tiny else "cuda"
    ids = torch.randint(config["vocab_size"], (2, 16) if tiny else (batch, length), device=device)
    return ids, torch.where(torch.rand(ids.shape, device=device) < ignored, -100, ids)


def training_step(model: Any, optimizer: Any, ids: Any, labels: Any, **inputs: Any) -> Step:
    """A training step that returns the loss. Backward runs in the calling thread, as `ligermodels train` has it.

    Args:
        model: The model.
        optimizer: Its optimizer.
        ids: Token ids.
        labels: Labels.
        inputs: More arguments of the model's forward pass.
    """

    import torch

    def step() -> Any:
        loss = model(input_ids=ids, labels=labels, **inputs).loss
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


# -- measuring ---------------------------------------------------------------------------------------------------------


def clocked(call: Step) -> tuple[float, Any]:
    """Seconds until the device has finished `call`, and the result."""
    import torch

    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    result = call()
    synchronize()
    return time.perf_counter() - start, result


def timed(step: Step, count: int) -> dict[str, Any]:
    """Milliseconds of `count` steps back to back, after one untimed step, and peak memory."""
    import torch

    if not torch.cuda.is_available():
        return {"ms": [1e3 * clocked(step)[0] for _ in range(count)], "gib": 0.0}
    torch.cuda.reset_peak_memory_stats()
    step()  # the first launch is slow
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return {"ms": [a.elapsed_time(b) for a, b in pairwise(events)], "gib": torch.cuda.max_memory_allocated() / 2**30}


def free() -> None:
    """Free unused memory."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def environment(tree: Path) -> dict[str, str]:
    """Environment of a process with `ligermodels` from `tree` and `benchmarks` from here, by a folder of links."""
    tree = tree.resolve()
    folder = ROOT / "build" / "trees" / tree.name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "ligermodels").mkdir(parents=True)
    for path in {path.name: path for path in [*(tree / "ligermodels").iterdir(), tree / "convert"]}.values():
        if path.name != "__pycache__":
            (folder / "ligermodels" / path.name).symlink_to(path)
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).strip(":")}
