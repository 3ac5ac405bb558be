"""`python -m benchmarks command_line [--out FILE]`: `ligermodels train` beside the bare training step.

The command trains a model of the size of Llama 3.2 1B from random weights on Python's sources, with four sequences of
4096 tokens per step. Its speed comes from its metrics and includes data loading and clipping. The bare step is a case
of `python -m benchmarks training`. Both run in turns, in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cases.models import CONFIGS
from benchmarks.reporting import recording
from ligermodels.demo.corpus import python_sources, train_tokenizer

MODEL, BATCH, LENGTH = "llama-3.2-1b", 4, 4096
STEPS, REPORT_EVERY, ROUNDS = 40, 8, 2
TEXT_BYTES = 8_000_000


def prepare(folder: Path) -> list[str]:
    """Write a config, a tokenizer and a text; returns the command to train on them, without its output folder."""
    sources = "".join(path.read_text(errors="replace") for path in python_sources(TEXT_BYTES))
    train_tokenizer([sources[:1_000_000]], 8192, folder)
    (folder / "config.json").write_text(json.dumps({**CONFIGS[MODEL], "torch_dtype": "bfloat16"}))
    (folder / "text.txt").write_text(sources)
    settings = {
        "seq_len": LENGTH,
        "batch_tokens": BATCH * LENGTH,
        "steps": STEPS,
        "report_every": REPORT_EVERY,
        "checkpoint_every": "null",
        "validation_tokens": LENGTH,
    }
    command = [sys.executable, "-m", "ligermodels", "train", str(folder), "--data", str(folder / "text.txt")]
    return command + [f"--set={name}={value}" for name, value in settings.items()]


def of_command(command: list[str], out: Path) -> float:
    """Tokens per second: the median of all reports except the first, which includes the warm-up."""
    subprocess.run([*command, "--out", str(out), "--overwrite"], check=True, stdout=subprocess.DEVNULL)
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return statistics.median([report["tokens_per_second"] for report in metrics if "tokens_per_second" in report][1:])


def of_bare_step(out: Path) -> float:
    """Tokens per second of the bare step."""
    case = f"{MODEL} {BATCH}x{LENGTH}"
    command = [sys.executable, "-m", "benchmarks", "training", case, "--providers", "ligermodels", "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    return float(next(record["tokens_per_s"] for record in reversed(records) if record["case"] == case))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks command_line", description=__doc__)
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args()
    speeds: dict[str, list[float]] = {"ligermodels": [], "bare step": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        command = prepare(folder)
        for _ in range(ROUNDS):
            speeds["ligermodels"].append(of_command(command, folder / "run"))
            speeds["bare step"].append(of_bare_step(folder / "bare.jsonl"))
    facts, case = recording.facts(), f"ligermodels train, {MODEL} {BATCH}x{LENGTH}"
    records: list[dict[str, Any]] = [
        {"case": case, "provider": name, "tokens_per_s": statistics.median(found), "rounds": found, **facts}
        for name, found in speeds.items()
    ]
    recording.write(arguments.out, records)
    train, bare = (record["tokens_per_s"] for record in records)
    print(f"{case}: {train:,.0f} tokens/s of {bare:,.0f}: {train / bare:.3f}")
