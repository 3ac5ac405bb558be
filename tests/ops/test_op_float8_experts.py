"""Experts in float8: each product against float64 of its quantised operands, and the whole beside float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Where
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import BackendError, InputError
from ligermodels.ops import Float8Recipe, Float8Tensor, GLUOptions
from ligermodels.ops.float8 import scaling
from ligermodels.ops.glu.glu import glu_reference
from ligermodels.ops.moe import float8_experts as module
from ligermodels.ops.moe.experts import expert_order
from ligermodels.ops.moe.float8_reference import BLOCK, from_blocks, to_blocks
from ligermodels.ops.runtime import dispatch
from ligermodels.ops.runtime.devices import GPU

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OPTIONS = (GLUOptions("silu"), GLUOptions("gelu_tanh", 1.702, 1 / 1.702, 1.0, 1.0))
SIZES = ((9, 2, 3, 144, 80), (20, 2, 4, 32, 144), (5, 1, 2, 16, 16))
"""Tokens, choices, experts, channels, intermediate channels: blocks of 128 that are not full, experts without rows."""


def operands(device: torch.device, sizes: tuple[int, ...], dtype: torch.dtype, bias: bool) -> list[Tensor]:
    """x, weights (float32), gate_up, down and with `bias` both biases."""
    N, k, E, H, size = sizes
    shapes = [(N, H), (N, k), (E, 2 * size, H), (E, H, size)] + ([(E, 2 * size), (E, H)] if bias else [])
    made = [torch.randn(shape, device=device) / (shape[-1] ** 0.5 if len(shape) == 3 else 1) for shape in shapes]
    return [x if i == 1 else x.to(dtype) for i, x in enumerate(made)]


def quantized(x: Tensor, **layouts: bool) -> Float8Tensor:
    """Rounded to nearest: Triton's interpreter truncates."""
    with ops.set_backend("reference"):
        return ops.float8_cast(x.detach(), E4M3, **layouts)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    least = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    assert (found.double() - wanted).norm() <= 1.5 * least * wanted.norm() + 1e-12


def close_blocks(q: Tensor, scales: Tensor, wanted: Tensor) -> None:
    """The scales of the maxima of the blocks, up to a factor where a maximum is at the bound; the nearest numbers,
    or subnormal ones beside them."""
    expected, expected_scales = to_blocks(wanted.float(), q.dtype)
    assert torch.isin(scales / expected_scales, torch.tensor([0.5, 1.0, 2.0], device=q.device)).all()
    step = scales.repeat_interleave(BLOCK, 1)[:, : q.shape[1]] * torch.finfo(q.dtype).tiny
    error = (from_blocks(q, scales) - wanted.float()).abs()
    wrong = error > 0.51 * torch.finfo(q.dtype).eps * (
        wanted.float().abs() + 2.5 * step
    )  # subnormal numbers: truncated in the interpreter
    if dispatch.INTERPRETED:  # it loses the carry of a number that is rounded up to a power of two
        wrong &= torch.frexp(expected.float()).mantissa.abs() != 0.5
    assert not wrong.any()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("options", "gradient"), [(OPTIONS[0], E5M2), (OPTIONS[1], E4M3)], ids=["silu", "bias"])
def test_products(where: Where, sizes: tuple[int, ...], options: GLUOptions, gradient: torch.dtype) -> None:
    """Forward, gradient of the activation, and products of blocks, each from given float8 operands."""
    N, k, E, H, _ = sizes
    bias = options is OPTIONS[1]
    x, weights, gate_up, down, *biases = operands(where.device, sizes, where.dtype, bias)
    experts = torch.rand(N, E, device=where.device).topk(k).indices
    order, offsets = expert_order(experts, E)
    tokens, group = (order // k).int(), experts.flatten()[order]
    x8, wide = quantized(x, by_row=True), {}
    both = [quantized(w.flatten(0, 1), columns=True) for w in (gate_up, down)]
    for name, own in zip(("gate_up", "down"), both, strict=True):
        wide[name] = (own.rows.double() * own.scale.double()).unflatten(0, (E, -1))
    of_bias = [None, None] if not bias else biases

    def added(y: Tensor, index: int) -> Tensor:
        return y if of_bias[index] is None else y + of_bias[index].double()[group]

    rows = both[0].rows.unflatten(0, (E, -1))
    z, h, scales = module._float8_experts_gate_up(
        x8.rows, x8.scale, rows, both[0].scale, of_bias[0], offsets, tokens, where.dtype, *options
    )
    wide_x = (x8.rows.double() * x8.scale.double()[:, None])[tokens]
    close(z, added((wide["gate_up"][group] @ wide_x[..., None])[..., 0], 0), where.dtype)
    close_blocks(h, scales, glu_reference(z.double(), None, options))

    y = module._float8_experts_product(
        h,
        scales,
        both[1].rows.unflatten(0, (E, -1)),
        both[1].scale,
        of_bias[1],
        offsets,
        order,
        weights,
        k,
        where.dtype,
    )
    each = added((wide["down"][group] @ from_blocks(h, scales).double()[..., None])[..., 0], 1).to(where.dtype)
    in_order = torch.empty_like(each).index_copy_(0, order, each).double().unflatten(0, (N, k))
    close(y, (in_order * weights.double()[..., None]).sum(1), where.dtype)

    with ops.set_backend("reference"):
        dy8 = ops.float8_cast(torch.randn(N, H, device=where.device), gradient, by_row=True)
    layout = module._of_experts(both[1].columns, True, E)
    dz, dz8, dz_scales, hw, dweights = module._float8_experts_down_gradient(
        dy8.rows, dy8.scale, z, weights, layout, both[1].scale, of_bias[1], offsets, tokens, order, *options,
        True, True, True,
    )  # fmt: skip
    wide_dy, of_rows = (dy8.rows.double() * dy8.scale.double()[:, None])[tokens], weights.view(-1)[order].double()
    d = (wide_dy[:, None] @ wide["down"][group])[:, 0]
    pairs = z.double().requires_grad_()
    act = glu_reference(pairs, None, options)
    (wanted,) = torch.autograd.grad(act, pairs, d * of_rows[:, None])
    close(dz, wanted, where.dtype)
    close_blocks(dz8, dz_scales, wanted)
    close(hw, act.detach() * of_rows[:, None], where.dtype)
    part = (d * act.detach()).sum(1) + (0 if not bias else (wide_dy * biases[1].double()[group]).sum(1))
    close(dweights.view(-1)[order], part, torch.float32)


def gradients(mix: Callable[..., Tensor], inputs: list[Tensor], experts: Tensor, trained: Any = None) -> list[Any]:
    """The result and all gradients, None for inputs that are not in `trained`."""
    leaves = [x.clone().requires_grad_(trained is None or i in trained) for i, x in enumerate(inputs)]
    y = mix(*leaves[:2], experts, *leaves[2:])
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y))
    return [y.detach(), *(x.grad for x in leaves)]


def float8(*inputs: Tensor, **options: Any) -> Tensor:
    return ops.float8_mix_experts(
        *inputs, activation=OPTIONS[0], recipe=options.pop("recipe", Float8Recipe()), **options
    )


def test_the_whole_beside_float64(where: Where) -> None:
    """Gradients have the direction and the size of those in float64; equal bits in a second run."""
    sizes = (12, 2, 4, 32, 48)
    inputs = operands(where.device, sizes, where.dtype, bias=True)
    experts = torch.rand(12, 4, device=where.device).topk(2).indices
    found, again = (gradients(float8, inputs, experts) for _ in range(2))
    wide = [x.double() for x in inputs]
    wanted = gradients(lambda *t: ops.mix_experts(*t, activation=OPTIONS[0]), wide, experts)
    for one, two, other, x in zip(found, again, wanted, [inputs[0], *inputs], strict=True):
        assert torch.equal(one, two) and one.dtype == x.dtype
        cosine = torch.nn.functional.cosine_similarity(one.double().flatten(), other.flatten(), 0)
        assert cosine > 0.96 and 0.85 < one.double().norm() / other.norm() < 1.1, cosine


def test_frozen_weights(where: Where) -> None:
    """Casts made once give the same bits; what needs no gradient gets none; x alone has the same gradient."""
    inputs = operands(where.device, (6, 2, 3, 16, 32), where.dtype, bias=True)
    experts = torch.rand(6, 3, device=where.device).topk(2).indices
    wanted = gradients(float8, inputs, experts)
    frozen = tuple(ops.float8_cast(w.flatten(0, 1), E4M3) for w in inputs[2:4])
    for options in ({}, {"frozen": frozen}):
        found = gradients(lambda *t, o=options: float8(*t, **o), inputs, experts, trained=(0, 1))
        assert all(torch.equal(one, two) for one, two in zip(found[:3], wanted[:3], strict=True))
        assert found[3:] == [None] * 4


def test_no_tokens(where: Where) -> None:
    inputs = operands(where.device, (0, 2, 3, 16, 16), where.dtype, bias=True)
    found = gradients(float8, inputs, torch.zeros(0, 2, device=where.device).long())
    assert found[0].shape == (0, 16) and not any(x.any() for x in found[1:])


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights, gate_up, down = operands(torch.device("cpu"), (4, 2, 3, 32, 16), torch.float32, bias=False)
    experts = torch.zeros(4, 2).long()
    for inputs, message in (
        ((x, weights, experts, gate_up[:, :16], down[..., :8]), "multiples of 16"),
        ((x, weights, experts, gate_up[:, :16], down), "must have one dtype"),
        ((x.double(), weights, experts, gate_up.double(), down.double()), "4 bytes or fewer"),
        ((x[:, :16], weights, experts, gate_up, down), "gate_up must be"),
    ):
        with pytest.raises(InputError, match=message):
            float8(*inputs)
    monkeypatch.setattr(scaling, "gpu_of", lambda device: GPU("NVIDIA A100", (8, 0), 2**17, 108))
    with pytest.raises(BackendError, match=r"A100 has compute capability 8\.0"):
        float8(x, weights, experts, gate_up, down)
