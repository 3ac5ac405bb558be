"""`python -m benchmarks resume [--gpus N ...] [--out FILE]`: a training run that is killed and resumed on fewer GPUs.

`ligermodels train --gpus N` with the first number of GPUs runs to its end, and once more until a rank is killed by
SIGKILL after a checkpoint. Copies of the killed run are resumed on each of the other numbers. The record has the
largest relative difference of the losses of steps after the checkpoint, and the losses.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import ligermodels as lm
from benchmarks.cases.command_line import prepare
from benchmarks.cases.models import CONFIGS
from benchmarks.reporting import recording

SEQUENCES = 4
"""Sequences of a step, of all ranks together."""


def losses(run: Path) -> dict[int, float]:
    """Loss by step, of the reports in a run's folder."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()  # the run may be writing the last line
    return {report["step"]: report["loss"] for report in map(json.loads, lines) if "loss" in report}


def train(arguments: list[str], gpus: int, device: str) -> subprocess.Popen[bytes]:
    """Start `ligermodels train` on a number of GPUs, in a process group of its own."""
    command = [sys.executable, "-m", "ligermodels", "train", *arguments, "--gpus", str(gpus), "--device", device]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)


def ended(process: subprocess.Popen[bytes]) -> None:
    """Wait for a run.

    Raises:
        SystemExit: It failed.
    """
    if code := process.wait():
        raise SystemExit(f"{' '.join(map(str, process.args))} ended with {code}")  # type: ignore[arg-type]


def kill_a_rank(process: subprocess.Popen[bytes], run: Path, step: int) -> float:
    """Kill a rank by SIGKILL once `step` is reported and a checkpoint complete; seconds until all others have ended."""
    while process.poll() is None and not (max(losses(run), default=0) >= step and complete(run)):
        time.sleep(0.1)
    ranks = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    if process.poll() is not None or not ranks:
        raise SystemExit(f"the run ended before step {step} could be interrupted")
    os.kill(int(ranks[-1]), signal.SIGKILL)
    begin = time.perf_counter()
    process.wait()
    return time.perf_counter() - begin


def complete(run: Path) -> bool:
    """Whether a run's folder has a checkpoint."""
    return any((run / "checkpoints").glob("step-*"))


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("--gpus", nargs="+", type=int, default=[torch.cuda.device_count(), 1], help="numbers of GPUs")
    parser.add_argument("--model", default="smollm2-135m", choices=CONFIGS)
    parser.add_argument("--layers", type=int, help="all if left out")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args()
    first, *others = arguments.gpus
    if first < 2 or not others:
        parser.error(f"--gpus: takes a number above 1, and the numbers to resume on, got {arguments.gpus}")
    if arguments.steps < 3:
        parser.error(f"--steps: must be at least 3, got {arguments.steps}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        torch.manual_seed(0)
        config: dict[str, Any] = dict(CONFIGS[arguments.model])
        if arguments.layers is not None:
            config["num_hidden_layers"] = arguments.layers
        lm.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
        prepare(folder / "model")
        settings = [str(folder / "model"), "--data", str(folder / "model" / "text.txt"), "--set=dtype=float32"]
        settings += [f"--set=seq_len={arguments.length}", f"--set=batch_tokens={SEQUENCES * arguments.length}"]
        settings += [f"--set=micro_batch_tokens={arguments.length}", f"--set=validation_tokens={arguments.length}"]
        settings += [f"--set=steps={arguments.steps}", f"--set=checkpoint_every={arguments.steps // 3}"]
        settings += ["--set=report_every=1"]
        whole, killed = folder / "whole", folder / "killed"
        ended(train([*settings, "--out", str(whole)], first, arguments.device))
        process = train([*settings, "--out", str(killed)], first, arguments.device)
        seconds = kill_a_rank(process, killed, arguments.steps // 2)
        wanted = losses(whole)
        records = []
        for gpus in others:
            resumed = folder / f"resumed-{gpus}"
            shutil.copytree(killed, resumed)
            (resumed / "metrics.jsonl").rename(resumed / "before.jsonl")
            ended(train(["--resume", "--out", str(resumed)], gpus, arguments.device))
            found = {step: loss for step, loss in losses(resumed).items() if step > arguments.steps // 3}
            record = {"case": f"{arguments.model} {SEQUENCES}x{arguments.length}", "gpus": first, "resumed_on": gpus}
            record |= {"difference": max(abs(found[step] / wanted[step] - 1) for step in found), "steps": len(found)}
            record |= {"seconds_to_end": seconds, "losses": wanted, "resumed_losses": found, **recording.facts()}
            records.append(record)
            print({name: record[name] for name in ("case", "gpus", "resumed_on", "difference", "steps")}, flush=True)
    recording.write(arguments.out, records)
