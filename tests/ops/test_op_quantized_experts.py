"""The grouped product of quantised experts against float64, of the dequantised weights: outputs and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops import dequantize_weight, quantize_weight, quantized_grouped_mm, quantized_grouped_mm_reference
from ligermodels.ops.quantized import experts
from ligermodels.ops.quantized.dequantize import dequantize_rows

E, M, K = 5, 24, 150


def case(kind: Any, rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(E * M, K, generator=generator)
    x, biases = (torch.randn(size, generator=generator) for size in ((rows, K), (E, M)))
    ends = torch.tensor([rows // 4, rows // 4, rows // 2, rows, rows], dtype=torch.int32)  # two groups are empty
    codes, scales = quantize_weight(weight, kind)
    return x.to(dtype).requires_grad_(), codes, scales, ends, biases.to(dtype).requires_grad_()


@pytest.mark.parametrize("pieces", [None, 8 * E * K], ids=["whole", "in pieces"])
@pytest.mark.parametrize("rows", [1, 16, 17, 200])
@pytest.mark.parametrize("kind", ["float8", "int4", "nf4", "mxfp4"])
def test_against_float64(kind: Any, rows: int, pieces: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if pieces:
        monkeypatch.setattr(experts, "PIECE", pieces)
    x, codes, scales, ends, biases = case(kind, rows)
    weight = dequantize_weight(codes, scales, K, torch.float64).view(E, M, K)
    group = torch.bucketize(torch.arange(rows), ends, right=True)
    wide = [each.detach().double().requires_grad_() for each in (x, biases)]
    wanted = torch.einsum("rk,rmk->rm", wide[0], weight[group]) + wide[1][group]
    found = quantized_grouped_mm(x, codes, scales, ends, biases)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)
    reference = quantized_grouped_mm_reference(x, codes, scales, ends, biases)
    torch.testing.assert_close(reference, found, rtol=1e-5, atol=1e-4)
    along = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(found, (x, biases), along)
    for one, other in zip(gradients, torch.autograd.grad(wanted, wide, along.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)
    again = quantized_grouped_mm(x, codes, scales, ends, biases)
    assert torch.equal(again, found) and found.dtype == x.dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert quantized_grouped_mm(x, codes, scales, ends).dtype == torch.bfloat16


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["float8", "int4", "nf4", "mxfp4"])
def test_rows_of_each_expert(kind: Any, dtype: torch.dtype, kernels_device: torch.device) -> None:
    """Views of rows, of experts and of columns: the bits of the whole weight, and of no expert at all nothing."""
    weight = torch.randn(E * M, 300, generator=torch.Generator().manual_seed(0)).to(kernels_device)
    codes, scales = quantize_weight(weight, kind)
    wanted = dequantize_weight(codes, scales, 300, dtype).unflatten(0, (E, M))
    codes, scales = (each.unflatten(0, (E, M)) for each in (codes, scales))
    for own in (slice(None), slice(1, None, 2), slice(4, 5), slice(0)):
        for rows in (slice(None), slice(8, 24), slice(5, 6), slice(3, None, 4)):
            assert torch.equal(dequantize_rows(codes[own, rows], scales[own, rows], 300, dtype), wanted[own, rows])
    if kind != "float8":
        found = dequantize_rows(codes[1:, :8, 64:128], scales[1:, :8, 1:2], 128, dtype)
        assert torch.equal(found, wanted[1:, :8, 128:256])


@pytest.mark.parametrize("kind", ["float8", "int4", "nf4", "mxfp4"])
def test_codes_are_not_copied(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both passes dequantise views of the codes and scales; on a GPU, copies of them take longer than the product."""
    generator = torch.Generator().manual_seed(0)
    codes, scales = quantize_weight(torch.randn(E * M, 300, generator=generator), kind)
    pieces = 0

    def watched(own_codes: Tensor, own_scales: Tensor, *rest: Any) -> Tensor:
        nonlocal pieces
        pieces += 1
        for own, whole in ((own_codes, codes), (own_scales, scales)):
            assert own.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        return dequantize_rows(own_codes, own_scales, *rest)

    monkeypatch.setattr(experts, "dequantize_rows", watched)
    monkeypatch.setattr(experts, "PIECE", 8 * E * 300)
    x = torch.randn(40, 300, generator=generator).requires_grad_()
    ends = torch.tensor([10, 10, 20, 40, 40], dtype=torch.int32)
    quantized_grouped_mm(x, codes, scales, ends).sum().backward()
    assert pieces == 3 + 3


def test_errors() -> None:
    x, codes, scales, ends, biases = case("int4", 20)
    for arguments, message in (
        ((x[0], codes, scales, ends), r"x must be floating, of shape \(R, K\)"),
        ((x, codes, scales, ends.long()), "offsets"),
        ((x, codes[:-1], scales[:-1], ends), "which 5 groups do not divide evenly"),
        ((x, codes, scales, ends, biases[:, 1:]), "biases"),
        ((x[:, :20], codes, scales, ends), "codes"),
    ):
        with pytest.raises(InputError, match=message):
            quantized_grouped_mm(*arguments)
