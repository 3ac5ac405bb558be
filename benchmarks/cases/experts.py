"""Cases of `python -m benchmarks ops experts`: the experts of a layer, beside dense matrix products of as many rows.

Liger takes gate and up as halves; a case of its own has that layout. The lower bound: x (R, H) by (H, 2 I) and h (R, I)
by (I, H) with one weight for all R rows, and both gradients of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.timing import measure
from benchmarks.timing.case import Call, Case, of_tokens, optional, random
from ligermodels import ops
from ligermodels.ops import GLUOptions
from ligermodels.ops.glu.glu import gated_activation

SILU = GLUOptions("silu")


class Layer(NamedTuple):
    """Sizes of a layer: experts of a token, experts, channels, intermediate channels; whether experts have biases."""

    name: str
    top_k: int
    experts: int
    hidden: int
    size: int
    bias: bool = False
    activation: GLUOptions = SILU


QWEN3 = Layer("Qwen3-30B-A3B", 8, 128, 2048, 768)
LAYERS = (
    QWEN3,
    Layer("Qwen3.5-35B-A3B", 8, 256, 2048, 512),
    Layer("gpt-oss-20b", 4, 32, 2880, 2880, True, GLUOptions("silu", 1.702, 1 / 1.702, 7.0, 1.0)),
    Layer("Mixtral-8x7B", 2, 8, 4096, 14336),
)


@of_tokens
def mix_experts(layer: Layer, tokens: int, skewed: bool = False, halves: bool = False) -> Case:
    """Experts of a layer.

    Args:
        layer: The layer.
        tokens: Number of tokens.
        skewed: Most tokens choose few experts, by Zipf's law.
        halves: gate_up has the gate rows, then the up rows, as Liger's op takes them.
    """
    name, k, E, H, size, bias, activation = layer

    def inputs() -> tuple[Tensor, ...]:
        scores = torch.rand(tokens, E, device=measure.DEVICE)
        if skewed:
            scores = scores.log() * torch.arange(1, E + 1, device=measure.DEVICE)
        x, weights = random(tokens, H), torch.rand(tokens, k, device=measure.DEVICE).bfloat16()
        projections = random(E, 2 * size, H) * H**-0.5, random(E, H, size) * size**-0.5
        biases = (random(E, 2 * size), random(E, H)) if bias else ()
        return x, weights, scores.topk(k).indices, *projections, *biases

    def ours(x: Tensor, weights: Tensor, experts: Tensor, *others: Tensor) -> Tensor:
        chosen: GLUOptions | Callable[[Tensor], Tensor] = activation
        if halves:
            chosen = lambda z: ops.swiglu(*z.chunk(2, dim=-1))  # noqa: E731
        return ops.mix_experts(x, weights, experts, *others, activation=chosen)

    def loop(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
        """Expert by expert, as transformers computes them without grouped products."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for e in range(E):
            rows, choice = (experts == e).nonzero(as_tuple=True)
            z = torch.nn.functional.linear(x[rows], gate_up[e], biases[0][e] if biases else None)
            h = ops.swiglu(*z.chunk(2, dim=-1)) if halves else gated_activation(z, activation)
            y = torch.nn.functional.linear(h, down[e], biases[1][e] if biases else None)
            out = out.index_add(0, rows, y.float() * weights[rows, choice, None].float())
        return out.to(x.dtype)

    providers: dict[str, Call] = {"ligermodels": ours, "torch": loop}
    liger = optional("liger_kernel.ops", "LigerFusedMoEFunction")
    if halves and liger is not None:
        providers["liger"] = lambda x, w, e, gate_up, down: liger.apply(x, gate_up, down, e.int(), w)
    shown = f"experts of {name}, {tokens} tokens" + ", skewed" * skewed + ", halves" * halves
    return Case(shown, inputs, None, providers, limit=(_dense(False), _dense(True)))


def _dense(gradients: bool) -> Call:
    """Matrix products of as many rows by one expert's weights. The rows are copied once, before the timing."""
    copied: list[Tensor] = []

    def call(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *_: Tensor) -> Tensor:
        if not copied:
            copied.append(x.detach().repeat(experts.shape[1], 1))
        (rows,) = copied
        z = rows @ gate_up[0].t()
        h = z[:, : down.shape[2]]
        y = h @ down[0].t()
        if gradients:
            for dy, weight, a in ((y, down[0], h), (z, gate_up[0], rows)):
                dy @ weight
                dy.t() @ a
        return y

    return call
