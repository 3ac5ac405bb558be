"""`ops.linear` without gradients, by the kernel of decoding steps: against float64, and where torch computes it."""

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Where
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.layers import Linear

SIZES = [(3, 128), (17, 256), (5, 1), (8, 127), (70, 1100), (130, 1024), (5, 1029)]
"""(N, K): whole steps and tiles, less than one, and more."""


def operands(where: Where, size: tuple[int, int], rows: tuple[int, ...], bias: bool) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(where.device, where.dtype)

    given = randn(*rows, size[1]), randn(*size) * 0.1
    return (*given, randn(size[0])) if bias else given


def exact_linear(*given: Tensor) -> Tensor:
    return F.linear(*(each.double() for each in given))


def no_rounding_more(found: Tensor, exact: Tensor, torchs: Tensor) -> None:
    """Within float32 sums and one rounding to the dtype, or no worse than torch's own."""
    rounded = exact.to(found.dtype).double()
    slack = 8 * torch.finfo(torch.float32).eps * exact.numel() ** 0.5 * (exact.abs().max() if exact.numel() else 0)
    if found.dtype != torch.float32:  # a sum beside a tie may round to the other side
        slack += 0.125 * torch.finfo(found.dtype).eps * exact.norm()
    allowed = max(1.05 * (rounded - exact).norm(), (torchs.double() - exact).norm())
    assert (found.double() - exact).norm() <= allowed + slack


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("rows", [(1,), (), (3,), (2, 4), (9,), (0,)], ids=str)
@torch.no_grad()
def test_against_float64(where: Where, rows: tuple[int, ...], bias: bool) -> None:
    for size in SIZES:
        given = operands(where, size, rows, bias)
        found = ops.linear(*given)
        assert found.dtype == where.dtype and found.shape == (*rows, size[0])
        no_rounding_more(found, exact_linear(*given), F.linear(*given))


@torch.no_grad()
def test_strides_and_neighbours(where: Where) -> None:
    """A NaN stays in its row, what lies beyond x is not read, and strides make no difference."""
    x, weight = operands(where, (70, 1100), (6,), bias=False)
    wanted = ops.linear(x, weight)
    around = torch.full((8, 1148), float("nan"), device=where.device, dtype=where.dtype)
    around[1:-1, 16:-32] = x
    assert torch.equal(ops.linear(around[1:-1, 16:-32], weight), wanted)
    around[1, 16] = float("nan")
    found = ops.linear(around[1:-1, 16:-32], weight)
    assert found[0].isnan().all() and torch.equal(found[1:], wanted[1:])
    columns = torch.empty(1100, 6, device=where.device, dtype=where.dtype).copy_(x.t()).t()
    close(ops.linear(columns, weight), wanted)
    apart = weight.repeat_interleave(2, 0)[::2]
    close(ops.linear(x, apart), wanted)


def close(found: Tensor, wanted: Tensor) -> None:
    """As results of the same sums in another order."""
    assert (found - wanted).abs().max() <= 4 * torch.finfo(wanted.dtype).eps * wanted.abs().max()


def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the kernel, from here on."""
    module, found = sys.modules["ligermodels.ops.linear.linear"], []
    kernel = module.few_rows

    def counted(*given: Any) -> None:
        found.append(given[0].shape[0])
        kernel(*given)

    monkeypatch.setattr(module, "few_rows", counted)
    return found


def test_what_is_left_to_torch(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    found = launches(monkeypatch)
    served = where.place != "reference" and where.dtype != torch.float32
    x, weight, bias = operands(where, (20, 70), (4,), bias=True)
    with torch.no_grad():
        ops.linear(x, weight, bias)
        assert found == ([4] if served else [])
        found.clear()
        for more in ((x.repeat(5, 1), weight), (x, weight.t().contiguous().t()), (x[:0], weight), (x, weight[:0])):
            torch.testing.assert_close(ops.linear(*more), F.linear(*more))
        with torch.autocast(where.device.type, torch.bfloat16):
            assert ops.linear(x.float(), weight.float()).dtype == torch.bfloat16
        assert ops.linear(x.to("meta"), weight.to("meta")).shape == (4, 20)
        for wrong in ((x, weight[:, :-1]), (x, weight.float() if served else weight.double()), (x, weight, bias[:-1])):
            with pytest.raises(RuntimeError):
                ops.linear(*wrong)
    weight.requires_grad_()
    assert ops.linear(x, weight).requires_grad
    assert found == []


def test_in_layers(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every linear layer without gradients, called as a module with its hooks; none where gradients are recorded."""
    launched, seen = launches(monkeypatch), []
    served = where.place != "reference" and where.dtype != torch.float32
    layers = nn.Sequential(Linear(70, 20), Linear(20, 5, bias=False)).to(where.device, where.dtype)
    layers[1].register_forward_hook(lambda *given: seen.append(given[2].shape))
    x = torch.randn(2, 3, 70, device=where.device, dtype=where.dtype)
    with torch.no_grad():
        y = layers(x)
    assert launched == ([6, 6] if served else []) and seen == [(2, 3, 5)]
    wanted = layers(x)
    close(y, wanted.detach())
    wanted.sum().backward()
    assert len(launched) == 2 * served and layers[0].weight.grad is not None


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("size", [(4096, 4096), (28672, 4096), (4096, 14336), (1000, 5120), (256, 2560)], ids=str)
@torch.no_grad()
def test_sizes_of_models_in_a_graph(size: tuple[int, int], rows: int) -> None:
    """As in decoding: replayed, the same bits each time, and within the rounding of the result of float32 sums."""
    weight = (torch.randn(size, device="cuda") * 0.02).bfloat16()
    x = torch.randn(rows, size[1], device="cuda", dtype=torch.bfloat16)
    ops.linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear(x, weight)
    results = []
    for _ in range(3):
        y.fill_(float("nan"))
        graph.replay()
        results.append(y.clone())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    no_rounding_more(y, exact_linear(x, weight), F.linear(x, weight))
