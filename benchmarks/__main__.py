"""`python -m benchmarks [OP ...] [--out FILE]`: the ops beside their peers, time and memory, as table and JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.measure import copy_rate, facts, milliseconds, peak_mib, relative_error
from benchmarks.ops import CASES, Call, Case

ERROR_LIMIT = 0.03
"""bf16 results farther than this from the fp32 ones make a timing void."""


def _passes(provider: Call, inputs: tuple[Tensor, ...]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The forward pass, and forward with backward (giving outputs and gradients), of `provider` on `inputs`."""
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    trained = [x for x in leaves if x.requires_grad]
    outputs = provider(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    seeds = [torch.ones_like(y) if y.ndim == 0 else torch.randn_like(y) for y in outputs]
    del outputs

    def forward() -> Any:
        with torch.no_grad():
            return provider(*leaves)

    def both() -> list[Tensor]:
        found = provider(*leaves)
        found = found if isinstance(found, tuple) else (found,)
        return [*found, *torch.autograd.grad(found, trained, seeds)]

    return forward, both


def _verified(case: Case, provider: Call, inputs: tuple[Tensor, ...]) -> float:
    """Largest relative error of outputs and gradients against plain torch in fp32."""
    exact = tuple(x.float() if x.is_floating_point() else x for x in inputs)
    torch.manual_seed(1)
    found = _passes(provider, inputs)[1]()
    torch.manual_seed(1)
    wanted = _passes(case.providers["torch"], exact)[1]()
    return max(relative_error(a, b) for a, b in zip(found, wanted, strict=True))


def run(names: list[str], providers: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure the cases of each op in `names`; one record a provider, of all or those named, and of the limit."""
    limit, common, records = copy_rate(), facts(), []
    for case in (case for name in names for case in CASES[name]()):
        if case.limit is not None:
            alone = [partial(call, *case.inputs()) for call in case.limit]
            with torch.no_grad():
                times = {"forward_ms": milliseconds(alone[0]), "both_ms": milliseconds(alone[1])}
            records.append({"case": case.name, "provider": "limit", "copy_bytes_per_s": limit, **times, **common})
            del alone
        for provider, call in case.providers.items():
            if providers is not None and provider not in providers:
                continue
            torch.manual_seed(0)
            inputs = case.inputs()
            record: dict[str, Any] = {"case": case.name, "provider": provider, "copy_bytes_per_s": limit}
            try:
                record["error"] = _verified(case, call, inputs)
                if not record["error"] < ERROR_LIMIT:
                    raise ValueError(f"wrong by {record['error']:.2g}")
                forward, both = _passes(call, inputs)
                record |= {"forward_ms": milliseconds(forward), "both_ms": milliseconds(both)}
                record["peak_mib"] = peak_mib(both)
                if case.bytes:
                    for which, count in zip(("forward", "both"), case.bytes, strict=True):
                        record[f"{which}_of_copy"] = count / record[f"{which}_ms"] * 1e3 / limit
            except Exception as failure:  # A peer that fails is a result, not the end of the run.
                if provider == "ligermodels":
                    raise
                record["failed"] = f"{type(failure).__name__}: {failure}"[:200]
            records.append({**record, **common})
            del inputs
            torch.cuda.empty_cache()
    return records


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"which ops: {', '.join(CASES)} (all)")
    parser.add_argument("--providers", nargs="*", help="only these, in place of all that are installed")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args()
    if unknown := set(arguments.ops) - set(CASES):
        parser.error(f"unknown ops: {', '.join(sorted(unknown))}; there are: {', '.join(CASES)}")
    records = run(arguments.ops or list(CASES), arguments.providers)
    columns = ("forward_ms", "both_ms", "peak_mib", "forward_of_copy", "both_of_copy", "error")
    table = Table("case", "provider", *columns, title=f"{records[0]['gpu']}, bf16")
    for record in records:
        cells = [f"{record[c]:.3g}" if c in record else record.get("failed", "-")[:20] for c in columns]
        table.add_row(record["case"], record["provider"], *cells)
    Console(width=160).print(table)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with arguments.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
