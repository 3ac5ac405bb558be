"""Linear layers computed together with the activation after them: the bits of one after the other."""

import sys
from typing import Any

import pytest
import torch
from conftest import Where
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.ops import GLUOptions

SIZES = [(4, 128), (18, 256), (6, 1), (70, 300), (10, 1029)]
"""(N, K), N even: whole tiles and steps, less than one, and more."""
KINDS = (None, "float8", "int4", "nf4", "mxfp4")


def operands(where: Where, kind: Any, size: tuple[int, int], rows: tuple[int, ...], bias: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(where.device, where.dtype)

    x, weight = randn(*rows, size[1]), randn(*size) * 0.3
    given = {"x": x, "bias": randn(size[0]) if bias else None}
    if kind is None:
        return {**given, "weight": weight}
    codes, scales = ops.quantize_weight(weight, kind)
    return {**given, "codes": codes, "scales": scales}


def product(given: dict[str, Any], activation: GLUOptions | None = None) -> Tensor:
    op: Any = ops.linear if "weight" in given else ops.quantized_linear
    result: Tensor = op(**given, activation=activation)
    return result


ACTIVATIONS = [
    GLUOptions("silu"),
    GLUOptions("gelu_tanh", 0.5, 3.0),
    GLUOptions("gelu"),
    GLUOptions("silu", limit=0.5, up_offset=1.0),
    GLUOptions("clamped_silu", limit=0.5),
]


@pytest.mark.parametrize("rows", [(1,), (), (2, 1), (8,), (2, 8)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_bits(where: Where, kind: Any, rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[bool] = []
    module = sys.modules["ligermodels.ops.linear.linear"]
    few_rows = module.few_rows
    monkeypatch.setattr(module, "few_rows", lambda *a: (launched.append(a[5] is not None), few_rows(*a)))
    for number, size in enumerate(SIZES):
        given = operands(where, kind, size, rows, bias=size[1] % 2 == 1)
        wanted = product(given)
        launched.clear()
        activations = ACTIVATIONS if number == 0 else ACTIVATIONS[number % len(ACTIVATIONS) :][:1]
        for activation in activations:
            assert torch.equal(product(given, activation), ops.gated_activation(wanted, activation))
        in_kernel = where.place != "reference" and where.dtype != torch.float32
        in_kernel = in_kernel and (kind is not None or given["x"][..., 0].numel() <= 8)
        assert launched == ([True] * len(activations) if in_kernel else [])


def test_gradients_and_errors(where: Where) -> None:
    """The activation has its gradient, and an odd number of channels no activation."""
    for kind in KINDS:
        given = operands(where, kind, (6, 130), (2,), bias=False)
        x = given["x"].clone().requires_grad_()
        found = product({**given, "x": x}, ACTIVATIONS[0])
        wanted = ops.swiglu(product({**given, "x": x}))
        assert torch.equal(found, wanted)
        along = torch.randn_like(found)
        assert torch.equal(*(torch.autograd.grad(y, x, along)[0] for y in (found, wanted)))
        with pytest.raises(InputError, match="needs pairs of channels, and the layer before it has 7"):
            product(operands(where, kind, (7, 130), (2,), bias=False), ACTIVATIONS[0])
        for options, message in (
            (GLUOptions("tanh"), "'tanh'"),
            (GLUOptions("silu", limit=-1.0), "limit must be above 0"),
        ):
            with torch.no_grad(), pytest.raises(InputError, match=message):  # also where one kernel computes both
                product(given, options)
