"""`python -m benchmarks.demo [--out FILE]`: `ligermodels demo --size gpu`, its speed-ups as records.

A model of some 200 M parameters and Medusa heads are trained on Python sources; then decoding with the heads is timed
beside decoding without them, both in CUDA graphs, at several batch sizes, on held-out prompts. `speed_up` is of the
wall time of whole calls of `generate`; `same` counts sequences with the tokens of greedy decoding without heads.
`--json` takes the demo.json of a demo that was run with this commit on this GPU, in place of a new one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure


def records_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One for each stage of training, batch size and acceptance of a demo.json."""
    found = []
    for each in results["decoding"]:
        case = f"stage {each['stage']} {each['acceptance']} batch {each['batch']}"
        found.append({"case": case, "provider": "ligermodels", "parameters": results["parameters"], **each})
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--json", type=Path, help="the results of a demo, in place of a new one")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU, and the records name it")
    if arguments.json is not None:
        results = json.loads(arguments.json.read_text(encoding="utf-8"))
    else:
        from ligermodels.demo.gpu import run_gpu_demo

        with tempfile.TemporaryDirectory() as folder:
            results = run_gpu_demo(Path(folder) / "demo")
    common = measure.facts()
    records = [{**record, **common} for record in records_of(results)]
    measure.write(arguments.out, records)
    for record in records:
        print(
            record["case"], f"{record['speed_up']:.2f}", f"{record['same']} of {record['prompts']} the same", flush=True
        )


if __name__ == "__main__":
    main()
