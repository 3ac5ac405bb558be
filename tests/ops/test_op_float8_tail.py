"""Products of low rank as further columns of float8 products, against float64."""

import math
from typing import Any

import pytest
import torch
from conftest import Where
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops import (
    Float8Tensor,
    GLUOptions,
    float8_add_rms_norm,
    float8_cast,
    float8_gated_activation,
    float8_transpose,
    tail_of,
)
from ligermodels.ops.float8.tail import low_rank_sum

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROUNDING = {E4M3: 2.0**-4, E5M2: 2.0**-3}  # the most that a number changes by, of itself
SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}
M, K = 48, 144


class Sum:
    """The operands of a sum, and what it gave."""

    def __init__(
        self, where: Where, N: int, rank: int, dtype: torch.dtype, alpha: float, *, tails: bool = True,
        d: float = 1.0, b: float = 0.1, put: tuple[str, tuple[int, int], float] | None = None,
    ) -> None:  # fmt: skip
        """d, b: standard deviations. put: a number in place of one of theirs."""
        generator = torch.Generator().manual_seed(N + rank)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(where.device, where.dtype)

        tail = tail_of(rank) if tails else 0
        self.rank, self.alpha, self.bias = rank, alpha, random(M)
        sizes = torch.arange(1, N + 1, device=where.device).unsqueeze(1)
        self.x = float8_cast(random(N, K) * sizes, dtype, by_row=True, tail=tail)
        self.w = float8_cast(random(M, K) / 8, E4M3, tail=tail)
        source, self.b = torch.zeros_like(self.x.rows, dtype=where.dtype), b * random(rank, M).t()
        source[:, :rank] = d * random(N, rank)
        if where.place == "interpreter":  # which loses the carry of a number that is rounded up to a power of two
            source, self.b = (t.float().to(E5M2).to(t.dtype) for t in (source, self.b))
        if put is not None:
            {"d": source, "b": self.b}[put[0]][put[1]] = put[2]
        one = torch.eye(K, rank, dtype=where.dtype, device=where.device)
        self.d = source.new_full((N, rank), math.nan)
        self.y = low_rank_sum(
            self.x.wide, self.x.scale, self.w.wide, self.w.scale, source, None, one, self.b, self.d, 1.0, alpha,
            where.dtype, self.bias, fast_accumulation=False,
        )  # fmt: skip

    def tails(self) -> tuple[Tensor, Tensor]:
        return self.x.wide[:, K:].double(), self.w.wide[:, K:].double()

    @property
    def units(self) -> Tensor:
        return self.x.scale.double().unsqueeze(1) * self.w.scale.double()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(("rank", "alpha"), [(3, 0.75), (48, -2.0), (130, 1.0)])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-12])
def test_sum(where: Where, dtype: torch.dtype, rank: int, alpha: float, size: float) -> None:
    """It is the product of what the tails hold, which is what d and b are to within a rounding each."""
    for N in (1, 37, 130):
        case = Sum(where, N, rank, dtype, alpha, b=0.1 * size)
        d8, b8 = case.tails()
        assert not d8[:, rank:].any() and not b8[:, rank:].any()
        exact = (case.x.wide.double() @ case.w.wide.double().t()) * case.units + case.bias.double()
        limit = max(4 * torch.finfo(where.dtype).eps, 1e-5 if where.device.type == "cpu" else 2e-3)
        torch.testing.assert_close(case.y.double(), exact, rtol=limit, atol=limit * float(exact.abs().max()))
        d, b = case.d.double(), case.alpha * case.b.double()
        found, wanted = d8 @ b8.t() * case.units, d @ b.t()
        relative = (1 + ROUNDING[dtype]) * (1 + ROUNDING[E4M3]) - 1
        floor = rank * (SMALLEST[dtype] * 448 + SMALLEST[E4M3] * torch.finfo(dtype).max) * case.units
        assert ((found - wanted).abs() <= relative * (d.abs() @ b.abs().t()) + floor).all()
        if size > 1e-9:  # neither is too small for float8
            assert (found - wanted).norm() <= 0.08 * wanted.norm()


PUT = [("b", (5, 1), math.inf), ("d", (7, 0), math.inf), ("b", (5, 1), math.nan), ("d", (7, 0), math.nan)]


@pytest.mark.parametrize("of", [{"b": 1e4, "d": 1e4}, *({"put": put} for put in PUT)], ids=str)
def test_what_is_no_float8(where: Where, of: dict[str, Any]) -> None:
    """It is added by a pass of its own, or is NaN where it would be without."""
    wide, plain = (Sum(where, 37, 5, E5M2, 0.7, tails=tails, **of) for tails in (True, False))
    assert plain.x.tail == 0 and wide.x.tail == 128
    if "put" in of and math.isnan(of["put"][2]):
        if where.place == "interpreter":
            pytest.skip("the interpreter makes numbers of NaN")
        assert torch.equal(wide.y.isnan(), plain.y.isnan()) and plain.y.isnan().any()
    else:
        limit = max(torch.finfo(where.dtype).eps, 1e-5 if where.device.type == "cpu" else 2e-3)
        finite = plain.y[plain.y.isfinite()]
        most = float(finite.abs().max())
        torch.testing.assert_close(wide.y, plain.y, rtol=limit, atol=limit * most, equal_nan=True)


def test_what_overflows_in_float16(where: Where) -> None:
    """d beyond float16 is infinite, and so is what is added, also where the tails would hold d."""
    if where.dtype != torch.float16:
        pytest.skip("float16 alone")
    x8, w8 = float8_cast(torch.full((5, K), 100.0, device=where.device).half(), E4M3, by_row=True, tail=128), None
    w8 = float8_cast(torch.ones(M, K, device=where.device).half(), E4M3, tail=128)
    a, b = (torch.full(shape, value, device=where.device).half() for shape, value in (((K, 2), 1e4), ((M, 2), 1e-6)))
    d = a.new_empty(5, 2)
    y = low_rank_sum(
        x8.wide,
        x8.scale,
        w8.wide,
        w8.scale,
        x8.rows,
        x8.scale,
        a,
        b,
        d,
        1.0,
        1.0,
        torch.float16,
        fast_accumulation=True,
    )
    assert d.isinf().all() and y.isinf().all()


def test_nothing_added(where: Where) -> None:
    """With b of zeros, as where LoRA begins, the product of x and w; and none of no rows."""
    case = Sum(where, 37, 5, E4M3, 2.0, b=0.0)
    plain = Sum(where, 37, 5, E4M3, 2.0, tails=False, b=0.0)
    exact = 1e-5 if where.device.type == "cpu" else 2e-3
    torch.testing.assert_close(case.y, plain.y, rtol=max(exact, torch.finfo(where.dtype).eps), atol=exact)
    assert not case.tails()[1].any()
    assert Sum(where, 0, 5, E4M3, 2.0).y.shape == (0, M)


def all_casts(x: Tensor, w: Tensor, dy: Tensor, dtype: torch.dtype, tail: int) -> list[Float8Tensor]:
    """Of whatever casts by row, and of a cast with one scale."""
    pairs = x.clone().requires_grad_()
    results = [float8_gated_activation(pairs, GLUOptions(f), dtype, E5M2, tail=tail) for f in ("silu", "gelu")]
    gradients: list[Any] = []
    pairs.register_hook(gradients.append)
    results[0].backward(dy)
    norms = [float8_add_rms_norm(x, each, w, 1e-5, dtype, tail=tail)[0] for each in (None, x)]
    casts = [float8_cast(x, dtype, by_row=by_row, tail=tail) for by_row in (True, False)]
    return [*casts, *norms, *results, *gradients]


@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_tails_of_what_is_cast(where: Where, dtype: torch.dtype, rows: int) -> None:
    """Whoever casts, the rows are the same with a tail as without."""
    x, w, dy = (
        torch.randn(shape, device=where.device).to(where.dtype) for shape in ((rows, 2 * K), (2 * K,), (rows, K))
    )
    for wide, plain in zip(all_casts(x, w, dy, dtype, 32), all_casts(x, w, dy, dtype, 0), strict=True):
        assert wide.wide.shape == (rows, plain.shape[-1] + 32) and wide.tail == 32 and plain.tail == 0
        assert torch.equal(wide.rows.view(torch.uint8), plain.rows.view(torch.uint8))
        assert torch.equal(wide.scale, plain.scale) and torch.equal(wide.dequantize(), plain.dequantize())
        assert torch.equal(wide.detach().wide.view(torch.uint8), wide.wide.view(torch.uint8))
        turned = float8_transpose(wide.rows, 64)
        assert turned.shape[1] == -(-rows // 16) * 16 + 64
        assert torch.equal(turned[:, :-64].view(torch.uint8), float8_transpose(plain.rows).view(torch.uint8))


def test_bad_tails() -> None:
    x, w = torch.randn(4, 32), torch.ones(32)
    for tail in (8, -16):
        with pytest.raises(InputError, match=f"float8_cast: tail must be a multiple of 16, got {tail}"):
            float8_cast(x, E4M3, tail=tail)
        with pytest.raises(InputError, match="float8_transpose: tail must be"):
            float8_transpose(float8_cast(x, E4M3).rows, tail)
        with pytest.raises(InputError, match="float8_gated_activation: tail must be"):
            float8_gated_activation(x, GLUOptions("silu"), E4M3, E5M2, tail=tail)
        with pytest.raises(InputError, match="float8_add_rms_norm: tail must be"):
            float8_add_rms_norm(x, None, w, 1e-5, E4M3, tail=tail)
