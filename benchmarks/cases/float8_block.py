"""`python -m benchmarks float8_block [--out FILE]`: one block of Llama-3-8B, forward and backward, in bf16 and float8.

4 sequences of 4096 tokens. Each variant is one CUDA graph, with the casts of weights and gradients. The graphs take
turns after a warm-up of seconds, so that all run on a GPU at its power limit. Timed as well: the matrix products alone,
in float8 on operands that are already cast, which is the lower bound; and each cast alone, norms and activations that
write float8 for frozen weights too, with its rate beside the rate of a copy. Gradients are compared with the gradients
of the block in bf16. The two layouts of a cast must hold the same bytes.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from benchmarks.cases.projections import float8_gemms, gemms
from benchmarks.reporting import recording
from benchmarks.timing import measure
from benchmarks.timing.case import random
from ligermodels import ops
from ligermodels.ops.float8.scaling import E4M3, E5M2

BATCH, LENGTH, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 4, 4096, 4096, 14336, 32, 8, 128
TOKENS, EPS = BATCH * LENGTH, 1e-5
PROJECTIONS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD_DIM),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}
Call = Callable[[], Any]


@dataclass(frozen=True)
class Way:
    """A variant of the block: in bf16 without a recipe."""

    recipe: ops.Float8Recipe | None = None

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """A projection."""
        return F.linear(x, weight) if self.recipe is None else ops.float8_linear(x, weight, recipe=self.recipe)


WAYS = {
    "bf16": Way(),
    "float8": Way(ops.Float8Recipe()),
    "float8, E4M3 gradients": Way(ops.Float8Recipe(gradient_dtype=E4M3)),
    "float8, backward in float32 sums": Way(ops.Float8Recipe(backward_fast=False)),
}


class Block:
    """The block's tensors, and its passes in any way."""

    def __init__(self) -> None:
        self.x, self.seed = random(BATCH, LENGTH, HIDDEN), random(BATCH, LENGTH, HIDDEN)
        self.weights = {name: random(*shape) * shape[1] ** -0.5 for name, shape in PROJECTIONS.items()}
        self.norms = [1 + 0.1 * random(HIDDEN) for _ in range(2)]
        angles = torch.outer(torch.arange(LENGTH), 5e5 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)).to(self.x.device)
        self.tables = angles.cos()[None], angles.sin()[None]
        self.leaves = {"x": self.x, **self.weights, "mixer_norm": self.norms[0], "mlp_norm": self.norms[1]}
        for leaf in self.leaves.values():
            leaf.requires_grad_()

    def passes(self, way: Way, attention: bool = True) -> tuple[Tensor, ...]:
        """The output, and the gradients of all leaves."""
        y, x = ops.add_rms_norm(self.x, None, self.norms[0], EPS)
        qkv = way.linear(y, self.weights["qkv"])
        if attention:
            q, k, v = ops.rope_qkv(qkv, *self.tables, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
            mixed = ops.attention(q, k, v).flatten(2)
        else:
            mixed = qkv[..., : HEADS * HEAD_DIM]
        branch = way.linear(mixed, self.weights["o"])
        y, x = ops.add_rms_norm(x, branch, self.norms[1], EPS)
        out = x + way.linear(ops.swiglu(way.linear(y, self.weights["gate_up"])), self.weights["down"])
        return out.detach(), *torch.autograd.grad(out, list(self.leaves.values()), self.seed)


def products(recipe: ops.Float8Recipe | None) -> Call:
    """The block's matrix products, forward and both gradients, on operands that are already cast."""
    make = gemms if recipe is None else partial(float8_gemms, recipe=recipe)
    calls = [call for size, width in PROJECTIONS.values() for call in make((TOKENS, size, width))]
    return lambda: [call() for call in calls] and None


def in_turns(graphs: Mapping[str, Call], seconds: float, rounds: int = 3) -> dict[str, float]:
    """Milliseconds of graphs under sustained load: the median of rounds in which they take turns.

    Args:
        graphs: Name -> function that replays a graph.
        seconds: Load before each timing.
        rounds: Number of rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds):
        for name in list(graphs)[:: 1 if turn % 2 == 0 else -1]:
            times[name].append(measure.sustained(graphs[name], seconds))
    return {name: statistics.median(of_graph) for name, of_graph in times.items()}


def agreement(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Cosine of two tensors, and the ratio of their norms."""
    a, b = found.double().flatten(), wanted.double().flatten()
    return float(a @ b / (a.norm() * b.norm())), float(a.norm() / b.norm())


def check_layouts() -> None:
    """RuntimeError unless casts write the bytes that they should, in both layouts."""
    x = random(1000, HIDDEN)
    for dtype in (E4M3, E5M2):
        cast = ops.float8_cast(x, dtype, columns=True)
        assert cast.rows is not None and cast.columns is not None
        rows, columns = cast.rows.view(torch.uint8), cast.columns.view(torch.uint8)
        if not torch.equal(rows, (x.float() / cast.scale).to(dtype).view(torch.uint8)):
            raise RuntimeError(f"float8_cast to {dtype}: rows differ from torch's cast")
        if not torch.equal(columns[:, :1000], rows.t()) or columns[:, 1000:].any():
            raise RuntimeError(f"float8_cast to {dtype}: the transposed layout differs from the row-major one")


def kernels(step: Call) -> dict[str, float]:
    """Milliseconds of each kernel in a call, longest first; kernels of less than a per cent are left out."""
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        measure.synchronize()
    total: Counter[str] = Counter()
    for event in found.events() or ():
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            total[event.name[:60]] += event.time_range.end - event.time_range.start
    whole = sum(total.values())
    return {name: round(us / 1e3, 3) for name, us in total.most_common() if us > whole / 100}


def parts() -> list[dict[str, Any]]:
    """Each cast and producer by itself, back to back in a CUDA graph: milliseconds, the bytes it moves and its rate."""
    norm, dtype = 1 + 0.1 * random(HIDDEN), E4M3
    rows, wide, weight = TOKENS * HIDDEN, TOKENS * INTERMEDIATE, 2 * INTERMEDIATE * HIDDEN

    def float8(gate_up: Tensor) -> Tensor:
        return ops.float8_gated_activation(gate_up, ops.GLUOptions("silu"), E4M3, E5M2)

    def gradient(gate_up: Tensor, dy: Tensor, activation: Callable[[Tensor], Tensor]) -> Any:
        return torch.autograd.grad(activation(gate_up), gate_up, dy)

    narrow = partial(random, TOKENS, HIDDEN)
    pairs, out = partial(random, TOKENS, 2 * INTERMEDIATE), partial(random, TOKENS, INTERMEDIATE)
    cases: dict[str, tuple[Callable[..., Any], tuple[Callable[[], Tensor], ...], int]] = {
        "cast of hidden states, both layouts": (
            partial(ops.float8_cast, dtype=dtype, columns=True), (narrow,), 6 * rows),
        "cast of hidden states, rows": (partial(ops.float8_cast, dtype=dtype), (narrow,), 5 * rows),
        "cast of a weight, both layouts": (
            partial(ops.float8_cast, dtype=dtype, columns=True), (partial(random, 2 * INTERMEDIATE, HIDDEN),),
            6 * weight),
        "add + norm, bf16": (lambda x, r: ops.add_rms_norm(x, r, norm, EPS), (narrow, narrow), 8 * rows),
        "add + norm, float8 by row": (
            lambda x, r: ops.float8_add_rms_norm(x, r, norm, EPS, dtype), (narrow, narrow), 7 * rows),
        "SwiGLU, bf16": (ops.swiglu, (pairs,), 6 * wide),
        "SwiGLU, float8 by row": (float8, (pairs,), 5 * wide),
        "SwiGLU forward and backward, bf16": (partial(gradient, activation=ops.swiglu), (pairs, out), 16 * wide),
        "SwiGLU forward and backward, float8 by row": (partial(gradient, activation=float8), (pairs, out), 13 * wide),
    }  # fmt: skip
    copy, found = measure.copy_rate(), []
    for name, (call, inputs, count) in cases.items():
        given = [make().requires_grad_("cast" not in name) for make in inputs]
        milliseconds = measure.in_a_row(measure.row_length(count) * [partial(call, *given)])
        rate = count / milliseconds * 1e3
        found.append({"part": name, "ms": milliseconds, "tb_per_s": rate / 1e12, "of_copy": rate / copy})
        measure.free()
    return found


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of load before each timing")
    parser.add_argument("--no-attention", action="store_true", help="leave out RoPE and attention")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    check_layouts()
    facts, records, attention = recording.facts(), [], not arguments.no_attention
    case = f"Llama-3-8B block {BATCH}x{LENGTH}" + " without attention" * arguments.no_attention

    def report(**record: Any) -> None:
        records.append({"case": case, **record, **facts})
        print(json.dumps(record), flush=True)

    limits = {name: measure.graphed(products(way.recipe)) for name, way in WAYS.items()}
    of_products = in_turns(limits, arguments.seconds)
    for name, ms in of_products.items():
        flops = 6 * TOKENS * sum(N * K for N, K in PROJECTIONS.values())
        report(provider=f"products alone, {name}", ms=ms, tflops=flops / ms / 1e9, ratio=of_products["bf16"] / ms)
    del limits
    measure.free()

    block = Block()
    wanted = block.passes(WAYS["bf16"], attention)
    graphs, peaks = dict[str, Call](), dict[str, float]()
    for name, way in WAYS.items():
        found = block.passes(way, attention)
        pairs = zip(("output", *block.leaves), found, wanted, strict=True)
        report(provider=name, agreement={each: agreement(a, b) for each, a, b in pairs})
        del found
        peaks[name] = measure.peak_mib(partial(block.passes, way, attention))
        graphs[name] = measure.graphed(partial(block.passes, way, attention))
    times = in_turns(graphs, arguments.seconds)
    for name, ms in times.items():
        report(provider=name, ms=ms, ratio=times["bf16"] / ms, peak_mib=peaks[name], kernels=kernels(graphs[name]))
    del graphs, block, wanted
    measure.free()
    for part in parts():
        report(**part)
    limit = of_products["bf16"] / of_products["float8"]
    print(f"{case}: float8 {times['bf16'] / times['float8']:.3f} times as fast; its products alone {limit:.3f}")
    recording.write(arguments.out, records)
