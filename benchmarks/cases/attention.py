"""`python -m benchmarks attention [CASE ...] [--out FILE]`: causal attention by every installed backend.

`ligermodels` is `ops.attention` with its default backend; the record names the backend. TFLOP/s count pairs of a query
and a visible key: 4 operations per pair and channel forward, 10 backward. In packed cases documents of uneven lengths
share a row; SDPA has no packing and gets them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases.attention_cases import Case, cases
from benchmarks.reporting import recording
from benchmarks.timing import checks, measure
from benchmarks.timing.case import Case as OpCase
from benchmarks.timing.case import Passes
from benchmarks.timing.checks import Truth
from ligermodels import ops
from ligermodels.ops.attention.attention import BACKENDS, AttentionRequest, choose

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
            # the other backends may refuse very short sequences
            with sdpa_kernel(backend if b - a >= 64 or len(bounds) == 1 else SDPBackend.MATH):
                rows.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        return (rows[0] if len(rows) == 1 else torch.cat(rows, dim=2)).transpose(1, 2)

    return call


def providers(case: Case) -> dict[str, Call]:
    """Ours first, then installed backends that support the case."""
    found = {"ligermodels": _ours(case, "auto")}
    request = _request(case)
    by_name = [name for name in BACKENDS if name not in ("sdpa", "reference")]
    found |= {name: _ours(case, name) for name in by_name if BACKENDS[name].refuses(request) is None}
    if case.softcap is None and (case.window is None or case.window >= case.length):
        found["sdpa cudnn"] = _sdpa(case, SDPBackend.CUDNN_ATTENTION)
        found["sdpa flash"] = _sdpa(case, SDPBackend.FLASH_ATTENTION)
    return found


def _request(case: Case) -> AttentionRequest:
    return AttentionRequest(
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


def chosen(case: Case) -> str:
    """The default backend of `ops.attention`."""
    return choose(_request(case)).name


def results(call: Call, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The result and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


def truth(case: Case, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The result and the gradients of q, k and v by plain torch in fp32, one row and one group of heads at a time."""
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


def known(case: Case, inputs: tuple[Tensor, ...]) -> Truth:
    """The expected results of calls."""
    changed = checks.sampled(truth(case, (-inputs[0], *inputs[1:])))
    wanted = truth(case, inputs)
    return Truth([inputs[3]], wanted, {True: changed, False: checks.sampled(wanted)})


def passes(case: Case, call: Call, inputs: tuple[Tensor, ...]) -> Passes:
    """Calls on copies of the inputs.

    Args:
        case: The case.
        call: A provider.
        inputs: q, k, v and the gradient of the result.
    """
    return Passes(OpCase(case.name, case.inputs, None, {}, change=-1), call, inputs[:3], [inputs[3]])


def timed(case: Case, calls: Mapping[str, Passes], wanted: Truth) -> dict[str, dict[str, Any]]:
    """Times and rates of calls that take turns, or the error of a call.

    Args:
        case: The case.
        calls: Provider -> its calls.
        wanted: Expected results.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in calls}
    for which in ("forward", "both"):
        every = {name: checks.Checked(one, which, wanted) for name, one in calls.items() if "failed" not in found[name]}
        hooks = {name: checked.hooks for name, checked in every.items()}
        times = measure.taking_turns({name: checked.call for name, checked in every.items()}, hooks)
        for name, checked in every.items():
            try:
                checked.verify("in a timed call")
                found[name][f"{which}_ms"] = times[name]
            except measure.Untrusted as failure:
                found[name] = {"failed": str(failure)}
    work = 4e-9 * case.pairs * case.head_dim
    for times in (each for each in found.values() if "failed" not in each):
        times["forward_tflops"] = work / times["forward_ms"]
        times["backward_tflops"] = 2.5 * work / (times["both_ms"] - times["forward_ms"])
    return found


def measured(case: Case, only: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """A record for each provider; ours includes `shares_of_best`."""
    torch.manual_seed(0)
    shorter = case.shorter
    others, inputs = shorter.inputs(), case.inputs()
    of_others, wanted = known(shorter, others), known(case, inputs)
    calls = {name: call for name, call in providers(case).items() if only is None or name in only}
    records: dict[str, dict[str, Any]] = {}
    right: dict[str, Passes] = {}
    for name, call in calls.items():
        record = records[name] = {"case": case.name, "provider": name}
        try:
            one = passes(case, call, inputs)
            found = one.both()
            record["error"] = measure.worst(
                measure.relative_error(a, b) for a, b in zip(found, wanted.wanted, strict=True)
            )
            checks.poison(found)
            if not record["error"] < measure.ERROR_LIMIT:
                raise measure.Untrusted(f"wrong by {record['error']:.2g}")
            checks.confirm(one, wanted, "once its inputs have changed")
            measure.milliseconds(one.both)  # alone: an error must not end the turns of the others
            right[name] = one
        except Exception as failure:  # a result
            record["failed"] = f"{type(failure).__name__}: {failure}"[:200]
    for name, times in timed(case, right, wanted).items():
        records[name] |= times
    for name in (name for name in right if "failed" not in records[name]):
        try:
            checks.confirm(passes(shorter, providers(shorter)[name], others), of_others, f"for {shorter.name}")
        except Exception as failure:
            records[name] = {key: records[name][key] for key in ("case", "provider", "error")}
            records[name]["failed"] = f"{type(failure).__name__}: {failure}"[:200]
    if "failed" not in records.get("ligermodels", {"failed": ""}):
        records["ligermodels"]["backend"] = chosen(case)
        records["ligermodels"] |= shares_of_best(records)
    yield from records.values()
    measure.free()


def shares_of_best(records: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Time of the fastest provider over our time. The provider with the name of our backend makes the same calls as
    ours, so the faster of the two counts as ours."""
    ours, shares = ("ligermodels", records["ligermodels"]["backend"]), {}
    for which in ("forward", "both"):
        times = {name: record[f"{which}_ms"] for name, record in records.items() if f"{which}_ms" in record}
        shares[f"best_{which}"] = min(times.values()) / min(times[name] for name in ours if name in times)
    return shares


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("cases", nargs="*", help="parts of names of cases (all)")
    parser.add_argument("--providers", nargs="*", help="names of providers (all that are installed)")
    parser.add_argument("--list", action="store_true", help="only list the names of the cases")
    arguments = parser.parse_args()
    wanted = [c for c in cases() if not arguments.cases or any(part in c.name for part in arguments.cases)]
    if arguments.list:
        print(*(case.name for case in wanted), sep="\n")
        return
    table, common, records = Table("case", "provider", *COLUMNS), recording.facts(), []
    for case in wanted:
        for record in measured(case, arguments.providers):
            records.append(record)
            recording.write(arguments.out, [{**record, **common}])
            cells = [f"{record[c]:.3g}" if c in record else "-" for c in COLUMNS]
            name = f"{record['provider']} ({record['backend']})" if "backend" in record else record["provider"]
            print(case.name, name, *cells, record.get("failed", ""), flush=True)
            table.add_row(case.name, name, *cells)
    Console(width=180).print(table)
    recording.end(records)
