"""The backend "triton" over several tiles of queries and keys, against the reference in float64."""

from typing import Any

import pytest
import torch

from ligermodels.ops import attention
from ligermodels.ops.attention import triton_attention
from ligermodels.ops.attention.triton_attention_tiles import Tiles
from ligermodels.ops.runtime.dispatch import OutOfResources

CASES: dict[str, dict[str, Any]] = {
    "causal": {"batch": 2, "dtype": torch.float16},
    "one query and key": {"keys": 1, "dim": 4, "value_dim": 3},
    "window": {"window": 20, "dtype": torch.float16},
    "window of one key": {"window": 1},
    "fewer queries in a window": {"queries": 40, "window": 33, "sinks": True, "batch": 2},
    "one query": {"queries": 1, "bounds": [0, 3, 3, 40, 70], "window": 15, "softcap": 1.5},
    "packed": {"bounds": [0, 3, 3, 40, 41, 70], "sinks": True, "dtype": torch.float16},
    "packed last places in a window": {"queries": 40, "bounds": [0, 3, 3, 40, 60, 70], "window": 15, "softcap": 1.5},
    "softcap, wide values, sinks": {"softcap": 2.0, "dim": 24, "value_dim": 40, "sinks": True, "dtype": torch.float16},
    "narrow values, as many heads of keys": {"dim": 24, "value_dim": 10, "kv_heads": 2},
    "great scores": {"softmax_scale": 1e3, "sinks": True},
    "softcap of great scores": {"softmax_scale": 1e3, "softcap": 2.0},
    "negative scale": {"softmax_scale": -0.3},
}
DEFAULTS = {"batch": 1, "keys": 70, "dim": 16, "kv_heads": 1, "sinks": False, "bounds": None, "dtype": torch.float32}
LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3}


@pytest.mark.kernels
@pytest.mark.parametrize("case", CASES)
def test_several_tiles(kernels_device: torch.device, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Results and gradients, no further from float64 than twice the reference in its own dtype where scores are so
    great that their rounding shows; and on a GPU equal bits in a second run."""
    if kernels_device.type == "cpu":
        monkeypatch.setattr(
            triton_attention, "tile_options", lambda *_: (Tiles(queries=32, keys=16, warps=4, stages=1),)
        )
    options = DEFAULTS | CASES[case]
    batch, keys, dim, kv_heads, sinks, bounds, dtype = (options.pop(name) for name in DEFAULTS)
    queries, value_dim = options.pop("queries", keys), options.pop("value_dim", dim)
    sizes = [(batch, queries, 2, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, value_dim)]
    inputs = [torch.randn(size, dtype=dtype, device=kernels_device) for size in (*sizes, *([(2,)] if sinks else []))]
    if bounds:
        options["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=kernels_device)
    seed = torch.randn(batch, queries, 2, value_dim, dtype=dtype, device=kernels_device)

    def run(backend: str, dtype: torch.dtype = dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        out = attention(*leaves[:3], sinks=leaves[3] if sinks else None, backend=backend, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, seed.to(dtype))]

    found = run("triton")
    for ours, eager, truth in zip(found, run("reference"), run("reference", torch.float64), strict=True):
        assert ours.shape == truth.shape
        smallest = max(abs(options.get("softmax_scale", 0)), 0.1)  # differences of rounded numbers times the scale
        rounding = LIMITS[dtype] * max(truth.norm(), truth.numel() ** 0.5 * smallest)
        assert (ours.double() - truth).norm() <= max(rounding, 2 * (eager.double() - truth).norm())
    again = run("triton") if kernels_device.type == "cuda" else found  # the interpreter has no races
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.kernels
def test_tiles_that_do_not_fit_are_followed_by_smaller_ones(
    monkeypatch: pytest.MonkeyPatch, kernels_device: torch.device
) -> None:
    """Compilers need more shared memory on some GPUs than on others; later launches begin with what has fitted."""
    tried = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            return lambda *_, BLOCK_T, BLOCK_S, num_stages, **__: self.launch(BLOCK_T, BLOCK_S, num_stages)

        def launch(self, *tiles: int) -> None:
            tried.append(tiles)
            if tiles[0] > 64:
                raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(triton_attention, "_too_large", {})
    monkeypatch.setattr(triton_attention, "shared_memory", lambda _: 224_256)
    monkeypatch.setattr(triton_attention, "attention_forward_kernel", Kernel())
    q = torch.zeros(1, 70, 2, 128, dtype=torch.bfloat16, device=kernels_device)
    for _ in range(2):
        attention(q, q, q, backend="triton")
    assert tried == [(128, 128, 2), (128, 128, 1), *[(128, 64, n) for n in (3, 2, 1)], (64, 64, 3), (64, 64, 3)]
