"""`python -m benchmarks compare [CASE ...] [--old TREE] [--new TREE]`: the same steps in two trees of this project.

Each tree has a process of its own, both on one GPU; they measure in turns. Each step prints a line of JSON: ratios
new / old of the median time and of peak memory, and the ratio of each turn; the spread of the turns is the noise.
Models have fewer layers where two of them would not fit, and a vocabulary cut by the same factor, so that the head
keeps its share of the step.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cases import trees
from benchmarks.cases.trees import ROOT, Step

WARM_UP, STEPS, TURNS = 4, 4, 3
SHORT, LONG, PROMPT = 8, 136, 128
Found = dict[str, dict[str, Any]]
"""Step of a case -> `ms`, a list; `gib`, the peak memory if it is measured; `loss`."""


# -- cases -------------------------------------------------------------------------------------------------------------


def training(
    name: str,
    batch: int,
    *,
    tiny: bool,
    layers: int | None = None,
    ignored: Sequence[float] = (0.0,),
    selective: bool = False,
    heads: int = 0,
) -> Callable[[], Found]:
    """Training on batch x 4096 tokens.

    Args:
        name: Name of the model.
        batch: Sequences per step.
        tiny: Use small sizes on the CPU.
        layers: Number of layers; all if None.
        ignored: Fractions of ignored labels, one step each.
        selective: Use selective activation checkpointing.
        heads: Train this number of Medusa heads on the frozen model.
    """
    import ligermodels as lm
    from ligermodels.training import FusedAdamW

    config = trees.config_of(name, tiny, layers)
    model = trees.model_of(config, tiny).train()
    if selective:
        model.activation_checkpointing = "selective"
    if heads:
        model = lm.MedusaModel.from_base(model, num_heads=heads, lm_head="own")
    optimizer = FusedAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    steps = {
        f"{share:.0%} ignored": trees.training_step(model, optimizer, *trees.tokens(config, batch, 4096, tiny, share))
        for share in ignored
    }
    losses = {key: min(float(step()) for _ in range(WARM_UP)) for key, step in steps.items()}
    return lambda: {key: {**trees.timed(step, STEPS), "loss": losses[key]} for key, step in steps.items()}


def decoding(*, tiny: bool) -> Callable[[], Found]:
    """Greedy decoding of one sequence, and a step of tree decoding: the difference between many and few tokens."""
    import ligermodels as lm

    config = trees.config_of("llama-3-8b", tiny)
    model = trees.model_of(config, tiny).eval()
    medusa = lm.MedusaModel.from_base(model, num_heads=4, lm_head="shared").eval()
    ids = trees.tokens(config, 1, PROMPT, tiny)[0][:1]
    generate, generate_tree = partial(model.generate, ids), partial(medusa.generate, ids, return_stats=True)

    def steps(call: Callable[..., Any], passes: Callable[[Any, int], int]) -> dict[str, Any]:
        found = []
        for count in (SHORT, LONG):
            seconds, output = min(
                (trees.clocked(partial(call, max_new_tokens=count)) for _ in range(2)), key=lambda x: x[0]
            )
            found.append((seconds, passes(output, count)))
        (short, few), (long, many) = found
        return {"ms": [1e3 * (long - short) / (many - few)]}

    def take() -> Found:
        greedy = steps(generate, lambda _, count: count)
        return {"greedy": greedy, "tree": steps(generate_tree, lambda output, _: output.passes)}

    take()
    return take


def small_ops(*, tiny: bool) -> Callable[[], Found]:
    """Ops on few tokens from Python, forward and backward: the time to launch them."""
    import torch

    from ligermodels import ops

    device, dtype = ("cpu", torch.float32) if tiny else ("cuda", torch.bfloat16)

    def random(*shape: int) -> Any:
        return torch.randn(shape, dtype=dtype, device=device, requires_grad=True)

    def both_ways(op: Callable[..., Any], *inputs: Any) -> Step:
        outputs = op(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = [torch.randn_like(y) for y in outputs]

        def step() -> None:
            y = op(*inputs)
            torch.autograd.grad(y if isinstance(y, tuple) else (y,), inputs, gradients)

        return step

    steps: dict[str, Step] = {}
    for count in (1, 32, 512):
        angles = torch.randn(1, count, 64, device=device)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        size = 64 if tiny else 4096
        x, weight = random(count, size), random(size)
        q, k = random(1, count, size // 128 or 1, 128), random(1, count, size // 512 or 1, 128)
        steps |= {
            f"rms_norm {count}": both_ways(lambda x, w: ops.rms_norm(x, w, 1e-5), x, weight),
            f"add_rms_norm {count}": both_ways(
                lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-5), x, random(count, size), weight
            ),
            f"swiglu {count}": both_ways(ops.swiglu, random(count, 2 * size)),
            f"rope {count}": both_ways(lambda q, k, cos=cos, sin=sin: ops.rope(q, k, cos, sin), q, k),
        }

    def best(step: Step) -> dict[str, Any]:
        calls = 3 if tiny else 100
        rounds = [trees.clocked(lambda: [step() for _ in range(calls)])[0] for _ in range(3 if tiny else 10)]
        return {"ms": [1e3 * min(rounds) / calls]}

    def take() -> Found:
        return {name: best(step) for name, step in steps.items()}

    take()
    return take


CASES: dict[str, Callable[..., Callable[[], Found]]] = {
    "llama-3-8b 16 of 32 layers 4x4096 selective": partial(training, "llama-3-8b", 4, layers=16, selective=True),
    "llama-3.2-1b 4x4096": partial(training, "llama-3.2-1b", 4, ignored=(0.0, 0.5)),
    "small ops": small_ops,
    "decoding llama-3-8b batch 1": decoding,
    "medusa stage 1 llama-3-8b 5 heads 4x4096": partial(training, "llama-3-8b", 4, heads=5),
    "gemma-2-2b 2x4096": partial(training, "gemma-2-2b", 2),
    "qwen3-1.7b 4x4096": partial(training, "qwen3-1.7b", 4),
    "qwen3-30b-a3b 12 of 48 layers 2x4096": partial(training, "qwen3-30b-a3b", 2, layers=12),
}


# -- measuring ---------------------------------------------------------------------------------------------------------


class Worker:
    """A process that imports `ligermodels` from one tree and answers each line with a line of JSON."""

    def __init__(self, tree: Path, tiny: bool) -> None:
        self.tree, self.tiny = tree, tiny
        self.environment = trees.environment(tree)
        self.log = Path(f"{self.environment['PYTHONPATH'].split(os.pathsep)[0]}.log")
        self.process: subprocess.Popen[str] | None = None

    def send(self, request: str) -> None:
        """Send the name of a case to prepare, or "" to measure it."""
        if self.process is None:
            arguments = [sys.executable, "-P", "-m", "benchmarks", "compare", "--worker", *["--tiny"] * self.tiny]
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log.open("w")}
            self.process = subprocess.Popen(arguments, env=self.environment, text=True, cwd=ROOT, **pipes)
        assert self.process.stdin is not None
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any]:
        """The answer. An error ends the process, because its CUDA context may be unusable."""
        assert self.process is not None and self.process.stdout is not None
        ready = select.select([self.process.stdout], [], [], max(seconds, 1))[0]
        line = self.process.stdout.readline() if ready else ""
        error = "ended: " + self.log.read_text()[-300:] if ready else "too slow"
        answer: dict[str, Any] = json.loads(line) if line else {"error": error}
        if "error" in answer:
            self.end()
        return answer

    def end(self) -> None:
        """Stop the process, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def work(tiny: bool) -> None:
    """The main loop of a worker process; it prints only answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    take: Callable[[], Found] | None = None
    for request in map(str.strip, sys.stdin):
        try:
            if request:
                take = None
                trees.free()
                take = CASES[request](tiny=tiny)
            answer: dict[str, Any] = take() if take is not None and not request else {}
        except Exception as failure:  # a result
            answer = {"error": f"{type(failure).__name__}: {failure}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


def ask(workers: Sequence[Worker], requests: Sequence[str], seconds: float) -> list[dict[str, Any]]:
    """Answers of workers that run at the same time.

    Args:
        workers: The workers.
        requests: One request per worker.
        seconds: Time limit.

    Raises:
        RuntimeError: A worker failed.
    """
    for worker, request in zip(workers, requests, strict=True):
        worker.send(request)
    answers = [worker.answer(seconds) for worker in workers]
    if failed := [f"{w.tree}: {a['error']}" for w, a in zip(workers, answers, strict=True) if "error" in a]:
        raise RuntimeError("; ".join(failed))
    return answers


def compare(case: str, pair: Sequence[Worker], end: float) -> None:
    """Print the records of a case's steps.

    Args:
        case: Name of the case.
        pair: The workers of the old and the new tree.
        end: Time of `time.monotonic` at which to stop.
    """
    ask(pair, [case] * 2, min(150.0, end - time.monotonic()))
    turns: list[list[Found]] = [[], []]
    for turn in range(TURNS):
        for i in (0, 1) if turn % 2 == 0 else (1, 0):
            turns[i] += ask([pair[i]], [""], min(90.0, end - time.monotonic()))
    for name in turns[0][0]:
        old, new = ([steps[name] for steps in side] for side in turns)
        print(json.dumps({"case": case, "step": name, **compared(old, new)}), flush=True)


def compared(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios new / old of a step, from its measurements in each turn."""
    old_ms, new_ms = (statistics.median([ms for turn in side for ms in turn["ms"]]) for side in (old, new))
    ratios = [statistics.median(n["ms"]) / statistics.median(o["ms"]) for o, n in zip(old, new, strict=True)]
    record: dict[str, Any] = {"time_ratio": round(new_ms / old_ms, 4), "turns": [round(r, 4) for r in ratios]}
    record |= {"old_ms": old_ms, "new_ms": new_ms}
    if old[0].get("gib"):
        old_gib, new_gib = (max(turn["gib"] for turn in side) for side in (old, new))
        record |= {"memory_ratio": round(new_gib / old_gib, 4), "old_gib": old_gib, "new_gib": new_gib}
    if "loss" in old[0]:
        record |= {"old_loss": old[0]["loss"], "new_loss": new[0]["loss"]}
    return record


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=__doc__)
    parser.add_argument("cases", nargs="*", help="parts of names of cases (all)")
    parser.add_argument("--old", type=Path, default=ROOT / ".base")
    parser.add_argument("--new", type=Path, default=ROOT)
    parser.add_argument("--limit", type=float, default=520, help="seconds until the benchmark stops")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU, for a trial")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.tiny)
        return
    start = time.monotonic()
    pair = [Worker(tree, arguments.tiny) for tree in (arguments.old, arguments.new)]
    for case in CASES:
        if arguments.cases and not any(part in case for part in arguments.cases):
            continue
        begun = time.monotonic()
        try:
            if begun - start > arguments.limit - 20:
                raise RuntimeError("skipped: no time left")
            compare(case, pair, start + arguments.limit)
        except (RuntimeError, OSError) as failure:
            print(json.dumps({"case": case, "error": str(failure)}), flush=True)
        print(json.dumps({"case": case, "seconds": round(time.monotonic() - begun, 1)}), flush=True)
    for worker in pair:
        worker.end()
