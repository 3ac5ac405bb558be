"""`python -m benchmarks command_line [CASE ...] [--attention NAME ...] [--cuda-graph MODE ...] [--out FILE]`:
`ligermodels train` by its settings, with `--peers` beside TRL's SFTTrainer.

The command trains models from random weights on Python's sources. Its speed comes from its metrics and includes data
loading and clipping. All settings run in turns, in processes of their own. `--bare` also times the bare training step,
a case of `python -m benchmarks training`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cases.models import CONFIGS
from benchmarks.cases.sft_peer import SETTINGS
from benchmarks.reporting import recording
from ligermodels.demo.corpus import python_sources, train_tokenizer

CASES = {
    f"{model} {batch}x{length}" + (f", {gpus} GPUs" if gpus > 1 else ""): (model, batch, length, gpus)
    for model, batch, length, gpus in (
        ("llama-3.2-1b", 4, 4096, 1),
        ("smollm2-135m", 1, 2048, 1),
        ("smollm2-135m", 8, 2048, 1),
        ("qwen3-0.6b", 2, 2048, 1),
        ("gemma-2-2b", 1, 8192, 1),
        ("gpt-oss-4-layers", 1, 8192, 1),
        ("smollm2-135m", 8, 2048, 2),
        ("qwen3-0.6b", 2, 2048, 2),
        ("llama-3.2-1b", 1, 4096, 2),
        ("llama-3.2-1b", 4, 4096, 2),
        ("llama-3-8b", 1, 4096, 2),
    )
}
"""Name -> model, sequences a GPU, tokens of a sequence, GPUs."""
TEXT_BYTES = 8_000_000


def prepare(folder: Path) -> None:
    """Write a tokenizer and a text."""
    sources = "".join(path.read_text(errors="replace") for path in python_sources(TEXT_BYTES))
    train_tokenizer([sources[:1_000_000]], 8192, folder)
    (folder / "text.txt").write_text(sources)


def of_command(folder: Path, case: str, options: dict[str, Any]) -> float:
    """Tokens per second of `ligermodels train` on all its GPUs: the median of all reports except the first, which
    includes the warm-up."""
    model, batch, length, gpus = CASES[case]
    (folder / "config.json").write_text(json.dumps({**CONFIGS[model], "torch_dtype": "bfloat16"}))
    settings = {
        "seq_len": length,
        "batch_tokens": batch * length * gpus,
        "validation_tokens": length,
        "checkpoint_every": "null",
        **options,
    }
    command = [sys.executable, "-m", "ligermodels", "train", str(folder), "--data", str(folder / "text.txt")]
    command += [f"--set={name}={value}" for name, value in settings.items() if name != "attention"]
    command += ["--attention", options["attention"], "--out", str(folder / "run"), "--overwrite"]
    if gpus > 1:
        command += ["--gpus", str(gpus)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return statistics.median([report["tokens_per_second"] for report in metrics if "tokens_per_second" in report][1:])


def of_bare_step(case: str, out: Path) -> float:
    """Tokens per second of the bare step."""
    command = [sys.executable, "-m", "benchmarks", "training", case, "--providers", "ligermodels", "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    return float(next(record["tokens_per_s"] for record in reversed(records) if record["case"] == case))


def of_peer(folder: Path, case: str, setting: str, steps: int) -> float:
    """Tokens per second of TRL's SFTTrainer, on one GPU."""
    model, batch, length, _ = CASES[case]
    (folder / "config.json").write_text(json.dumps({**CONFIGS[model], "torch_dtype": "bfloat16"}))
    command = [sys.executable, "-m", "benchmarks.cases.sft_peer", str(folder), *map(str, (batch, length, steps))]
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # on several, Trainer would divide the batch
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    done = subprocess.run([*command, setting], check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return float(done.stdout.splitlines()[-1])


def runs(case: str, arguments: argparse.Namespace, folder: Path) -> list[tuple[str, Callable[[], float]]]:
    """Name of each setting of the command, of each peer and of the bare step, and the function that times it."""
    found: list[tuple[str, Callable[[], float]]] = []
    for attention, graph in itertools.product(arguments.attention, arguments.cuda_graph):
        options = {"attention": attention, "cuda_graph": graph, "steps": arguments.steps}
        options["report_every"] = max(1, arguments.steps // 5)
        name = f"ligermodels train, attention {attention}, CUDA graph {graph}"
        found.append((name, partial(of_command, folder, case, options)))
    for peer in arguments.peers:
        found.append((f"TRL, {peer}", partial(of_peer, folder, case, peer, arguments.steps)))
    if arguments.bare:
        found.append(("bare step", partial(of_bare_step, case, folder / "bare.jsonl")))
    return found


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES)[:1], metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--attention", nargs="+", default=["auto"], help="attention backends")
    parser.add_argument("--cuda-graph", nargs="+", default=["auto"], choices=["auto", "on", "off"])
    parser.add_argument("--bare", action="store_true", help="also time the bare training step")
    parser.add_argument("--peers", nargs="*", default=[], choices=SETTINGS, help="settings of TRL's SFTTrainer")
    parser.add_argument("--steps", type=int, default=40, help="steps of a run; five reports")
    parser.add_argument("--rounds", type=int, default=2, help="runs with each setting; the median counts")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"unknown cases: {', '.join(unknown)}; there are {', '.join(CASES)}")
    if arguments.peers and (several := [case for case in arguments.cases if CASES[case][3] > 1]):
        parser.error(f"--peers: run on one GPU, not {', '.join(several)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder)
        facts = recording.facts()
        for case in arguments.cases:
            speeds: dict[str, list[float]] = {}
            for turn, (name, measure) in itertools.product(range(arguments.rounds), runs(case, arguments, folder)):
                found = speeds.setdefault(name, [])
                found.append(measure())
                print(f"{case}: {name}: {found[-1]:,.0f} tokens/s", flush=True)
                if turn + 1 == arguments.rounds:  # a run that is stopped has written what it had found
                    record = {"case": case, **facts, "provider": name, "tokens_per_s": statistics.median(found)}
                    recording.write(arguments.out, [{**record, "rounds": found}])
