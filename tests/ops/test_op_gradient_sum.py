"""Gradients that come in parts: summed exactly, rounded once, in little more memory than their own."""

import pytest
import torch

from ligermodels.ops.loss.chunks import GradientSum


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("chunks", [0, 1, 4])
@pytest.mark.parametrize("V", [1, 31, 33, 2049, 6007])
def test_sums_are_rounded_once(device: str, dtype: torch.dtype, chunks: int, V: int) -> None:
    """Whole numbers, which float32 sums exactly, and which 16 bits cannot hold on the way."""
    M, H = 7, 24
    x, g = (torch.randint(-15, 16, (chunks * M, n), device=device).to(dtype) for n in (H, V + 16))
    parts = [slice(i, i + M) for i in range(0, chunks * M, M)]
    weight, bias = (torch.empty(shape, dtype=dtype, device=device) for shape in ((V, H), (V,)))
    of_weight, of_bias = (GradientSum(torch.empty_like(p), several=chunks != 1) for p in (weight, bias))
    for part in parts:
        of_weight.add(g[part, :V], x[part])
        of_bias.add(g[part, :V])
    g, x = g[:, :V].double(), x.double()
    for found, truth in ((of_weight, g.t() @ x), (of_bias, g.sum(0))):
        gradient = found.close()
        assert gradient.dtype == dtype and gradient.is_contiguous()
        torch.testing.assert_close(gradient, truth.to(dtype), rtol=0, atol=0)


@pytest.mark.gpu
def test_half_of_the_sum_is_in_the_gradient() -> None:
    weight = torch.empty(100_001, 512, dtype=torch.bfloat16, device="cuda")
    g, x = torch.randn(64, len(weight), device="cuda").bfloat16(), torch.randn(64, 512, device="cuda").bfloat16()
    (g.t() @ x).sum()  # what cuBLAS takes for itself
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    total = GradientSum(torch.empty_like(weight), several=True)
    for _ in range(2):
        total.add(g, x)
    total.close()
    assert torch.cuda.max_memory_allocated() - before < 2 * weight.nbytes + 10 * 2**20
