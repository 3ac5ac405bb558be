"""`python -m benchmarks quantized_decoding [--model NAME] [--out FILE]`: decoding in bf16, float8, int4.

First the linear layers of a block, and the head, by themselves, for 1 to 64 tokens: copies of a weight follow one
another in a CUDA graph, more than the cache holds, beside the time in which their bytes, weights and scales, can be
read at the rate of a large copy. torchao's int4 and float8 weights are timed too where it is installed, compiled. A
result that is farther from that of the rounded weight than bf16 explains is an error. Then greedy decoding of the whole
model, its head in bf16 or quantised too, and the step of a Medusa tree, beside the time in which all that a step needs
of the weights can be read.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ligermodels as lm
from benchmarks.cases.decoding import PROMPT, seconds_a_token, tree_step
from benchmarks.cases.models import CONFIGS
from benchmarks.reporting import recording
from benchmarks.timing import measure
from ligermodels import ops
from ligermodels.layers.initialization import persistent_tensors

KINDS: tuple[ops.Quantized, ...] = ("float8", "int4")
FORMATS: dict[str, tuple[ops.Quantized | None, ops.Quantized | None]] = {
    "bf16": (None, None),
    "float8": ("float8", None),
    "int4": ("int4", None),
    "float8, head float8": ("float8", "float8"),
    "int4, head float8": ("int4", "float8"),
    "int4, head int4": ("int4", "int4"),
}
"""Of the weights of the blocks, and of the head; None is bf16."""
ROWS = (1, 2, 4, 8, 16, 32, 64)
Call = Callable[[Tensor], Tensor]
Way = Callable[[Tensor], tuple[Call, Tensor, int]]
"""Of a weight (N, K): what multiplies by it, the weight that this stands for, and the bytes to read."""


def bf16(weight: Tensor) -> tuple[Call, Tensor, int]:
    """As it is."""
    return partial(F.linear, weight=weight), weight, weight.nbytes


def decoding(weight: Tensor) -> tuple[Call, Tensor, int]:
    """As it is, by `ops.decode_linear`."""
    return partial(ops.decode_linear, weight=weight), weight, weight.nbytes


def ours(kind: ops.Quantized, weight: Tensor) -> tuple[Call, Tensor, int]:
    """`ops.quantized_linear`."""
    codes, scales = ops.quantize_weight(weight, kind)
    rounded = ops.dequantize_weight(codes, scales, weight.shape[1], torch.float32)
    return partial(ops.quantized_linear, codes=codes, scales=scales), rounded, codes.nbytes + scales.nbytes


def torchao(config: str, options: dict[str, Any], bits: float, weight: Tensor) -> tuple[Call, Tensor, int]:
    """torchao's linear layer of this config, compiled; the weight is that of its product with the unit vectors."""
    quantization = importlib.import_module("torchao.quantization")  # a peer, which may be missing
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device, dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    quantization.quantize_(linear, getattr(quantization, config)(**options))
    unit = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
    rounded = torch.cat([linear(part) for part in unit.split(64)]).t().float()
    return torch.compile(linear), rounded, int(weight.numel() * bits / 8)


WAYS: dict[str, Way] = {
    "bf16": bf16,
    "ligermodels bf16": decoding,
    **{f"ligermodels {kind}": partial(ours, kind) for kind in KINDS},
    "torchao float8": partial(torchao, "Float8WeightOnlyConfig", {}, 8),
    "torchao int4": partial(torchao, "Int4WeightOnlyConfig", {"group_size": 128}, 4.125),
}


def projections(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Shapes (N, K) of the linear layers in a block of the model, and of its head."""
    model = lm.from_config({**config, "num_hidden_layers": 1}, device="meta")
    linears = {n: m for n, m in model.decoder.blocks[0].named_modules() if isinstance(m, nn.Linear)}
    shapes = {name: (linear.out_features, linear.in_features) for name, linear in linears.items()}
    return {**shapes, "head": (model.config.vocab_size, model.config.hidden_size)}


@torch.no_grad()
def linears(config: dict[str, Any], rate: float) -> Iterator[dict[str, Any]]:
    """A record for each projection, number of tokens and way."""
    for name, (N, K) in projections(config).items():
        weights = [
            torch.randn(N, K, device=measure.DEVICE, dtype=torch.bfloat16) * K**-0.5
            for _ in range(measure.row_length(2 * N * K))
        ]
        for way, make in WAYS.items():
            case = {"linear": name, "shape": [N, K], "provider": way}
            try:
                made = [make(weight) for weight in weights]
            except Exception as failure:  # A result, not the end of the run: a peer may be missing.
                yield {**case, "failed": f"{type(failure).__name__}: {failure}"[:200]}
                continue
            for rows in ROWS:
                x = torch.randn(rows, K, device=measure.DEVICE, dtype=torch.bfloat16)
                call, rounded, size = made[0]
                error = measure.relative_error(call(x), x.float() @ rounded.float().t())
                if not error <= measure.ERROR_LIMIT:
                    raise RuntimeError(f"{way}, {name}, {rows} rows: relative error {error:.2g}")
                ms = measure.in_a_row([partial(each, x) for each, _, _ in made])
                yield {**case, "rows": rows, "ms": ms, "of_limit": size / rate * 1e3 / ms, "error": error}
            del made
            measure.free()


def models(
    config: dict[str, Any], rate: float, batches: list[int], nodes: int, formats: Iterable[str] = FORMATS
) -> Iterator[dict[str, Any]]:
    """A record for each batch and format, and the step of a tree in each."""
    for name in formats:
        kind, head = FORMATS[name]
        torch.manual_seed(0)
        model = lm.from_config(config, dtype=torch.bfloat16, device=measure.DEVICE).eval()
        if kind is not None:
            lm.quantize(model, kind, head=head)
        tensors = persistent_tensors(model)
        size = sum(each.nbytes for each in tensors.values())
        if not model.config.head.tied:
            size -= model.decoder.embed.weight.nbytes  # of which a step needs a row
        provider, limit = f"ligermodels {name}", size / rate * 1e3
        for batch in batches:
            ids = torch.randint(config["vocab_size"], (batch, PROMPT), device=measure.DEVICE)
            step = 1e3 * seconds_a_token(partial(model.generate, ids))
            speed = batch / step * 1e3
            yield {
                "provider": provider,
                "batch": batch,
                "step_ms": step,
                "tokens_per_s": speed,
                "of_limit": limit / step,
            }
        step, count = tree_step(
            model, torch.randint(config["vocab_size"], (1, PROMPT), device=measure.DEVICE), 4, nodes
        )
        yield {"provider": provider, "tree": count, "step_ms": step, "of_limit": limit / step}
        del model, tensors
        measure.free()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks quantized_decoding", description=__doc__)
    parser.add_argument("--model", default="llama-3-8b", choices=CONFIGS)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--formats", nargs="*", default=FORMATS, choices=FORMATS, help="of the whole model's weights")
    parser.add_argument("--nodes", type=int, default=63, help="nodes of the tree below its root")
    parser.add_argument("--no-linears", action="store_true", help="the whole model alone")
    parser.add_argument("--no-model", action="store_true", help="the linear layers alone")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args()
    config, facts, rate = CONFIGS[arguments.model], recording.facts(), measure.copy_rate()
    records = [] if arguments.no_linears else [linears(config, rate)]
    records += (
        [] if arguments.no_model else [models(config, rate, arguments.batches, arguments.nodes, arguments.formats)]
    )
    for record in (each for part in records for each in part):
        print(record, flush=True)
        recording.write(arguments.out, [{"case": arguments.model, **record, **facts}])
