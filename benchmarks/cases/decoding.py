"""`python -m benchmarks decoding [--model NAME] [--out FILE]`: greedy decoding beside transformers and the GEMMs alone.

The lower bound is the GEMMs of all layers and of the head, through cuBLAS in one CUDA graph. Time per token is the
difference between a long and a short generation, which leaves out the prefill and the capture of the graph.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ligermodels as lm
from benchmarks.cases.models import CONFIGS
from benchmarks.reporting import recording
from benchmarks.timing import measure
from ligermodels.speculative.tree import default_tree

SHORT, LONG, PROMPT = 8, 520, 128
WITHOUT_A_GRAPH = 40
"""LONG for decode steps without a CUDA graph, which take ten times as long."""
ROUNDS = 5
"""Number of rounds; the minimum counts, because the time to capture a graph varies by many steps."""


def gemms(model: lm.CausalLM, rows: int) -> float:
    """Milliseconds of the model's GEMMs alone, for `rows` tokens, in a CUDA graph."""
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    weights = [m.weight for m in linears] + [model.head.weight]
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1], dtype=w.dtype, device=w.device) for w in weights}

    def run() -> None:
        for weight in weights:
            inputs[weight.shape[1]] @ weight.t()

    with torch.no_grad():
        return measure.milliseconds(measure.graphed(run))


def seconds_a_token(generate: Callable[[int], Tensor], long: int | None = None) -> float:
    """Seconds per decode step of `generate`, between SHORT and `long` (default LONG) tokens."""
    long = LONG if long is None else long
    generate(SHORT)
    seconds = fewest_seconds(generate, (SHORT, long))
    return (seconds[long] - seconds[SHORT]) / (long - SHORT)


def fewest_seconds(generate: Callable[[int], object], counts: tuple[int, ...]) -> dict[int, float]:
    """Minimum seconds of `generate` for each number of tokens, over ROUNDS rounds."""
    seconds = dict.fromkeys(counts, math.inf)
    for _ in range(ROUNDS):
        for count in counts:
            measure.synchronize()
            start = time.perf_counter()
            generate(count)
            measure.synchronize()
            seconds[count] = min(seconds[count], time.perf_counter() - start)
    return seconds


def tree_step(model: lm.CausalLM, ids: Tensor, heads: int, below: int) -> tuple[float, int]:
    """Milliseconds per step of tree decoding, and the number of nodes of the tree.

    Args:
        model: The base model.
        ids: Prompt (1, T).
        heads: Number of Medusa heads.
        below: Nodes of the tree below its root.
    """
    medusa = lm.MedusaModel.from_base(model, heads, lm_head="shared")
    tree, passes = default_tree(heads, below), {}

    def generate(count: int) -> None:
        passes[count] = medusa.generate(ids, count, tree=tree, return_stats=True).passes

    seconds = fewest_seconds(generate, (SHORT, LONG))
    return 1e3 * (seconds[LONG] - seconds[SHORT]) / (passes[LONG] - passes[SHORT]), len(tree)


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("--model", default="llama-3-8b", choices=CONFIGS)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--heads", type=int, default=4, help="Medusa heads of the tree step")
    parser.add_argument("--nodes", type=int, default=63, help="nodes of the tree below its root")
    parser.add_argument("--transformers", action="store_true", help="also time transformers' generate, batch 1")
    arguments = parser.parse_args()
    config = CONFIGS[arguments.model]
    torch.manual_seed(0)
    model = lm.from_config(config, dtype=torch.bfloat16, device=measure.DEVICE)
    common, records = recording.facts(), []

    def note(name: str, milliseconds: float, batch: int, **more: Any) -> None:
        record = {"case": arguments.model, "what": name, "batch": batch, "step_ms": milliseconds, **more}
        records.append(record)
        recording.write(arguments.out, [{**record, **common}])
        print(name, batch, f"{milliseconds:.3f} ms, {batch / milliseconds * 1e3:.1f} tokens/s", more, flush=True)

    for batch in arguments.batches:
        ids = torch.randint(config["vocab_size"], (batch, PROMPT), device=measure.DEVICE)
        limit = gemms(model, batch)
        note("gemms", limit, batch)
        step = 1e3 * seconds_a_token(partial(model.generate, ids))
        note("ligermodels", step, batch, of_limit=limit / step)
        step = 1e3 * seconds_a_token(partial(model.generate, ids, cuda_graph=False), WITHOUT_A_GRAPH)
        note("ligermodels without a graph", step, batch)
    ids = torch.randint(config["vocab_size"], (1, PROMPT), device=measure.DEVICE)
    plain = next(r["step_ms"] for r in records if r["what"] == "ligermodels" and r["batch"] == 1)
    try:
        step, nodes = tree_step(model, ids, arguments.heads, arguments.nodes)
        note("medusa tree step", step, 1, nodes=nodes, of_plain=step / plain, gemms=gemms(model, nodes))
    except Exception as failure:  # a result: not every model decodes with heads
        named = {"case": arguments.model, "what": "medusa tree step", "batch": 1}
        recording.write(arguments.out, [{**named, "failed": f"{type(failure).__name__}: {failure}"[:200], **common}])
        print("medusa tree step", failure, flush=True)
    if arguments.transformers:
        from transformers import AutoConfig, AutoModelForCausalLM

        del model
        measure.free()
        with torch.device(measure.DEVICE):
            theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
        mask = torch.ones_like(ids)
        options = {"do_sample": False, "eos_token_id": None, "attention_mask": mask}
        step = 1e3 * seconds_a_token(
            lambda count: theirs.generate(ids, max_new_tokens=count, **options), WITHOUT_A_GRAPH
        )
        note("transformers", step, 1)
