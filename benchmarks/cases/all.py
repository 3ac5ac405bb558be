"""`python -m benchmarks all`: runs the benchmarks of COMMANDS, each in a process of its own, then writes the report.

Results are appended to benchmarks/results/NAME-GPU.jsonl.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.reporting import recording, report

COMMANDS = {
    "ops": ["ops"],
    "attention": ["attention"],
    "delta": ["delta"],
    "training": [
        "training --roofline --profile",
        "training qwen3.5-9b gemma-4-e4b ministral-3-8b --providers transformers",
        "training 1b --providers 'ligermodels + torch.compile'",
        "training gemma --providers 'transformers + torch.compile'",
        "training 1b --providers ligermodels --in-backward",
        "training 'llama-3-8b 4x4096' 'llama-3-8b 1x4096' 'qwen2.5-7b 2x4096' 'llama-3.2-1b 4x4096' "
        "'llama-3-8b 4x4096 LoRA 16' --providers ligermodels 'ligermodels + float8' 'transformers + liger' "
        "'transformers + torchao float8 + torch.compile' --roofline",
        "command_line",
    ],
    "nativize": ["training 'llama-3-8b 4x4096' --providers 'transformers + nativize' 'transformers + liger'"],
    "decoding": [
        "decoding --transformers",
        "decoding --model qwen3.5-9b --batches 1 8 --transformers",
        "decoding --model gemma-4-e4b --batches 1 8 --transformers",
        "decoding --model ministral-3-8b --batches 1 8 --transformers",
    ],
    "quantized": ["quantized_decoding --no-linears"],
    "medusa": [
        "medusa --roofline",
        "medusa --batch 8 --length 8192 --ignored 0 --providers ligermodels 'ligermodels shared'",
        "medusa --ignored 0 --providers 'ligermodels stage 2'",
        "medusa --ignored 0 --roofline --providers ligermodels 'ligermodels float8' liger 'liger + torchao float8'",
    ],
    "draft": ["draft --roofline"],
    "demo": ["demo"],
    "loading": ["loading {folder}"],
    "float8-loss": ["float8_loss", "float8_loss --layers 4 --providers adamw adamw8bit muon muon8bit"],
}
"""Name -> commands: a benchmark and its arguments. {folder} is --folder, or a temporary folder."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks all", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(COMMANDS)} (all)")
    parser.add_argument("--folder", type=Path, help="folder of the checkpoint to load, created if missing (16 GB)")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(COMMANDS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; give any of {', '.join(COMMANDS)}")
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.names or COMMANDS:
            for line in COMMANDS[name]:
                command = [part.format(folder=arguments.folder or temporary) for part in shlex.split(line)]
                start = time.perf_counter()
                out = str(recording.results(name))
                done = subprocess.run([sys.executable, "-m", "benchmarks", *command, "--out", out], check=False)
                print(f"{line}: {time.perf_counter() - start:.0f} s, exit code {done.returncode}", flush=True)
                failed += [line] if done.returncode else []
    print(*report.write(recording.RESULTS, recording.gpu_suffix(), report.DOCS), sep="\n")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
