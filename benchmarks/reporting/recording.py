"""Records of results: the facts in each record, and the files of JSON lines that records are appended to."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing.measure import MEASURE

RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = (
    *("torch", "triton", "transformers", "liger-kernel", "quack-kernels", "cut-cross-entropy"),
    *(
        "flash-attn-4",
        "flash-attn-3",
        "flash-attn",
        "flash-linear-attention",
        "fla-core",
        "mamba-ssm",
        "causal-conv1d",
        "peft",
        "trl",
        "torchao",
    ),
)
"""Packages with a recorded version, if they are installed."""


def parser(about: str | None) -> argparse.ArgumentParser:
    """A parser of the arguments of a benchmark, with the argument --out: a file to `write` records to."""
    found = argparse.ArgumentParser(prog=sys.argv[0], description=about)
    found.add_argument("--out", type=Path, help="append JSON lines to this file")
    return found


def facts() -> Mapping[str, Any]:
    """Versions of torch and of installed peers, the GPU, the commit, the date and the version of the timing method."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    day = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    return {**versions, "gpu": gpu_name(), "commit": commit(), "date": day, "measure": MEASURE}


def commit() -> str:
    """Commit of the code in the current folder, with a note if the code has changes.

    The environment variable COMMIT names the commit of a tree that was copied without its history.
    """
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()

    code = ("--", "ligermodels", "benchmarks", ":!benchmarks/results")  # runs append to results
    head = git("rev-parse", "HEAD") or "unknown"
    return f"{head} with changes" if git("status", "--porcelain", "--untracked-files=no", *code) else head


def gpu_name() -> str:
    """Name of the current GPU, or "CPU"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def gpu_suffix() -> str:
    """Suffix of this GPU in the names of result files, such as h200."""
    return gpu_name().split()[-1].lower()


def results(name: str) -> Path:
    """File for the results of a benchmark on this GPU, such as training-h200.jsonl."""
    return RESULTS / f"{name}-{gpu_suffix()}.jsonl"


def write(path: Path | None, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records as JSON lines and create missing folders. Without a path, do nothing."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def end(records: Iterable[Mapping[str, Any]]) -> None:
    """Exit with an error if a provider of ours failed; peers may fail."""
    failed = [r for r in records if "failed" in r and str(r.get("provider")).startswith("ligermodels")]
    if failed:
        raise SystemExit("\n".join(f"{r['case']}, {r['provider']}: {r['failed']}" for r in failed))
