"""`python -m benchmarks float8_scaled_mm [--out FILE]`: matrix products of float8 by the granularity of their scales.

Products of a block of Llama-3-8B on 16384 tokens, forward and both gradients, on operands that are already cast: in
bf16; with one scale per tensor; with one scale per row of each operand (per output channel of a weight); and as in
DeepSeek-V3 (arXiv 2412.19437, section 3.3), with one scale per 1 x 128 values of activations and gradients and per
128 x 128 values of weights. Only the products are timed. Finer scales cost more elsewhere: the two layouts of a tensor
are rounded separately, and each cast is a pass of its own.

Each variant is one CUDA graph per kind of product. The graphs take turns after a warm-up of seconds, so that all run on
a GPU at its power limit. A variant that this torch or GPU does not support is recorded with the reason. Records have
errors too, relative to the exact product of the bf16 operands, on normal data and with one channel in a hundred 30
times as large.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases.float8_block import PROJECTIONS, TOKENS, in_turns
from benchmarks.reporting import recording
from benchmarks.timing import measure
from benchmarks.timing.case import random

E4M3, MOST, BLOCK = torch.float8_e4m3fn, 448.0, 128
Granularity = Literal["tensor", "row", "1x128", "128x128"]
Product = Literal["forward", "gradient of the input", "gradient of the weight"]
CHECKED = ((4, 8), (12, 8), (4, 12))
"""Sizes of the checked product in blocks: of x, w and dy."""
WRONG = 0.02
"""Relative error of a wrong product: more than sums in registers and rounding to bf16 cause."""
KINDS: tuple[Product, ...] = ("forward", "gradient of the input", "gradient of the weight")


@dataclass(frozen=True)
class Way:
    """Granularity of scales for activations and gradients, and for weights. `fast`: fast accumulation."""

    activations: Granularity
    weights: Granularity
    fast: bool


WAYS: dict[str, Way | None] = {
    "bf16": None,
    "tensor-wise, fast sums": Way("tensor", "tensor", True),
    "tensor-wise": Way("tensor", "tensor", False),
    "row-wise, fast sums": Way("row", "row", True),
    "row-wise": Way("row", "row", False),
    "blocks, fast sums": Way("1x128", "128x128", True),
    "blocks": Way("1x128", "128x128", False),
}


def cast(x: Tensor, granularity: Granularity) -> tuple[Tensor, Tensor]:
    """Cast x (M, K), multiples of 128, to E4M3; returns the values and their float32 scales.

    The scales are (), (M, 1), (M, K / 128) with contiguous columns, or (M / 128, K / 128).
    """
    M, K = x.shape
    rows, columns = {"tensor": (M, K), "row": (1, K), "1x128": (1, BLOCK), "128x128": (BLOCK, BLOCK)}[granularity]
    parts = x.float().view(M // rows, rows, K // columns, columns)
    scale = parts.abs().amax((1, 3), keepdim=True) / MOST
    q = (parts / scale).to(E4M3).view(M, K)
    scale = scale.view(M // rows, K // columns)
    if granularity == "tensor":
        scale = scale.view(())
    return q, scale.t().contiguous().t() if granularity == "1x128" else scale


def dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """q (M, K) times its scales, float32."""
    if scale.dim() == 0:
        return q.float() * scale
    (M, K), (m, k) = q.shape, scale.shape
    return (q.float().view(m, M // m, k, K // k) * scale[:, None, :, None]).view(M, K)


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, way: Way) -> Tensor:
    """The product a b^T in bf16.

    Args:
        a: E4M3 values (M, K).
        b: E4M3 values (N, K).
        scale_a: Scales of a from `cast`.
        scale_b: Scales of b from `cast`.
        way: Granularity of the scales.

    Raises:
        RuntimeError or ValueError: From torch, if it does not support the product.
        NotImplementedError: This torch has no `scaled_mm`.
    """
    options: dict[str, Any] = {"use_fast_accum": way.fast}
    if way.activations == "tensor":
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, **options)
    if way.activations == "row":
        return torch._scaled_mm(a, b.t(), scale_a, scale_b.t(), out_dtype=torch.bfloat16, **options)
    if not hasattr(F, "scaled_mm"):
        raise NotImplementedError("torch.nn.functional.scaled_mm: not in this torch")

    def of(x: Tensor, scale: Tensor) -> tuple[Tensor, Any]:
        if len(scale) == len(x):
            return scale, F.ScalingType.BlockWise1x128
        # the summed dimension comes first, padded to a multiple of 4 scales
        return F.pad(scale, (0, -scale.shape[1] % 4)).t(), F.ScalingType.BlockWise128x128

    (scale_a, recipe_a), (scale_b, recipe_b) = of(a, scale_a), of(b, scale_b)
    return F.scaled_mm(a, b.t(), scale_a, recipe_a, scale_b, recipe_b, output_dtype=torch.bfloat16, **options)


def operands(product: Product, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Operands of a product with the summed dimension last.

    Args:
        product: Kind of product.
        x: Activations (M, K).
        w: Weight (N, K).
        dy: Gradient (M, N).
    """
    if product == "forward":
        return x, w
    if product == "gradient of the input":
        return dy, w.t().contiguous()
    return dy.t().contiguous(), x.t().contiguous()


def in_float8(product: Product, a: Tensor, b: Tensor, way: Way) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both operands in float8 and their scales, the first four arguments of `scaled_mm`.

    Args:
        product: Kind of product.
        a: First operand.
        b: Second operand.
        way: Granularity of the scales.
    """
    a8, scale_a = cast(a, way.activations)
    b8, scale_b = cast(b, way.activations if product == "gradient of the weight" else way.weights)
    return a8, b8, scale_a, scale_b


def calls(product: Product, way: Way | None) -> Callable[[], Any]:
    """One kind of product for all projections of the block."""
    found: list[Callable[[], Any]] = []
    for N, K in PROJECTIONS.values():
        x, w, dy = random(TOKENS, K), random(N, K) * K**-0.5, random(TOKENS, N)
        if way is not None:
            found.append(partial(scaled_mm, *in_float8(product, *operands(product, x, w, dy), way), way))
            continue
        plain = {"forward": (x, w.t()), "gradient of the input": (dy, w), "gradient of the weight": (dy.t(), x)}
        found.append(partial(torch.mm, *plain[product]))
    return lambda: [call() for call in found] and None


def why_not(way: Way) -> str | None:
    """The reason why a variant is not supported on this device, or is wrong; None if it works."""
    x, w, dy = (_uneven(random(m * BLOCK, n * BLOCK)) for m, n in CHECKED)
    for product in KINDS:
        given = in_float8(product, *operands(product, x, w, dy), way)
        try:
            y = scaled_mm(*given, way).float()
        except (RuntimeError, ValueError) as error:
            return f"{product}: {str(error).splitlines()[0]}"
        a8, b8, scale_a, scale_b = given
        wanted = dequantize(a8, scale_a) @ dequantize(b8, scale_b).t()
        if (off := float((y - wanted).norm() / wanted.norm())) > WRONG:
            return f"{product}: the result is wrong, by {off:.3g}"
    return None


def _uneven(x: Tensor) -> Tensor:
    """x with rows and groups of 128 columns scaled by powers of two, so that wrong scales show."""
    rows, columns = (torch.randint(-3, 4, (size,), device=x.device) for size in (len(x), x.shape[1] // BLOCK))
    return x * torch.exp2(rows[:, None] + columns.repeat_interleave(BLOCK)).to(x.dtype)


def errors(way: Way, size: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Relative errors of the products of a (size, size) weight, on normal data and with large channels."""
    large = torch.arange(size, device=measure.DEVICE) % 100 == 7
    channels = torch.where(large, 30.0, 1.0)
    x, w, dy = random(TOKENS, size), random(size, size) * size**-0.5, random(TOKENS, size)
    for name, scale in (("normal", torch.ones_like(channels)), ("large channels", channels)):
        found: dict[str, float] = {}
        for product in KINDS:
            a, b = operands(product, (x * scale).to(x.dtype), w, (dy * scale).to(x.dtype))
            a8, b8, scale_a, scale_b = in_float8(product, a, b, way)
            exact = a.float() @ b.float().t()
            y = dequantize(a8, scale_a) @ dequantize(b8, scale_b).t()
            found[product] = float((y - exact).norm() / exact.norm())
        yield name, found


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of load before each timing")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    facts, records = recording.facts(), []

    def report(**record: Any) -> None:
        records.append({"case": f"Llama-3-8B products, {TOKENS} tokens", **record, **facts})
        print(json.dumps(record), flush=True)

    ways: dict[str, Way | None] = {}
    for name, way in WAYS.items():
        if way is not None and (reason := why_not(way)) is not None:
            report(provider=name, unsupported=reason)
        else:
            ways[name] = way
    flops = 2 * TOKENS * sum(N * K for N, K in PROJECTIONS.values())
    total = dict.fromkeys(ways, 0.0)
    for product in KINDS:
        times = in_turns({name: measure.graphed(calls(product, way)) for name, way in ways.items()}, arguments.seconds)
        for name, ms in times.items():
            total[name] += ms
            report(provider=name, product=product, ms=ms, tflops=flops / ms / 1e9, ratio=times["bf16"] / ms)
        measure.free()
    for name, ms in total.items():
        report(provider=name, product="all", ms=ms, tflops=3 * flops / ms / 1e9, ratio=total["bf16"] / ms)
    for name, way in ways.items():
        if way is not None and not way.fast:
            report(provider=name, errors=dict(errors(way, min(min(shape) for shape in PROJECTIONS.values()))))
    recording.write(arguments.out, records)
