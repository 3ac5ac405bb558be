"""`python -m benchmarks.attention [CASE ...] [--out FILE]`: causal attention as the models ask for it, beside every
backend that is installed.

`ligermodels` is `ops.attention` with the backend it chooses by itself, which the record names. TFLOP/s count the pairs
of a query and a key that see each other: 4 operations a pair and channel forward, 10 backward. Packed, documents of
uneven lengths share a row; SDPA, which has no such thing, gets them one by one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import measure
from benchmarks.attention_cases import Case, cases
from ligermodels import ops
from ligermodels.ops.attention.attention import AttentionRequest, backends, choose

COLUMNS = ("forward_ms", "both_ms", "forward_tflops", "backward_tflops", "best_forward", "best_both", "error")
Call = Callable[..., Tensor]


def _ours(case: Case, backend: str) -> Call:
    bounds = case.bounds

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attention(q, k, v, window=case.window, softcap=case.softcap, cu_seqlens=bounds, backend=backend)

    return call


def _sdpa(case: Case, backend: SDPBackend) -> Call:
    bounds = list(pairwise(accumulate(case.documents or (case.length,), initial=0)))

    def call(*inputs: Tensor) -> Tensor:
        rows = []
        for a, b in bounds:
            q, k, v = (x[:, a:b].transpose(1, 2) for x in inputs)
            # What is very short, the others may refuse.
            with sdpa_kernel(backend if b - a >= 64 or len(bounds) == 1 else SDPBackend.MATH):
                rows.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        return (rows[0] if len(rows) == 1 else torch.cat(rows, dim=2)).transpose(1, 2)

    return call


def providers(case: Case) -> dict[str, Call]:
    """Ours first, then what is installed and has the case's options."""
    found = {"ligermodels": _ours(case, "auto")}
    found |= {name: _ours(case, name) for name, there in backends().items() if there and name.startswith("flash-attn")}
    if case.softcap is None and (case.window is None or case.window >= case.length):
        found["sdpa cudnn"] = _sdpa(case, SDPBackend.CUDNN_ATTENTION)
        found["sdpa flash"] = _sdpa(case, SDPBackend.FLASH_ATTENTION)
    return found


def chosen(case: Case) -> str:
    """The backend that `ops.attention` chooses."""
    request = AttentionRequest(
        device=measure.DEVICE,
        dtype=torch.bfloat16,
        head_dim=case.head_dim,
        query_length=case.length,
        key_length=case.length,
        softmax_scale=case.head_dim**-0.5,
        window=case.window,
        softcap=case.softcap,
        masked=False,
        packed=bool(case.documents),
    )
    return choose(request).name


def results(call: Call, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The result and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


def truth(case: Case, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The same in plain torch and fp32, one row and one group of heads at a time."""
    group = case.heads // case.kv_heads
    found = [torch.empty_like(x, dtype=torch.float32) for x in (inputs[0], *inputs[:3])]
    reference = _ours(case, "reference")
    for row in range(case.batch):
        for head in range(case.kv_heads):
            several, one = slice(head * group, (head + 1) * group), slice(head, head + 1)
            places = [(slice(row, row + 1), slice(None), heads) for heads in (several, one, one, several)]
            part = results(reference, tuple(x[place].float() for x, place in zip(inputs, places, strict=True)))
            for whole, place, x in zip(found, (places[0], *places[:3]), part, strict=True):
                whole[place] = x
    return found


def timed(case: Case, calls: Mapping[str, Call], inputs: tuple[Tensor, ...]) -> dict[str, dict[str, float]]:
    """Times and rates of each, which take turns."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]

    def both(call: Call) -> Callable[[], object]:
        return lambda: torch.autograd.grad(call(*leaves), leaves, inputs[3])

    forward = measure.taking_turns({name: torch.no_grad()(partial(call, *leaves)) for name, call in calls.items()})
    whole = measure.taking_turns({name: both(call) for name, call in calls.items()})
    work = 4e-9 * case.pairs * case.head_dim
    return {
        name: {
            "forward_ms": forward[name],
            "both_ms": whole[name],
            "forward_tflops": work / forward[name],
            "backward_tflops": 2.5 * work / (whole[name] - forward[name]),
        }
        for name in calls
    }


def measured(case: Case, only: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """A record for each provider; ours has `shares_of_best` too."""
    torch.manual_seed(0)
    inputs = case.inputs()
    wanted = truth(case, inputs)
    calls = {name: call for name, call in providers(case).items() if only is None or name in only}
    records: dict[str, dict[str, Any]] = {}
    for name in calls:
        record = records[name] = {"case": case.name, "provider": name}
        try:
            found = results(calls[name], inputs)
            record["error"] = max(measure.relative_error(a, b) for a, b in zip(found, wanted, strict=True))
            if not record["error"] < measure.ERROR_LIMIT:
                raise ValueError(f"wrong by {record['error']:.2g}")
        except Exception as failure:  # A result, not the end of the run.
            record["failed"] = f"{type(failure).__name__}: {failure}"[:200]
    right = {name: call for name, call in calls.items() if "failed" not in records[name]}
    for name, times in timed(case, right, inputs).items():
        records[name] |= times
    if "ligermodels" in right:
        records["ligermodels"]["backend"] = chosen(case)
        records["ligermodels"] |= shares_of_best(records)
    yield from records.values()
    measure.free()


def shares_of_best(records: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The best time of any provider over ours. The backend that was chosen makes the very same calls where it is named:
    what the two differ by is chance, and the better of them counts as ours."""
    ours, shares = ("ligermodels", records["ligermodels"]["backend"]), {}
    for which in ("forward", "both"):
        times = {name: record[f"{which}_ms"] for name, record in records.items() if f"{which}_ms" in record}
        shares[f"best_{which}"] = min(times.values()) / min(times[name] for name in ours if name in times)
    return shares


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("cases", nargs="*", help="parts of the names of cases (all)")
    parser.add_argument("--providers", nargs="*", help="only these, in place of all that are installed")
    parser.add_argument("--list", action="store_true", help="only name the cases")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args()
    wanted = [c for c in cases() if not arguments.cases or any(part in c.name for part in arguments.cases)]
    if arguments.list:
        print(*(case.name for case in wanted), sep="\n")
        return
    table, common, records = Table("case", "provider", *COLUMNS), measure.facts(), []
    for case in wanted:
        for record in measured(case, arguments.providers):
            records.append(record)
            measure.write(arguments.out, [{**record, **common}])
            cells = [f"{record[c]:.3g}" if c in record else "-" for c in COLUMNS]
            name = f"{record['provider']} ({record['backend']})" if "backend" in record else record["provider"]
            print(case.name, name, *cells, record.get("failed", ""), flush=True)
            table.add_row(case.name, name, *cells)
    Console(width=180).print(table)
    measure.end(records)


if __name__ == "__main__":
    main()
