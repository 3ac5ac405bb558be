"""The grouped product of quantised experts against float64, of the dequantised weights: outputs and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops import dequantize_weight, quantize_weight, quantized_grouped_mm, quantized_grouped_mm_reference
from ligermodels.ops.quantized import experts

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
