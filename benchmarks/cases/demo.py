"""`python -m benchmarks demo [--out FILE]`: `ligermodels demo --size gpu`, its speed-ups as records.

A model of about 200 M parameters and Medusa heads are trained on Python sources. Decoding with the heads is then timed
beside decoding without them, both in CUDA graphs, at several batch sizes, on prompts from the validation split.

- `speed_up`: ratio of the wall times of whole calls of `generate`.
- `same`: number of sequences with the same tokens as greedy decoding without heads.
- `float32_same`: the same number for the model of stage 1 in float32, out of `float32_prompts` prompts at batch size 1,
  with `float32_new_tokens` tokens each.

`--json` reads the demo.json of an earlier demo of this commit, with its GPU, date and torch. An interrupted demo has
the results up to then.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.reporting import recording


def records_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A record for each stage of training, batch size and acceptance of a demo.json."""
    records = []
    machine = {key: results[key] for key in ("gpu", "torch", "date") if key in results}
    for result in results["decoding"]:
        case = f"stage {result['stage']} {result['acceptance']} batch {result['batch']}"
        record = {"case": case, "provider": "ligermodels", "parameters": results["parameters"], **result, **machine}
        if "float32" in results and case == "stage 1 greedy batch 1":
            record |= {f"float32_{key}": results["float32"][key] for key in ("same", "prompts")}
            record["float32_new_tokens"] = results["float32"]["tokens"] // results["float32"]["prompts"]
        records.append(record)
    return records


def drafts_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A record for each kind of draft heads, batch size and way of decoding of a demo.json."""
    machine = {key: results[key] for key in ("gpu", "torch", "date") if key in results}
    return [
        {
            "case": f"{record['decoding']} batch {record['batch']}",
            "provider": record["kind"],
            "draft_seconds": results["settings"]["draft_seconds"],
            **record,
            **machine,
        }
        for record in results.get("drafts", [])
    ]


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("--json", type=Path, help="demo.json of an earlier demo, in place of a new run")
    parser.add_argument("--drafts", type=Path, help="append the comparison of draft heads to this file")
    arguments = parser.parse_args()
    if arguments.json is not None:
        results = json.loads(arguments.json.read_text(encoding="utf-8"))
        if not (results.get("decoding") or results.get("drafts")):
            parser.error(f"--json {arguments.json}: it has no results of decoding")
    elif not torch.cuda.is_available():
        parser.error("the demo needs a CUDA GPU, and torch sees none; give --json for an earlier demo")
    else:
        from ligermodels.demo import GpuDemoSettings, run_demo

        with tempfile.TemporaryDirectory() as folder:
            results = run_demo(Path(folder) / "demo", GpuDemoSettings())
    common = recording.facts()
    if arguments.json is not None:  # the versions of this machine's packages do not apply
        common = {name: common[name] for name in ("commit", "measure")}
    records = [{**common, **record} for record in records_of(results)]
    recording.write(arguments.out, records)
    recording.write(arguments.drafts, [{**common, **record} for record in drafts_of(results)])
    for record in records:
        print(
            record["case"], f"{record['speed_up']:.2f}", f"{record['same']} of {record['prompts']} the same", flush=True
        )
