"""`python -m benchmarks quantized_decoding [--model NAME] [--out FILE]`: decoding in bf16, float8, int4.

First the linear layers of a block and the head alone, for 1 to 64 tokens. Calls run back to back in a CUDA graph on
copies of a weight that exceed the cache. The lower bound is the time to read weights and scales at the rate of a large
copy. If torchao is installed, its int4 and float8 weights are timed too, compiled. A result whose difference from the
product with the rounded weight exceeds bf16 rounding is an error.

Then greedy decoding of the whole model, with the head in bf16 or quantised, and the tree step of Medusa. The lower
bound is the time to read all weights of a step.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
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

KINDS: tuple[ops.QuantizedFormat, ...] = ("float8", "int4")
FORMATS: dict[str, tuple[ops.QuantizedFormat | None, ops.QuantizedFormat | None]] = {
    "bf16": (None, None),
    "float8": ("float8", None),
    "int4": ("int4", None),
    "float8, head float8": ("float8", "float8"),
    "int4, head float8": ("int4", "float8"),
    "int4, head int4": ("int4", "int4"),
}
"""Name -> formats of the weights of the blocks and of the head; None is bf16."""
ROWS = (1, 2, 4, 8, 16, 32, 64)
Call = Callable[[Tensor], Tensor]
Way = Callable[[Tensor], tuple[Call, Tensor, int]]
"""From a weight (N, K): a function that multiplies by it, the rounded weight, and the bytes to read."""


def bf16(weight: Tensor) -> tuple[Call, Tensor, int]:
    """`F.linear` of the weight in bf16."""
    return partial(F.linear, weight=weight), weight, weight.nbytes


def decoding(weight: Tensor) -> tuple[Call, Tensor, int]:
    """`ops.linear` of the weight in bf16."""
    return partial(ops.linear, weight=weight), weight, weight.nbytes


def ours(kind: ops.QuantizedFormat, weight: Tensor) -> tuple[Call, Tensor, int]:
    """`ops.quantized_linear` of the quantised weight."""
    codes, scales = ops.quantize_weight(weight, kind)
    rounded = ops.dequantize_weight(codes, scales, weight.shape[1], torch.float32)
    return partial(ops.quantized_linear, codes=codes, scales=scales), rounded, codes.nbytes + scales.nbytes


def torchao(config: str, options: dict[str, Any], bits: float, weight: Tensor) -> tuple[Call, Tensor, int]:
    """torchao's compiled linear layer. Its product with the identity gives the rounded weight.

    Args:
        config: Name of a config in `torchao.quantization`.
        options: Arguments of the config.
        bits: Bits per weight, with scales.
        weight: Weight (N, K).
    """
    quantization = importlib.import_module("torchao.quantization")  # an optional peer
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
    """A record for each projection, number of tokens and implementation."""
    for name, (N, K) in projections(config).items():
        weights = [
            torch.randn(N, K, device=measure.DEVICE, dtype=torch.bfloat16) * K**-0.5
            for _ in range(measure.row_length(2 * N * K))
        ]
        for way, make in WAYS.items():
            case = {"linear": name, "shape": [N, K], "provider": way}
            try:
                made = [make(weight) for weight in weights]
            except Exception as failure:  # a result: a peer may be missing
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
    """A record for each format and batch size, and for the tree step of each format.

    Args:
        config: Config of the model.
        rate: Bytes per second of a large copy.
        batches: Batch sizes.
        nodes: Nodes of the tree below its root.
        formats: Names in FORMATS.
    """
    for name in formats:
        kind, head = FORMATS[name]
        torch.manual_seed(0)
        model = lm.from_config(config, dtype=torch.bfloat16, device=measure.DEVICE).eval()
        if kind is not None:
            lm.quantize(model, kind, head=head)
        tensors = persistent_tensors(model)
        size = sum(each.nbytes for each in tensors.values())
        if not model.config.head.tied:
            size -= model.decoder.embed.weight.nbytes  # a step reads one row
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
    parser = recording.parser(__doc__)
    parser.add_argument("--model", default="llama-3-8b", choices=CONFIGS)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--formats", nargs="*", default=FORMATS, choices=FORMATS, help="formats of the whole model")
    parser.add_argument("--nodes", type=int, default=63, help="nodes of the tree below its root")
    parser.add_argument("--no-linears", action="store_true", help="time only the whole model")
    parser.add_argument("--no-model", action="store_true", help="time only the linear layers")
    arguments = parser.parse_args()
    config, facts, rate = CONFIGS[arguments.model], recording.facts(), measure.copy_rate()
    records = [] if arguments.no_linears else [linears(config, rate)]
    records += (
        [] if arguments.no_model else [models(config, rate, arguments.batches, arguments.nodes, arguments.formats)]
    )
    for record in (each for part in records for each in part):
        print(record, flush=True)
        recording.write(arguments.out, [{"case": arguments.model, **record, **facts}])
