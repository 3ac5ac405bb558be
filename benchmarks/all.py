"""`python -m benchmarks.all`: every benchmark, one after another, each in its own process; then the report.

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

from benchmarks import measure, report

COMMANDS = {
    "ops": ["benchmarks"],
    "attention": ["benchmarks.attention"],
    "delta": ["benchmarks.delta"],
    "training": [
        "benchmarks.training --floor --profile",
        "benchmarks.training qwen3.5-9b gemma-4-e4b ministral-3-8b --providers transformers",
        "benchmarks.training 1b --providers 'ligermodels + torch.compile'",
        "benchmarks.training gemma --providers 'transformers + torch.compile'",
        "benchmarks.training 1b --providers ligermodels --in-backward",
        "benchmarks.training 'llama-3-8b 4x4096' 'llama-3-8b 1x4096' 'qwen2.5-7b 2x4096' 'llama-3.2-1b 4x4096' "
        "'llama-3-8b 4x4096 LoRA 16' --providers ligermodels 'ligermodels + float8' 'transformers + liger' "
        "'transformers + torchao float8 + torch.compile' --floor",
        "benchmarks.command_line",
    ],
    "nativize": [
        "benchmarks.training 'llama-3-8b 4x4096' --providers 'transformers + nativize' 'transformers + liger'"
    ],
    "decoding": [
        "benchmarks.decoding --transformers",
        "benchmarks.decoding --model qwen3.5-9b --batches 1 8 --transformers",
        "benchmarks.decoding --model gemma-4-e4b --batches 1 8 --transformers",
        "benchmarks.decoding --model ministral-3-8b --batches 1 8 --transformers",
    ],
    "quantized": ["benchmarks.quantized_decoding --no-linears"],
    "medusa": [
        "benchmarks.medusa --floor",
        "benchmarks.medusa --batch 8 --length 8192 --ignored 0 --providers ligermodels 'ligermodels shared'",
        "benchmarks.medusa --ignored 0 --providers 'ligermodels stage 2'",
        "benchmarks.medusa --ignored 0 --floor "
        "--providers ligermodels 'ligermodels float8' liger 'liger + torchao float8'",
    ],
    "demo": ["benchmarks.demo"],
    "loading": ["benchmarks.loading {folder}"],
    "float8-loss": ["benchmarks.float8_loss"],
}
"""Name -> commands: module and arguments; {folder} is a temporary one, or that of --folder."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(COMMANDS)} (all)")
    parser.add_argument("--folder", type=Path, help="where the checkpoint to load is, or is made (16 GB)")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(COMMANDS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(COMMANDS)}")
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.names or COMMANDS:
            for line in COMMANDS[name]:
                command = [part.format(folder=arguments.folder or temporary) for part in shlex.split(line)]
                start = time.perf_counter()
                out = str(measure.results(name))
                done = subprocess.run([sys.executable, "-m", *command, "--out", out], check=False)
                print(f"{line}: {time.perf_counter() - start:.0f} s, exit code {done.returncode}", flush=True)
                failed += [line] if done.returncode else []
    print(*report.write(measure.RESULTS, measure.gpu_suffix(), report.DOCS), sep="\n")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
