"""The benchmark of float8 products by their scales, as far as a CPU goes: casts, operands, and that wrong ones show."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F

from benchmarks.cases import float8_scaled_mm as benchmark
from benchmarks.timing import measure

SHAPES = {"qkv": (128, 256), "down": (256, 128)}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(measure, "DEVICE", "cpu")
    monkeypatch.setattr(benchmark, "PROJECTIONS", SHAPES)
    monkeypatch.setattr(benchmark, "TOKENS", 128)
    monkeypatch.setattr(benchmark, "CHECKED", ((1, 1), (2, 1), (1, 2)))  # some CPUs multiply float8 very slowly


@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128", "128x128"])
def test_casts(granularity: benchmark.Granularity) -> None:
    """Each number to within the rounding of its own group's scale, which its maximum fills."""
    x = benchmark._uneven(torch.randn(256, 384).bfloat16()).float()
    q, scale = benchmark.cast(x, granularity)
    assert q.dtype == torch.float8_e4m3fn and q.shape == x.shape and scale.dtype == torch.float32
    shape, stride = {
        "tensor": ((), ()),
        "row": ((256, 1), (1, 1)),
        "1x128": ((256, 3), (1, 256)),
        "128x128": ((2, 3), (3, 1)),
    }[granularity]
    assert scale.shape == shape and scale.stride() == stride
    each = torch.broadcast_to(scale.view(1, 1), (1, 1)) if scale.dim() == 0 else scale
    each = each.repeat_interleave(256 // each.shape[0], 0).repeat_interleave(384 // each.shape[1], 1)
    error = (benchmark.dequantize(q, scale) - x).abs()
    assert (error <= (x.abs() / 16).clamp(min=each * 2.0**-10) * 1.001).all()
    groups = x.abs().view(each.shape)
    assert (groups <= each * 448 * 1.001).all() and float((groups / each).max()) > 447


@cache
def runs_here(way: benchmark.Way) -> bool:
    return benchmark.why_not(way) is None


@pytest.mark.parametrize("product", benchmark.KINDS)
@pytest.mark.parametrize("name", list(benchmark.WAYS)[1:])
def test_operands(name: str, product: benchmark.Product) -> None:
    """What was cast multiplies to what is wanted. CPUs take one scale for a tensor, since torch 2.13 also for rows."""
    way = benchmark.WAYS[name]
    assert way is not None
    x, w, dy = (torch.randn(*shape).bfloat16() for shape in ((128, 256), (128, 256), (128, 128)))
    wanted = {
        "forward": x.float() @ w.float().t(),
        "gradient of the input": dy.float() @ w.float(),
        "gradient of the weight": dy.float().t() @ x.float(),
    }[product]
    a8, b8, scale_a, scale_b = benchmark.in_float8(product, *benchmark.operands(product, x, w, dy), way)
    assert a8.is_contiguous() and b8.is_contiguous()
    dequantized = benchmark.dequantize(a8, scale_a) @ benchmark.dequantize(b8, scale_b).t()
    assert (dequantized - wanted).norm() < 0.06 * wanted.norm()
    if way.activations == "tensor" or (way.activations == "row" and runs_here(way)):
        y = benchmark.scaled_mm(a8, b8, scale_a, scale_b, way).float()
        assert (y - dequantized).norm() < 0.01 * dequantized.norm()


def test_blocks_are_given_as_torch_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes, strides and recipes that its CUDA sources check: scales of 1 x 128 with the rows next to one another,
    those of 128 x 128 transposed and padded to 4 along the sum."""
    seen = []

    def scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, **options):  # type: ignore[no-untyped-def]
        seen.append([(recipe.name, s.shape, s.stride()) for recipe, s in ((recipe_a, scale_a), (recipe_b, scale_b))])
        return a.float() @ b.float()

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    way = benchmark.WAYS["blocks"]
    assert way is not None
    x, w, dy = (torch.randn(*shape) for shape in ((128, 256), (384, 256), (128, 384)))
    for product in benchmark.KINDS:
        benchmark.scaled_mm(*benchmark.in_float8(product, *benchmark.operands(product, x, w, dy), way), way)
    thin, square = "BlockWise1x128", "BlockWise128x128"
    assert seen == [
        [(thin, (128, 2), (1, 128)), (square, (4, 3), (1, 4))],
        [(thin, (128, 3), (1, 128)), (square, (4, 2), (1, 4))],
        [(thin, (384, 1), (1, 1)), (thin, (256, 1), (1, 1))],
    ]


def test_what_is_missing_or_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, blocks = benchmark.WAYS["tensor-wise"], benchmark.WAYS["blocks"]
    assert whole is not None and blocks is not None
    assert benchmark.why_not(whole) is None and "forward: " in str(benchmark.why_not(blocks))  # of a CPU's torch
    right = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, s, t, **options: right(a, b, s * 1.1, t, **options))
    assert "the result is wrong" in str(benchmark.why_not(whole))


def test_errors_and_calls() -> None:
    """Finer scales lose less where channels are large; every product is timed."""
    found = {name: dict(benchmark.errors(way, 256)) for name, way in benchmark.WAYS.items() if way and not way.fast}
    for product in benchmark.KINDS:
        assert all(0.01 < each["normal"][product] < 0.06 for each in found.values())
        large = [each["large channels"][product] for each in found.values()]
        assert all(error < 0.06 for error in large)
        assert (
            benchmark.calls(product, None)() is None
            and benchmark.calls(product, benchmark.WAYS["tensor-wise"])() is None
        )
