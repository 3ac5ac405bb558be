"""`python -m benchmarks expert_decoding [--layers NAME ...] [--out FILE]`: the experts of a layer in a decoding step.

Plain and quantised weights of the experts of a layer, for few tokens. Calls run back to back in a CUDA graph, each with
tokens of its own that choose their experts at random. `of_limit`: the time to read the weights and scales of the chosen
experts once, at the rate of a large copy, over the time of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.experts import LAYERS, Layer
from benchmarks.reporting import recording
from benchmarks.timing import measure
from ligermodels import ops

FORMATS: tuple[ops.QuantizedFormat | None, ...] = (None, "float8", "int4", "nf4", "mxfp4")
"""None: bf16."""
TOKENS = (1, 4, 16, 64)
NAMES = {layer.name: layer for layer in LAYERS}
Weights = tuple[tuple[Any, Any], tuple[Tensor, Tensor], int]
"""The weights gate_up and down as the op takes them; both in bf16 with the same values; and bytes per expert."""


def weights_of(layer: Layer, kind: ops.QuantizedFormat | None) -> Weights:
    """Random weights of a layer."""
    shapes = (layer.experts, 2 * layer.size, layer.hidden), (layer.experts, layer.hidden, layer.size)
    plain = [torch.randn(s, dtype=torch.bfloat16, device=measure.DEVICE) * s[2] ** -0.5 for s in shapes]
    if kind is None:
        return (plain[0], plain[1]), (plain[0], plain[1]), sum(each.nbytes for each in plain) // layer.experts
    codes = [ops.quantize_weight(each.flatten(0, 1), kind) for each in plain]
    rounded = [ops.dequantize_weight(*own, s[2], torch.bfloat16).view(s) for own, s in zip(codes, shapes, strict=True)]
    size = sum(each.nbytes for own in codes for each in own) // layer.experts
    return (codes[0], codes[1]), (rounded[0], rounded[1]), size


@torch.no_grad()
def steps(layer: Layer, kind: ops.QuantizedFormat | None, tokens: list[int], rate: float) -> Iterator[dict[str, Any]]:
    """A record for each number of tokens.

    Args:
        layer: Sizes of the layer.
        kind: Format of its weights; None for bf16.
        tokens: Numbers of tokens.
        rate: Bytes per second of a large copy.
    """
    own, rounded, size = weights_of(layer, kind)
    up, down = [torch.randn_like(w[..., 0]) if layer.bias else None for w in rounded]
    for count in tokens:
        bytes_read, calls = 0, list[Callable[[], Tensor]]()
        while len(calls) < measure.row_length(size * min(count * layer.top_k, layer.experts)):
            x = torch.randn(count, layer.hidden, dtype=torch.bfloat16, device=measure.DEVICE)
            weights, experts = torch.rand(count, layer.experts, device=measure.DEVICE).topk(layer.top_k)
            bytes_read += size * len(experts.unique())
            plain = partial(ops.mix_experts, x, weights, experts, *rounded, up, down, activation=layer.activation)
            quantized = partial(ops.quantized_mix_experts, x, weights, experts, *own, layer.experts, up, down)
            calls.append(plain if kind is None else partial(quantized, activation=layer.activation))
        error = measure.relative_error(calls[-1](), plain(backend="grouped_mm"))
        if not error <= measure.ERROR_LIMIT:
            raise RuntimeError(f"{layer.name}, {kind}, {count} tokens: relative error {error:.2g}")
        ms = measure.in_a_row(calls)
        limit = bytes_read / len(calls) / rate * 1e3
        yield {"provider": f"ligermodels {kind or 'bf16'}", "tokens": count, "ms": ms, "of_limit": limit / ms}


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("--layers", nargs="*", default=["Qwen3-30B-A3B", "gpt-oss-20b"], choices=NAMES)
    names = [kind or "bf16" for kind in FORMATS]
    parser.add_argument("--formats", nargs="*", default=names, choices=names)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    arguments = parser.parse_args()
    facts, rate = recording.facts(), measure.copy_rate()
    for name in arguments.layers:
        for kind in FORMATS:
            if (kind or "bf16") not in arguments.formats:
                continue
            for record in steps(NAMES[name], kind, arguments.tokens, rate):
                print(record, flush=True)
                recording.write(arguments.out, [{"case": f"experts of {name}", **record, **facts}])
            measure.free()
