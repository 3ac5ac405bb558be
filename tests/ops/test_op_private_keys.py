"""Causal attention with private keys against one softmax over an explicit mask, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError

CASES: dict[str, dict[str, Any]] = {
    "two steps": {"steps": 2, "batch": 2},
    "no step": {"steps": 0},
    "packed, half precision": {"steps": 3, "bounds": [0, 3, 3, 40, 41, 70], "dtype": torch.float16},
    "window": {"steps": 1, "window": 20, "kv_heads": 2},
    "one token": {"steps": 2, "length": 1},
    "scale of 1": {"steps": 2, "softmax_scale": 1.0},
    "negative scale": {"steps": 1, "length": 9, "softmax_scale": -0.3, "bounds": [0, 4, 9]},
    "scale of 0": {"steps": 1, "length": 9, "softmax_scale": 0.0, "window": 3},
    "three heads a key head, 24 channels": {"steps": 6, "batch": 2, "length": 9, "kv_heads": 2, "group": 3, "dim": 24},
    "heads of 520 elements": {"steps": 1, "length": 3, "kv_heads": 2, "group": 5, "dim": 104},
}
DEFAULTS = {
    "batch": 1, "length": 70, "kv_heads": 1, "steps": 1, "bounds": None, "dtype": torch.float32, "group": 2, "dim": 16,
}  # fmt: skip
LIMITS = {torch.float32: 2e-6, torch.float16: 1.5e-3}


def by_mask(q: Tensor, k: Tensor, v: Tensor, keys: list[Tensor], values: list[Tensor], allowed: Tensor,
            scale: float) -> Tensor:  # fmt: skip
    """Attention over the keys of all J + 1 steps, one step after another; allowed: bool (T, T * (1 + J))."""
    groups = q.shape[2] // k.shape[2]
    all_keys, all_values = (
        torch.cat([first, *others], dim=1).repeat_interleave(groups, dim=2)
        for first, others in ((k, keys), (v, values))
    )
    scores = torch.einsum("bthd,bshd->bhts", q, all_keys) * scale
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights, all_values)


@pytest.mark.kernels
@pytest.mark.parametrize("case", CASES)
def test_one_softmax_over_all_keys(kernels_device: torch.device, case: str) -> None:
    """Results and gradients of every operand, of the kernels and of the reference; on a GPU equal bits
    in a second run."""
    options = DEFAULTS | CASES[case]
    batch, length, kv_heads, steps, bounds, dtype, group, dim = (options.pop(name) for name in DEFAULTS)
    sizes, scale = (batch, length, kv_heads, dim), options.get("softmax_scale", dim**-0.5)
    inputs = [torch.randn(batch, length, group * kv_heads, dim, dtype=dtype, device=kernels_device)]
    inputs += [torch.randn(sizes, dtype=dtype, device=kernels_device) for _ in range(2 + 2 * steps)]
    seed = torch.randn_like(inputs[0])
    index = torch.arange(length, device=kernels_device)
    causal = (index <= index[:, None]) & (index > index[:, None] - options.get("window", length))
    if bounds:
        options["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=kernels_device)
        document = sum((index >= bound).int() for bound in bounds)
        causal &= document == document[:, None]
    allowed = torch.cat([causal, *[index == index[:, None]] * steps], dim=1)

    def run(dtype: torch.dtype, oracle: bool = False) -> list[Tensor]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        q, k, v, *private = leaves
        keys, values = private[:steps], private[steps:]
        if oracle:
            out = by_mask(q, k, v, keys, values, allowed, scale)
        else:
            out = ops.private_key_attention(q, k, v, keys, values, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, seed.to(dtype))]

    found, in_float64 = run(dtype), run(torch.float64)
    for ours, wide, truth in zip(found, in_float64, run(torch.float64, oracle=True), strict=True):
        assert ours.dtype == dtype and ours.shape == truth.shape
        torch.testing.assert_close(wide, truth)
        assert (ours.double() - truth).norm() <= LIMITS[dtype] * max(truth.norm(), 0.1 * truth.numel() ** 0.5)
    again = run(dtype) if kernels_device.type == "cuda" else found  # the interpreter has no races
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_bad_arguments() -> None:
    q, k = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8)
    bounds = torch.tensor([0, 5], dtype=torch.int32)
    for arguments, message in (
        ((q, k, k, [k], []), "1 private_keys, but 0 private_values"),
        ((q, k, k, [k], [k[:, :4]]), r"private_values\[0\]"),
        ((q, k, k, [k.double()], [k]), r"private_keys\[0\]"),
        ((q, k[:, :, :0], k[:, :, :0], [], []), "heads of k must divide"),
        ((q, torch.randn(1, 4, 2, 8), k, [], []), "k must"),
    ):
        with pytest.raises(InputError, match=f"private_key_attention: .*{message}"):
            ops.private_key_attention(*arguments)
    for options, message in (
        ({"softmax_scale": float("nan")}, "softmax_scale must be"),
        ({"window": 0}, "window: must be"),
        ({"cu_seqlens": bounds.long()}, "cu_seqlens must be"),
        ({"cu_seqlens": bounds - 1}, "cu_seqlens must rise from 0 to the row's length, 5"),
    ):
        with pytest.raises(InputError, match=f"private_key_attention: {message}"):
            ops.private_key_attention(q, k, k, [k], [k], **options)
    with pytest.raises(InputError, match="one row"):
        two = torch.randn(2, 5, 2, 8)
        ops.private_key_attention(two, two, two, [], [], cu_seqlens=bounds)
