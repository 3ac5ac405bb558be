"""`python -m benchmarks batch_invariant [MODEL ...] [--out FILE]`: what `batch_invariant` costs, and whether it holds.

Times of a forward pass and a training step of 1 x 4096 tokens, and of a decoding step by batch size, with and without
the mode. Each record also counts the prompts, out of eight of unequal lengths, whose new tokens have logits with the
same bits alone and in the batch, and decoded and in a training pass.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import ligermodels as lm
from benchmarks.cases.models import CONFIGS
from benchmarks.cases.trees import training_step
from benchmarks.reporting import recording
from benchmarks.timing import measure
from ligermodels.training.fused_adamw import FusedAdamW

LENGTH, BATCHES, STEPS = 4096, (1, 8, 64), 64
LENGTHS = (37, 128, 5, 1000, 64, 301, 17, 90)
"""Tokens of the prompts."""
NEW = 24
NO_END: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0}


def _seconds(call: Callable[[], Any]) -> float:
    """Median of three calls, after one that is not timed."""
    found = []
    for _ in range(4):
        measure.synchronize()
        start = time.perf_counter()
        call()
        measure.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def times(model: lm.CausalLM) -> dict[str, float]:
    """Milliseconds of a forward pass, a training step, and decoding steps."""
    ids = torch.randint(3, model.config.vocab_size, (1, LENGTH), device=model.device)
    step = training_step(model, FusedAdamW(model.parameters(), lr=0.0), ids, ids)
    with torch.no_grad():
        found = {"forward_ms": 1e3 * _seconds(lambda: model(ids, labels=ids))}
    found["step_ms"] = 1e3 * _seconds(step)
    for batch in BATCHES:
        prompts = torch.randint(3, model.config.vocab_size, (batch, 128), device=model.device)
        short, long = (_seconds(partial(model.generate, prompts, n, **NO_END)) for n in (16, 16 + STEPS))
        found[f"decoding_{batch}_ms"] = 1e3 * (long - short) / STEPS
    return found


def equal_bits(model: lm.CausalLM) -> dict[str, int]:
    """Prompts with equal bits alone and together, and decoded and in training's forward pass."""
    rows = [torch.randint(3, model.config.vocab_size, (n,), device=model.device).tolist() for n in LENGTHS]

    def generated(rows: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
        logits: list[Tensor] = []

        def keep(ids: Tensor, scores: Tensor) -> Tensor:
            logits.append(scores.clone())
            return scores

        ids = model.generate(rows, NEW, logits_processor=[keep], **NO_END)
        return [(ids[i, -len(row) - NEW :], torch.stack(logits)[:, i]) for i, row in enumerate(rows)]

    alone = [generated([row])[0] for row in rows]
    together = generated(rows)
    trained = [model(ids[None]).logits[0, -NEW - 1 : -1].detach().float() for ids, _ in alone]
    return {
        "prompts": len(rows),
        "equal_in_a_batch": sum(torch.equal(a[1], b[1]) for a, b in zip(alone, together, strict=True)),
        "equal_in_training": sum(torch.equal(a[1], b) for a, b in zip(alone, trained, strict=True)),
    }


def run(name: str, batch_invariant: bool) -> dict[str, Any]:
    """The record of a model."""
    torch.manual_seed(0)
    model = lm.from_config(CONFIGS[name], dtype=torch.bfloat16, device=measure.DEVICE)
    model.batch_invariant = batch_invariant
    return times(model) | equal_bits(model)


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("models", nargs="*", default=["llama-3.2-1b", "qwen3-8b"], metavar="MODEL")
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - set(CONFIGS):
        parser.error(f"unknown models: {', '.join(unknown)}; there are {', '.join(CONFIGS)}")
    for name in arguments.models:
        for mode in (False, True):
            record = {"case": name, "provider": "ligermodels", "batch_invariant": mode, **run(name, mode)}
            measure.free()
            recording.write(arguments.out, [{**record, **recording.facts()}])
            print(record, flush=True)
