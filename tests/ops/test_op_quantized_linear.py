"""Quantised weights: rounding, element by element, in float64; and the linear layer of them, against float64."""

from typing import Any

import pytest
import torch
from conftest import Where
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops import dequantize_weight, quantize_weight, quantized_linear, quantized_linear_reference
from ligermodels.ops.quantized import linear, unpack, weights
from ligermodels.ops.quantized.dequantize import dequantize_weight_reference
from ligermodels.ops.quantized.few_rows import few_rows
from ligermodels.ops.quantized.more_rows import more_rows
from ligermodels.ops.quantized.weights import FP4_LEVELS, NF4_LEVELS, empty_quantized
from ligermodels.ops.runtime import devices
from ligermodels.ops.runtime.dispatch import tl
from ligermodels.ops.runtime.launcher import kernel

KINDS = ("float8", "int4", "nf4", "mxfp4")


@kernel
def _scales_kernel(scales, out, BLOCK: tl.constexpr):
    number = tl.arange(0, BLOCK)
    tl.store(out + number, unpack.mxfp4_scales(tl.load(scales + number), 8))


SIZES = [(3, 128), (17, 256), (5, 1), (8, 127), (33, 130), (2, 515)]
"""(N, K): whole groups, less than one, and a short last one."""


def codes_of(codes: Tensor, in_features: int) -> Tensor:
    """The integers of int4, from the layout as it is documented, one after another."""
    found = torch.zeros(codes.shape[0], codes.shape[1] * 2, dtype=torch.long)
    for i in range(found.shape[1]):
        byte = codes[:, i // 128 * 64 + i % 64].long()
        found[:, i] = (byte // 16 if i % 128 >= 64 else byte % 16) - 8
    assert not found[:, in_features:].any()
    return found[:, :in_features]


def awkward(size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Rows of very different magnitudes; one of zeros, one of both signs alike, one with a large value."""
    weight = torch.randn(size, generator=torch.Generator().manual_seed(0))
    weight = weight * torch.logspace(-30, 30, size[0])[:, None] if dtype != torch.float16 else weight
    weight[0] = 0
    if size[0] > 1:
        weight[1] = torch.tensor([1.0, -1.0]).repeat(size[1])[: size[1]] * 3
    if size[0] > 2:
        weight[2, size[1] // 2] *= 1000
    return weight.to(dtype)


@pytest.mark.parametrize("pieces", [None, 1], ids=["whole", "row by row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_int4(size: tuple[int, int], dtype: torch.dtype, pieces: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if pieces:
        monkeypatch.setattr(weights, "_CHUNK_ELEMENTS", pieces)
    weight = awkward(size, dtype)
    codes, scales = quantize_weight(weight, "int4")
    groups = -(-size[1] // 128)
    assert (codes.shape, codes.dtype) == ((size[0], 64 * groups), torch.uint8)
    assert (scales.shape, scales.dtype) == ((size[0], groups), torch.float32)
    step = scales.double().repeat_interleave(128, dim=1)[:, : size[1]]
    exact = codes_of(codes, size[1]) * step
    error = (exact - weight.double()).abs()
    assert (error <= 0.5 * step * (1 + 2**-20)).all()  # no more than half a step; the division is float32's
    largest = torch.nn.functional.pad(weight.double(), (0, -size[1] % 128)).unflatten(1, (-1, 128)).abs().amax(2)
    assert torch.allclose(scales.double() * 7.5, largest, rtol=1e-6, atol=1e-37)
    assert torch.equal(dequantize_weight(codes, scales, size[1], torch.float64), exact)
    assert torch.equal(dequantize_weight(codes, scales, size[1], torch.bfloat16), exact.float().to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_float8(size: tuple[int, int], dtype: torch.dtype) -> None:
    weight = awkward(size, dtype)
    codes, scales = quantize_weight(weight, "float8")
    assert (codes.shape, codes.dtype) == (weight.shape, torch.float8_e4m3fn)
    assert (scales.shape, scales.dtype) == (size[:1], torch.float32)
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    grid = values[values.isfinite()].unique() * scales.double()[:, None]
    nearest = (grid[:, None, :] - weight.double()[..., None]).abs().amin(-1)
    found = dequantize_weight(codes, scales, size[1], torch.float64)
    error = (found - weight.double()).abs()
    # The nearest of all values, but for ties that float32's division makes or breaks.
    assert (error <= nearest + weight.double().abs() * 2**-20).all()
    largest = found.abs().amax(1), weight.double().abs().amax(1)
    assert torch.allclose(*largest, rtol=1e-6, atol=1e-37)  # which the greatest of them meets


def nf4_codes(codes: Tensor) -> Tensor:
    """The codes of nf4, one after another, by the documented layout."""
    groups = codes.view(len(codes), -1, 1, 64)
    return torch.cat([groups & 15, groups >> 4], 2).flatten(1)


@pytest.mark.parametrize("size", [*SIZES, (3, 32), (2, 224)], ids=str)
def test_mxfp4(size: tuple[int, int]) -> None:
    """The power of two of OCP's specification, and the nearest numbers up to 6 times it, halfway the even code."""
    weight = awkward(size, torch.float32)
    weight[0, 0] = 5  # between 4 and 6: 4 is even
    codes, scales = quantize_weight(weight, "mxfp4")
    assert scales.dtype == torch.uint8 and scales.shape == (size[0], -(-size[1] // 128), 4)
    blocks = torch.nn.functional.pad(weight.double(), (0, -size[1] % 128)).unflatten(1, (-1, 4, 32))
    largest = blocks.abs().amax(3)
    wanted = torch.where(largest > 0, torch.log2(largest).floor() - 2, 0).clamp(-126, 127)
    assert torch.equal(scales.double() - 127, wanted)
    units = 2 ** wanted[..., None]
    levels = torch.tensor(FP4_LEVELS, dtype=torch.float64)
    distances = (blocks[..., None] - levels * units[..., None]).abs()
    found = levels[nf4_codes(codes).view(*blocks.shape).long()]
    assert torch.equal((blocks - found * units).abs(), distances.amin(-1))
    exact = dequantize_weight(codes, scales, size[1], torch.float64)
    assert torch.equal(exact, (found * units).flatten(1)[:, : size[1]])
    assert torch.equal(dequantize_weight(codes, scales, size[1], torch.float32).double(), exact)


@pytest.mark.parametrize("pieces", [None, 1], ids=["whole", "row by row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [*SIZES, (3, 64), (2, 192)], ids=str)
def test_nf4(size: tuple[int, int], dtype: torch.dtype, pieces: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales are the largest magnitudes of 64 inputs, codes the nearest levels."""
    if pieces:
        monkeypatch.setattr(weights, "_CHUNK_ELEMENTS", pieces)
    weight = awkward(size, dtype)
    codes, scales = quantize_weight(weight, "nf4")
    groups = -(-size[1] // 128)
    assert (codes.shape, codes.dtype) == ((size[0], 64 * groups), torch.uint8)
    assert (scales.shape, scales.dtype) == ((size[0], groups, 2), torch.float32)
    blocks = torch.nn.functional.pad(weight.float(), (0, -size[1] % 128)).unflatten(1, (-1, 2, 64))
    assert torch.equal(scales, blocks.abs().amax(3))
    scale = scales.flatten(1).repeat_interleave(64, dim=1)[:, : size[1], None].double()
    values = torch.tensor(NF4_LEVELS, dtype=torch.float64) * scale
    exact = values.gather(2, nf4_codes(codes)[:, : size[1], None].long())[..., 0]
    nearest = (values - weight.double()[..., None]).abs().amin(2)
    assert ((exact - weight.double()).abs() <= nearest + scale[..., 0] * 2**-22).all()
    assert torch.equal(dequantize_weight(codes, scales, size[1], torch.float64), exact)
    assert torch.equal(dequantize_weight(codes, scales, size[1], torch.bfloat16), exact.float().to(torch.bfloat16))


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dequantized_float8(dtype: torch.dtype, kernels_device: torch.device) -> None:
    """Every code as in the specification, NaN too, which Triton's interpreter reads as 480; and columns, which are read
    where they are."""
    codes = torch.arange(256, dtype=torch.uint8, device=kernels_device).repeat(3, 2)[:, :300]
    if kernels_device.type == "cpu":
        codes = codes.masked_fill(codes & 127 == 127, 0)
    codes = codes.view(torch.float8_e4m3fn)
    scales = torch.tensor([1.0, 0.3, 1e-3], device=kernels_device)
    for part in (slice(0, 300), slice(128, 290)):
        found = dequantize_weight(codes[:, part], scales, part.stop - part.start, dtype)
        wanted = dequantize_weight_reference(codes[:, part], scales, part.stop - part.start, dtype)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_levels_of_nf4() -> None:
    """QLoRA's appendix E, with bitsandbytes' offset: quantiles of the normal distribution, 0, and both ends at 1."""
    quantiles = [torch.linspace(0.9677083, 0.5, count, dtype=torch.float64) for count in (9, 8)]
    positive, negative = (torch.special.ndtri(each)[:-1] for each in quantiles)
    levels = torch.cat([-negative, torch.zeros(1, dtype=torch.float64), positive]).sort().values
    torch.testing.assert_close(torch.tensor(NF4_LEVELS, dtype=torch.float64), levels / levels.max(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("features", [64, 192, 1024])
def test_nf4_is_that_of_bitsandbytes(features: int, dtype: torch.dtype) -> None:
    """The same codes and scales, and the same numbers in float32 and bfloat16."""
    theirs = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(33, features).to(dtype)
    weight[2, : features // 2] = 0
    packed, state = theirs.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    assert tuple(theirs.get_4bit_type("nf4", "cpu").tolist()) == NF4_LEVELS
    codes, scales = quantize_weight(weight, "nf4")
    assert torch.equal(nf4_codes(codes)[:, :features], torch.stack([packed >> 4, packed & 15], 1).view(33, features))
    assert torch.equal(scales.flatten(1)[:, : features // 64], state.absmax.view(33, -1))
    for wanted in (torch.float32, torch.bfloat16):
        state.dtype = wanted
        assert torch.equal(dequantize_weight(codes, scales, features, wanted), theirs.dequantize_4bit(packed, state))


@pytest.mark.kernels
@pytest.mark.parametrize("size", [*SIZES, (3, 64), (2, 2176)], ids=str)
@pytest.mark.parametrize("kind", ["int4", "nf4", "mxfp4"])
def test_kernel_that_dequantises(kind: Any, size: tuple[int, int], kernels_device: torch.device) -> None:
    """The bits of the reference, for some groups of each row too."""
    codes, scales = quantize_weight(awkward(size, torch.float32).to(kernels_device), kind)
    for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if kernels_device.type == "cuda" else [])):
        wanted = dequantize_weight_reference(codes, scales, size[1], dtype)
        assert torch.equal(dequantize_weight(codes, scales, size[1], dtype), wanted)
        if size[1] > 256:
            part = dequantize_weight(codes[:, 64:128], scales[:, 1:2], 128, dtype)
            assert torch.equal(part, wanted[:, 128:256])


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_quantised(kind: Any) -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        weight = torch.ones(3, 200)
        weight[1, 150] = bad
        with pytest.raises(InputError, match="not finite"):
            quantize_weight(weight, kind)
    for weight in (torch.ones(3), torch.ones(2, 3, 4), torch.ones(2, 3).long(), torch.ones(0, 3)):
        with pytest.raises(InputError, match="quantize_weight: weight must be floating"):
            quantize_weight(weight, kind)
    with pytest.raises(InputError, match=r"kind: must be one of float8, int4, nf4, mxfp4, got 'int5'"):
        quantize_weight(torch.ones(2, 3), "int5")  # type: ignore[arg-type]


def operands(where: Where, kind: Any, size: tuple[int, int], rows: tuple[int, ...], bias: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*rows, size[1], generator=generator).to(where.device, where.dtype)
    weight = torch.randn(size, generator=generator).to(where.device) * 0.1
    codes, scales = quantize_weight(weight, kind)
    own = torch.randn(size[0], generator=generator).to(where.device, where.dtype) if bias else None
    return {"x": x, "codes": codes, "scales": scales, "bias": own}


DEEP = [(70, 1100), (20, 1024), (5, 1029)]
"""More than one tile, and inputs enough to be split: by the kernels alone."""


@pytest.mark.parametrize("pieces", [None, 300], ids=["whole", "in pieces"])
@pytest.mark.parametrize("rows", [(1,), (), (3,), (2, 5), (0,), (64,), (70,)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_against_float64(
    where: Where, kind: str, rows: tuple[int, ...], pieces: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both passes, within 1.5 times the error of the same computation in the dtype of x."""
    if pieces:
        monkeypatch.setattr(linear, "PIECE", pieces)
    kernels = where.place != "reference"
    for size in (*SIZES, *(DEEP if kernels and not pieces else ())):
        given = operands(where, kind, size, rows, bias=size[0] % 2 == 1)
        x, bias = given["x"].requires_grad_(), given["bias"]
        if bias is not None:
            bias.requires_grad_()
        inputs = [each for each in (x, bias) if each is not None]
        y = quantized_linear(**given)
        assert y.dtype == x.dtype and y.shape == (*rows, size[0])
        dy = torch.randn(y.shape, device=y.device).to(y.dtype)
        found = [y, *torch.autograd.grad(y, inputs, dy)]

        def results(dtype: torch.dtype, given: dict[str, Any] = given, dy: Tensor = dy) -> list[Tensor]:
            x, bias = (
                None if t is None else t.detach().to(dtype).requires_grad_() for t in (given["x"], given["bias"])
            )
            y = quantized_linear_reference(x, given["codes"], given["scales"], bias)  # type: ignore[arg-type]
            return [y, *torch.autograd.grad(y, [t for t in (x, bias) if t is not None], dy.to(dtype))]

        for ours, eager, exact in zip(found, results(where.dtype), results(torch.float64), strict=True):
            scale = exact.abs().max() if exact.numel() else 0.0
            each = 4 * torch.finfo(torch.float32).eps * scale
            if where.dtype != torch.float32:
                each += 0.125 * torch.finfo(where.dtype).eps * scale
            allowed = 1.5 * (eager.double() - exact).norm() + each * max(1, exact.numel()) ** 0.5
            assert (ours.double() - exact).norm() <= allowed


@pytest.mark.parametrize("kind", KINDS)
def test_habits(where: Where, kind: str) -> None:
    """Frozen operands cost nothing; strides and autocast are as torch has them; repeated calls give the same bits."""
    given = operands(where, kind, (40, 200), (6,), bias=True)
    assert not quantized_linear(**given).requires_grad
    y = quantized_linear(**{**given, "bias": given["bias"].clone().requires_grad_()})
    assert y.requires_grad and torch.equal(y.detach(), quantized_linear(**given))
    strided = torch.empty(200, 6, device=where.device, dtype=where.dtype).copy_(given["x"].t()).t()
    torch.testing.assert_close(quantized_linear(**{**given, "x": strided}), y.detach())
    apart = {name: given[name].repeat_interleave(2, 0)[::2] for name in ("codes", "scales")}
    assert torch.equal(quantized_linear(**{**given, **apart}), y.detach())
    none = {name: given[name][:0] for name in ("codes", "scales", "bias")}
    assert quantized_linear(**{**given, **none, "x": given["x"].repeat(4, 1)}).shape == (24, 0)
    with torch.autocast(where.device.type, torch.bfloat16):
        cast = quantized_linear(**given)
    assert cast.dtype == torch.bfloat16
    meta = {name: t.to("meta") for name, t in given.items()}
    assert quantized_linear(**meta).shape == (6, 40)


@pytest.mark.kernels
@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_scales_at_any_address(kernels_device: torch.device, kind: Any, rows: int) -> None:
    """Scales within a larger tensor, of any strides: kernels may load several at once."""
    given = operands(Where(kernels_device, torch.float16), kind, (40, 200), (rows,), bias=False)
    wanted, scales = quantized_linear(**given), given["scales"]
    later = scales.new_empty(scales.numel() + 1)[1:].view(scales.shape)
    apart = scales.new_empty(*scales.shape, 3)[..., 1]
    for each in (later, apart):
        assert torch.equal(quantized_linear(**{**given, "scales": each.copy_(scales)}), wanted)


def test_gradcheck() -> None:
    for kind in KINDS:
        given = operands(Where(torch.device("cpu"), torch.float64), kind, (7, 130), (3,), bias=True)
        inputs = [given[name].requires_grad_() for name in ("x", "bias")]
        run = lambda x, bias, g=given: quantized_linear(x, g["codes"], g["scales"], bias)  # noqa: E731
        assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])], ids=str)
@pytest.mark.parametrize(
    ("rows", "K"), [(1, 1100), (2, 200), (8, 70), (9, 70), (16, 70), (17, 200), (33, 70), (64, 70)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_make_no_copy_of_the_weight(
    kernels_device: torch.device, kind: str, rows: int, K: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They serve up to 64 rows of 16 bits; a NaN stays in its row, and what lies beyond x is not read."""

    def never(*_: Any) -> Tensor:
        raise AssertionError("dequantised")

    where = Where(kernels_device, dtype)
    given = operands(where, kind, (70, K), (rows,), bias=True)
    wanted = quantized_linear(**given)
    monkeypatch.setattr(linear, "dequantize_weight", never)
    around = torch.full((rows + 2, K + 48), float("nan"), device=where.device, dtype=where.dtype)
    around[1:-1, 16:-32] = given["x"]
    assert torch.equal(quantized_linear(**{**given, "x": around[1:-1, 16:-32]}), wanted)
    around[1, 16] = float("nan")
    around[2:-1, 16:-32] = given["x"][1:]
    found = quantized_linear(**{**given, "x": around[1:-1, 16:-32]})
    assert found[0].isnan().all() and torch.equal(found[1:], wanted[1:])
    monkeypatch.undo()
    old = devices.GPU("old", (7, 5), 2**16, 40)
    monkeypatch.setattr(linear, "gpu_of", lambda device: old)  # without tensor cores for bfloat16
    monkeypatch.setattr(linear, "few_rows", never)
    monkeypatch.setattr(linear, "more_rows", never)
    exact = quantized_linear_reference(**{**given, "x": given["x"].double(), "bias": given["bias"].double()})
    eps = torch.finfo(where.dtype).eps  # each weight is rounded, by half of it at most, and so is the result
    assert (wanted.double() - exact).norm() <= eps * exact.norm()
    assert (quantized_linear(**given).double() - exact).norm() <= eps * exact.norm()


@pytest.mark.kernels
@pytest.mark.parametrize("rows", [1, 3, 16, 17])
@pytest.mark.parametrize("kind", KINDS)
def test_every_code_without_its_instructions(kind: Any, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without the instructions for float8 and for pairs of four bits: all 256 bytes, multiplied by 1."""
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(unpack, "gpu_of", lambda device: devices.GPU("AMD", (9, 4), 2**16, 304, hip=True))
    codes = torch.arange(256, dtype=torch.uint8, device=where)[:, None].repeat(1, 64)
    codes = codes.view(torch.float8_e4m3fn) if kind == "float8" else codes
    scales = empty_quantized(kind, 256, 128, where).scales.fill_(127 if kind == "mxfp4" else 1)  # 1
    x = torch.zeros(rows, 64 if kind == "float8" else 128, device=where, dtype=torch.float16)
    x[:, 5] = 1
    y = torch.empty(rows, 256, device=where, dtype=torch.float16)
    (few_rows if rows <= 16 else more_rows)(x, codes, scales, None, y)
    wanted = dequantize_weight(codes, scales, x.shape[1], torch.float16)[:, 5].expand(rows, -1)
    assert torch.equal(y.nan_to_num(999.0), wanted.nan_to_num(999.0))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 33, 64])
@pytest.mark.parametrize("size", [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (1000, 5120)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_of_models_in_a_graph(kind: Any, size: tuple[int, int], rows: int) -> None:
    """As in decoding: replayed, the same bits each time, and within the rounding of the result of float32 sums."""
    weight = torch.randn(size, device="cuda") * 0.02
    codes, scales = quantize_weight(weight, kind)
    x = torch.randn(rows, size[1], device="cuda", dtype=torch.bfloat16)
    quantized_linear(x, codes, scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = quantized_linear(x, codes, scales)
    exact = x.double() @ dequantize_weight(codes, scales, size[1], torch.float64).t()
    results = []
    for _ in range(3):
        y.fill_(float("nan"))
        graph.replay()
        results.append(y.clone())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    rounded = exact.to(torch.bfloat16).double()
    # The kernels round the levels of nf4 to bfloat16, where the reference rounds each weight.
    assert (y.double() - exact).norm() <= (1.5 if kind == "nf4" else 1.05) * (rounded - exact).norm()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_that_of_a_piece(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of the weight than PIECE elements is dequantised at a time, in either pass."""
    sizes: list[int] = []
    original = linear.dequantize_weight

    def watched(*arguments: Any) -> Tensor:
        sizes.append((found := original(*arguments)).numel())
        return found

    monkeypatch.setattr(linear, "dequantize_weight", watched)
    monkeypatch.setattr(linear, "PIECE", 128 * 50)
    given = operands(Where(torch.device("cpu"), torch.float32), kind, (40, 700), (3,), bias=False)
    quantized_linear(**{**given, "x": given["x"].requires_grad_()}).sum().backward()
    assert max(sizes) <= 128 * 50 and sum(sizes) == 2 * 40 * 700


def test_errors() -> None:
    where = Where(torch.device("cpu"), torch.float32)
    given = {kind: operands(where, kind, (6, 200), (3,), bias=True) for kind in KINDS}
    for change, message in (
        ({"x": torch.ones(3, 300)}, "quantized_linear: codes must be"),
        ({"x": torch.ones(3, 200).long()}, "x must be floating"),
        ({"x": torch.tensor(1.0)}, "x must be floating"),
        ({"bias": torch.ones(5)}, "bias must be"),
        ({"scales": torch.ones(6, 3)}, "scales must be"),
    ):
        for kind in KINDS:
            with pytest.raises(InputError, match=message):
                quantized_linear(**{**given[kind], **change})
    for arguments, message in (
        ({"codes": torch.ones(6, 200)}, "dequantize_weight: codes must be torch.uint8 of shape"),
        ({"in_features": 300}, "dequantize_weight: codes must be"),
        ({"in_features": 200.0}, "in_features: must be a whole number"),
        ({"scales": torch.ones(5)}, "dequantize_weight: scales must be"),
        ({"scales": torch.ones(6, 2).half()}, "dequantize_weight: scales must be"),
        ({"scales": torch.ones(6, device="meta")}, "dequantize_weight: scales must be"),
        ({"dtype": torch.int8}, "dequantize_weight: dtype must be a floating torch.dtype, got torch.int8"),
    ):
        for kind in KINDS:
            whole = {name: given[kind][name] for name in ("codes", "scales")}
            with pytest.raises(InputError, match=message):
                dequantize_weight(**{**whole, "in_features": 200, "dtype": torch.float32, **arguments})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="codes must be"):
        quantized_linear(**{**given["int4"], "codes": torch.ones(6, 200)})


@pytest.mark.kernels
def test_scales_of_mxfp4_are_all_powers_of_two(kernels_device: torch.device) -> None:
    """From the second byte of a word: 0 is 2 ** -127, which is subnormal, and 255 is NaN."""
    number = torch.arange(256, device=kernels_device, dtype=torch.int32)
    found = torch.empty(256, device=kernels_device)
    _scales_kernel[(1,)]((number << 8) | (255 - number), found, BLOCK=256, num_warps=4)
    wanted = torch.ldexp(torch.ones(255, dtype=torch.float64), torch.arange(-127, 128))
    assert torch.equal(found[:255].double().cpu(), wanted) and found[255].isnan()
