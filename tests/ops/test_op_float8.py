"""Float8: casts byte for byte, producers to within rounding, linear layers as exact products of what was cast."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Where
from op_harness import LAYOUTS, plain_rms_norm
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops import (
    Float8Recipe,
    Float8Tensor,
    GLUOptions,
    float8_add_rms_norm,
    float8_cast,
    float8_gated_activation,
    float8_linear,
    float8_mm,
    float8_transpose,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(1, 16), (48,), (37, 112), (2, 3, 128), (130, 64), (16, 48), (300, 208)]
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
SIGNIFICANT = {E4M3: 4, E5M2: 3}  # bits
SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}
MOST = {E4M3: 448.0, E5M2: 57344.0}


def exact(shape: tuple[int, ...], where: Where, dtype: torch.dtype) -> Tensor:
    """Values that either format has, up to a scale: whatever rounds them, nothing is lost."""
    values = torch.randint(-7, 8, shape, device=where.device) * 2.0 ** torch.randint(-6, 1, shape, device=where.device)
    values.view(-1)[0] = 7.0
    return (values if dtype == E4M3 else (values / 2).trunc() * 2).to(where.dtype)


def check_layouts(x: Tensor) -> None:
    """Both layouts hold the same bytes, and zeros beyond the rows."""
    assert isinstance(x, Float8Tensor) and x.rows is not None and x.columns is not None
    M, N = x.shape[:-1].numel(), x.shape[-1]
    assert x.rows.shape == (M, N) and x.columns.shape == (N, -(-M // 16) * 16)
    assert torch.equal(x.columns.view(torch.uint8)[:, :M], x.rows.view(torch.uint8).t())
    assert not x.columns.view(torch.uint8)[:, M:].any()


def assert_rounded(found: Tensor, truth: Tensor, where: Where) -> None:
    """found is truth rounded to its format once, with a power of two for each row's scale that just fits its
    maximum."""
    assert isinstance(found, Float8Tensor) and found.rows is not None and found.columns is None
    assert found.scale.shape == (len(truth),)
    dtype, scale, most = found.rows.dtype, found.scale.double().unsqueeze(1), truth.abs().amax(1, keepdim=True)
    assert (scale.frexp().mantissa == 0.5).all(), "no power of two"
    assert ((MOST[dtype] / 2 * 0.99 < most / scale) & (most / scale < MOST[dtype] * 1.01)).all()
    ulp = 2.0 ** (truth.abs().log2().floor() - SIGNIFICANT[dtype] + 1)
    error = (found.rows.double() * scale - truth).abs()
    allowed = 0.505 * ulp.maximum(scale * SMALLEST[dtype])  # what is rounded was computed in float32
    if where.place == "interpreter":  # which loses the carry of a number that is rounded up to a power of two
        assert (error <= 2 * allowed).double().mean() > 0.8 and (error <= 0.51 * truth.abs() + allowed).all()
    else:
        assert (error <= allowed).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cast_is_torchs_byte_for_byte(
    where: Where, shape: tuple[int, ...], layout: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    hardware = where.device.type == "cuda"
    x = torch.randn(shape, device=where.device).to(where.dtype) if hardware else exact(shape, where, dtype)
    x = layout(x)
    found = float8_cast(x, dtype, columns=True)
    check_layouts(found)
    assert found.rows is not None
    wanted = (x.reshape(-1, shape[-1]).float() / found.scale).to(dtype)
    assert torch.equal(found.rows.view(torch.uint8), wanted.view(torch.uint8))
    most = float(x.float().abs().max() / found.scale)
    assert MOST[dtype] / 2 < most <= MOST[dtype] and math.frexp(float(found.scale))[0] == 0.5
    assert found.shape == x.shape and found.dtype == x.dtype
    for rows, columns in ((True, False), (False, True)):
        alone = float8_cast(x, dtype, rows=rows, columns=columns)
        assert (alone.rows is None, alone.columns is None) == (not rows, not columns)
        both = float8_cast(alone, dtype, columns=True)  # the layout that lacks comes from the other
        check_layouts(both)
        assert torch.equal(both.dequantize(), found.dequantize())


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [*SHAPES, (3, 4112), (2, 12304)], ids=str)
def test_cast_by_row(where: Where, shape: tuple[int, ...], layout: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """Byte for byte as torch, with the scale that fits each row."""
    hardware = where.device.type == "cuda"
    if where.place == "interpreter" and shape[-1] > 8192:
        pytest.skip("the same code as for 4112 columns, with more warps")
    x = torch.randn(shape, device=where.device).to(where.dtype) if hardware else exact(shape, where, dtype)
    if len(shape) > 1:
        x = x * 2.0 ** torch.randint(-3, 4, (*shape[:-1], 1), device=where.device).to(where.dtype)
    x = layout(x)
    found = float8_cast(x, dtype, by_row=True)
    assert found.rows is not None and found.columns is None and found.shape == x.shape and found.dtype == x.dtype
    rows = x.reshape(-1, shape[-1]).float()
    wanted = (rows / found.scale.unsqueeze(1)).to(dtype)
    assert torch.equal(found.rows.view(torch.uint8), wanted.view(torch.uint8))
    most = rows.abs().amax(1) / found.scale
    assert ((MOST[dtype] / 2 < most) & (most <= MOST[dtype]) & (found.scale.frexp().mantissa == 0.5)).all()
    assert torch.equal(found.dequantize(), (wanted.float() * found.scale.unsqueeze(1)).to(where.dtype).view(shape))
    assert float8_cast(found, dtype, by_row=True) is found
    again = float8_cast(found, dtype, columns=True)  # what is read by columns has one scale
    check_layouts(again)
    assert torch.equal(again.dequantize(), float8_cast(found.dequantize(), dtype).dequantize())


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_zeros_and_infinities_are_those_of_their_rows(where: Where, dtype: torch.dtype) -> None:
    strange = torch.ones(4, 16, dtype=where.dtype, device=where.device)
    strange[1], strange[2, 3] = 0, -math.inf
    values = float8_cast(strange, dtype, by_row=True).dequantize()
    assert torch.equal(values[[0, 1, 3]], strange[[0, 1, 3]]) and values[2].isnan().all()
    assert float8_cast(strange[:0], dtype, by_row=True).dequantize().shape == (0, 16)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_every_byte_of_large_tensors(dtype: torch.dtype) -> None:
    """Sizes of real layers, every bf16 number in them, and more than 2^31 elements."""
    numbers = torch.arange(2**16, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16)
    numbers = torch.where(numbers.abs() <= MOST[dtype], numbers, torch.randn(2**16, device="cuda").bfloat16())
    for x in (numbers.repeat(257)[: 4112 * 4096].view(4112, 4096), numbers.repeat(2**15 + 16).view(-1, 16384)):
        found = float8_cast(x, dtype, columns=True)
        check_layouts(found)
        assert found.rows is not None and float(found.scale) == 1.0
        for first in range(0, len(x), 4096):
            part = slice(first, first + 4096)
            assert torch.equal(found.rows[part].view(torch.uint8), x[part].to(dtype).view(torch.uint8))


def test_transpose(where: Where) -> None:
    for shape in ((1, 16), (37, 112), (130, 80)):
        x = torch.randint(256, shape, dtype=torch.uint8, device=where.device)
        found = float8_transpose(x.view(E4M3)).view(torch.uint8)
        assert torch.equal(found[:, : shape[0]], x.t()) and not found[:, shape[0] :].any()
        assert found.shape == (shape[1], -(-shape[0] // 16) * 16)


def test_extremes(where: Where) -> None:
    zeros = float8_cast(torch.zeros(3, 16, dtype=where.dtype, device=where.device), E4M3, columns=True)
    assert not zeros.dequantize().any()
    assert float8_cast(torch.empty(0, 16, dtype=where.dtype, device=where.device), E4M3).dequantize().shape == (0, 16)
    for bad in (math.inf, -math.inf):
        x = torch.ones(3, 16, dtype=where.dtype, device=where.device)
        x[1, 2] = bad
        assert float8_cast(x, E4M3).dequantize().isnan().all()
    tiny = torch.full((1, 16), 2.0**-20, dtype=where.dtype, device=where.device)
    assert torch.equal(float8_cast(tiny, E5M2).dequantize(), tiny)


@pytest.mark.parametrize("casting_mode", ["llama", "gemma"])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", [(1, 16), (2, 37, 112), (70, 160)], ids=str)
def test_norm(where: Where, shape: tuple[int, ...], with_residual: bool, casting_mode: Any) -> None:
    """The values, with a scale of each row; gradients are those of the norm itself."""
    x, residual = (torch.randn(shape, device=where.device).to(where.dtype).requires_grad_() for _ in range(2))
    weight = (1 + 0.3 * torch.randn(shape[-1], device=where.device)).to(where.dtype).requires_grad_()
    y, total = float8_add_rms_norm(
        x, residual if with_residual else None, weight, 1e-6, E4M3, offset=0.5, casting_mode=casting_mode
    )
    added = (x + residual).detach() if with_residual else x.detach()
    assert torch.equal(total, added)
    wide = added.reshape(-1, shape[-1]).double()
    truth = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    truth = (truth.float().to(where.dtype) if casting_mode == "llama" else truth).double() * (weight.double() + 0.5)
    if casting_mode == "gemma" or where.dtype == torch.float32:
        assert_rounded(y, truth.detach(), where)
    dy, dtotal = (torch.randn(shape, device=where.device).to(where.dtype) for _ in range(2))
    leaves = [x, *[residual] * with_residual, weight]
    found = torch.autograd.grad((y, total), leaves, (dy, dtotal))
    leaves64 = [each.detach().double().requires_grad_() for each in leaves]
    total64 = leaves64[0] + leaves64[1] if with_residual else leaves64[0]
    y64 = plain_rms_norm(total64, leaves64[-1], 1e-6, 0.5, "gemma")
    wanted = torch.autograd.grad((y64, total64), leaves64, (dy.double(), dtotal.double()))
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == where.dtype
        torch.testing.assert_close(a.double(), b, rtol=4 * torch.finfo(where.dtype).eps, atol=0.02)


@pytest.mark.parametrize(
    "options", [{}, {"gate_multiplier": 0.7, "down_multiplier": 1.5, "limit": 1.0, "up_offset": 1.0}]
)
@pytest.mark.parametrize("activation", ["silu", "clamped_silu", "gelu", "gelu_tanh"])
def test_gated_activation(where: Where, activation: str, options: dict[str, float]) -> None:
    """The activation and, as float8 too, the gradient of its pairs."""
    for shape in ((3, 16), (2, 37, 48), (70, 80), (2, 4112)):  # rows of one block and of several
        gate_up = torch.randn(*shape[:-1], 2 * shape[-1], device=where.device).to(where.dtype).requires_grad_()
        y = float8_gated_activation(gate_up, GLUOptions(activation, **options), E4M3, E5M2)
        assert y.shape == shape and y.dtype == where.dtype
        dy = torch.randn(shape, device=where.device).to(where.dtype)
        (found,) = torch.autograd.grad(y, gate_up, dy)
        wide = gate_up.detach().reshape(-1, 2 * shape[-1]).double().requires_grad_()
        gate, up = wide[:, ::2], wide[:, 1::2]
        clamps_silu = activation == "clamped_silu"
        if options:
            gate, up = gate if clamps_silu else gate.clamp(max=1.0), up.clamp(-1.0, 1.0)
        g = gate * options.get("gate_multiplier", 1)
        part = ACTIVATIONS[activation.removeprefix("clamped_")](g)
        part = part.clamp(max=1.0) if options and clamps_silu else part
        truth = part * (up + options.get("up_offset", 0)) * options.get("down_multiplier", 1)
        (gradient,) = torch.autograd.grad(truth, wide, dy.double().view_as(truth))
        assert_rounded(y, truth.detach(), where)
        assert isinstance(found, Float8Tensor) and found.rows is not None and found.rows.dtype == E5M2
        assert found.shape == gate_up.shape
        assert_rounded(found, gradient, where)


def values(x: Tensor, dtype: torch.dtype, by_row: bool = False) -> Tensor:
    """x as float8 keeps it, float64 (M, N)."""
    found = float8_cast(x, dtype, by_row=by_row)
    assert found.rows is not None
    return found.rows.double() * (found.scale.unsqueeze(1) if by_row else found.scale).double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gradient_dtype", [E4M3, E5M2], ids=str)
def test_linear(where: Where, gradient_dtype: torch.dtype, bias: bool) -> None:
    """Each of the three products is exact in what was cast, whoever cast it; rows may be of any number."""
    recipe = Float8Recipe(gradient_dtype=gradient_dtype, forward_fast=False, backward_fast=False)
    for rows in (1, 37, 64) if where.place == "cuda" else (1, 19, 32):
        x = torch.randn(rows, 96, device=where.device).to(where.dtype).requires_grad_()
        w = (torch.randn(48, 96, device=where.device) / 10).to(where.dtype).requires_grad_()
        b = torch.randn(48, device=where.device).to(where.dtype).requires_grad_() if bias else None
        dy = torch.randn(rows, 48, device=where.device).to(where.dtype)
        x8, w8, dy8 = values(x, E4M3), values(w, E4M3), values(dy, gradient_dtype)
        wanted = [
            x8 @ w8.t() + (b.detach().double() if b is not None else 0),
            dy8 @ w8,
            dy8.t() @ x8,
            dy.double().sum(0),
        ]
        leaves = [x, w, *([] if b is None else [b])]
        for given in (x, float8_cast(x, E4M3)):
            for frozen in (None, float8_cast(w, E4M3), float8_cast(w, E4M3, columns=True)):
                y = float8_linear(given, w, b, recipe=recipe, frozen=frozen)
                if given is x:
                    found = y.detach(), *torch.autograd.grad(y, leaves, dy)
                else:
                    found = y.detach(), None, *torch.autograd.grad(y, leaves[1:], dy)
                for a, c in zip(found, wanted[: len(found)], strict=True):
                    if a is not None:
                        assert a.dtype == where.dtype
                        # Tensor cores keep fewer bits of a sum than float32 has.
                        exact = 1e-5 if where.device.type == "cpu" else 2e-3
                        limit = 2 * torch.finfo(where.dtype).eps if where.dtype != torch.float32 else exact
                        torch.testing.assert_close(a.double(), c, rtol=limit, atol=limit * float(c.abs().max()))
        # What meets a frozen weight has a scale for each row, and otherwise as much exactness.
        x8, dy8 = values(x, E4M3, by_row=True), values(dy, gradient_dtype, by_row=True)
        truth = x8 @ w8.t() + (b.detach().double() if b is not None else 0), dy8 @ w8
        for given in (x, float8_cast(x, E4M3, by_row=True)):
            y = float8_linear(given, w.detach(), b, recipe=recipe)
            found = y.detach(), *([torch.autograd.grad(y, x, dy)[0]] if given is x else [])
            for a, c in zip(found, truth, strict=False):
                torch.testing.assert_close(a.double(), c, rtol=limit, atol=limit * float(c.abs().max()))


def test_rows_with_scales_of_their_own_before_a_trained_weight(where: Where) -> None:
    """They are cast anew, and the gradient goes on to the op that computed them."""
    x = torch.randn(37, 96, device=where.device).to(where.dtype).requires_grad_()
    norm = torch.rand(96, device=where.device).to(where.dtype).requires_grad_()
    w = torch.randn(112, 96, device=where.device).to(where.dtype).requires_grad_()
    y = float8_add_rms_norm(x, None, norm, 1e-5, E4M3)[0]
    wanted = float8_linear(y.dequantize(), w.detach(), recipe=Float8Recipe())
    found = float8_linear(y, w, recipe=Float8Recipe())
    assert (found - wanted).norm() <= 0.05 * wanted.norm()
    gradients = torch.autograd.grad(float8_linear(y, w, recipe=Float8Recipe()).square().sum(), (x, norm, w))
    assert all(torch.isfinite(gradient).all() and gradient.any() for gradient in gradients)


def test_other_operations_see_numbers(where: Where) -> None:
    x = exact((2, 3, 16), where, E4M3)
    x8 = float8_cast(x, E4M3)
    assert torch.equal(x8 + 1, x + 1) and torch.equal(x8.flatten(0, 1), x.flatten(0, 1))
    assert isinstance(x8.detach(), Float8Tensor)


def test_refusals() -> None:
    x, w = torch.randn(4, 32), torch.randn(48, 32)
    with pytest.raises(InputError, match=r"in_features 24 .* multiples of 16"):
        float8_linear(torch.randn(4, 24), torch.randn(48, 24), recipe=Float8Recipe())
    with pytest.raises(InputError, match="must fit"):
        float8_linear(x, w.t(), recipe=Float8Recipe())
    with pytest.raises(InputError, match=r"float8_e4m3fn or torch.float8_e5m2"):
        float8_cast(x, torch.bfloat16)
    with pytest.raises(InputError, match="gradient_dtype"):
        Float8Recipe(gradient_dtype=torch.bfloat16)
    a, b = (float8_cast(each, E5M2) for each in (x, w))
    with pytest.raises(InputError, match="e4m3fn"):
        float8_mm(a.rows, b.rows, a.scale, b.scale, torch.float32)
    with pytest.raises(InputError, match="multiples of 16"):
        float8_mm(a.rows[:, :24].contiguous(), b.rows[:, :24].contiguous(), a.scale, b.scale, torch.float32)
    with pytest.raises(InputError, match="gate_up must be floating, its last dimension a multiple of 32"):
        float8_gated_activation(torch.randn(4, 16), GLUOptions("silu"), E4M3, E5M2)
    pairs = torch.randn(4, 32)
    for options, dtype, message in (
        (GLUOptions("tanh"), E4M3, "activation must be one of silu, clamped_silu, gelu, gelu_tanh, got 'tanh'"),
        (GLUOptions("silu", limit=-1.0), E4M3, "limit must be above 0, got -1.0"),
        (GLUOptions("silu"), torch.bfloat16, "dtype must be torch.float8_e4m3fn or .*, got torch.bfloat16"),
    ):
        with pytest.raises(InputError, match=f"float8_gated_activation: {message}"):
            float8_gated_activation(pairs, options, dtype, E5M2)
    with pytest.raises(InputError, match=r"float8_add_rms_norm: dtype must be torch.float8_e4m3fn"):
        float8_add_rms_norm(x, None, torch.ones(x.shape[1]), 1e-6, torch.bfloat16)
    with pytest.raises(InputError, match="x must be floating, its last dimension a multiple of 16"):
        float8_cast(torch.randn(4, 24), E4M3)
    with pytest.raises(InputError, match="by_row: columns have one scale"):
        float8_cast(x, E4M3, columns=True, by_row=True)
    by_row = float8_cast(x, E4M3, by_row=True)
    with pytest.raises(InputError, match="columns have one scale"):
        Float8Tensor(by_row.rows, by_row.rows.t().contiguous(), by_row.scale, x.shape, x.dtype)
    with pytest.raises(InputError, match=r"float8_linear: frozen must be a Float8Tensor .* with one scale"):
        float8_linear(x, w, recipe=Float8Recipe(), frozen=float8_cast(w, E4M3, by_row=True))
    with pytest.raises(InputError, match=r"float8_mm: scale_b must be torch.float32 of shape \(\)"):
        float8_mm(by_row.rows, by_row.rows, by_row.scale, by_row.scale, torch.float32)
    with pytest.raises(InputError, match="float8_transpose: takes float8"):
        float8_transpose(x)
