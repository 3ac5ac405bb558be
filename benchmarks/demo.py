"""`python -m benchmarks.demo [--out FILE]`: `ligermodels demo --size gpu`, its speed-ups as records.

A model of some 200 M parameters and Medusa heads are trained on Python sources; then decoding with the heads is timed
beside decoding without them, both in CUDA graphs, at several batch sizes, on held-out prompts. `speed_up` is of the
wall time of whole calls of `generate`; `same` counts sequences with the tokens of greedy decoding without heads, and
`float32_same`, of `float32_prompts`, those of the model of stage 1 in float32, one
prompt at a time, `float32_new_tokens` each.
`--json` takes the demo.json of a demo that was run with this commit, in place of a new one; it names the GPU, the day
and torch. Of a demo that was cut off, it has what was measured until then.
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
    machine = {key: results[key] for key in ("gpu", "torch", "date") if key in results}
    for each in results["decoding"]:
        case = f"stage {each['stage']} {each['acceptance']} batch {each['batch']}"
        record = {"case": case, "provider": "ligermodels", "parameters": results["parameters"], **each, **machine}
        if "float32" in results and case == "stage 1 greedy batch 1":
            record |= {f"float32_{key}": results["float32"][key] for key in ("same", "prompts")}
            record["float32_new_tokens"] = results["float32"]["tokens"] // results["float32"]["prompts"]
        found.append(record)
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--json", type=Path, help="the results of a demo, in place of a new one")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args()
    if arguments.json is not None:
        results = json.loads(arguments.json.read_text(encoding="utf-8"))
        if not results.get("decoding"):
            parser.error(f"--json {arguments.json}: no decoding was measured there")
    elif not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU, and the records name it")
    else:
        from ligermodels.demo import GpuDemoSettings, run_demo

        with tempfile.TemporaryDirectory() as folder:
            results = run_demo(Path(folder) / "demo", GpuDemoSettings())
    common = measure.facts()
    if arguments.json is not None:  # the packages are those of another machine
        common = {name: common[name] for name in ("commit", "measure")}
    records = [{**common, **record} for record in records_of(results)]
    measure.write(arguments.out, records)
    for record in records:
        print(
            record["case"], f"{record['speed_up']:.2f}", f"{record['same']} of {record['prompts']} the same", flush=True
        )


if __name__ == "__main__":
    main()
