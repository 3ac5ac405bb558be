"""Linear layers computed together with what follows them: the bits of one after the other."""

from typing import Any

import pytest
import torch
from conftest import Where
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.ops import DecodeLinears, PendingLinear, pending_linears

SIZES = [(4, 128), (18, 256), (6, 1), (70, 1100), (130, 1029)]
"""(N, K), N even: whole tiles and steps, less than one, and more."""
KINDS = (None, "float8", "int4")


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


def product(given: dict[str, Any]) -> Any:
    op: Any = ops.decode_linear if "weight" in given else ops.quantized_linear
    return op(**given)


def pending(given: dict[str, Any]) -> Any:
    with DecodeLinears(), pending_linears():
        return product(given)


def served(where: Where) -> bool:
    return where.place != "reference" and where.dtype != torch.float32


@pytest.mark.parametrize("rows", [(1,), (), (2, 1), (3,), (8,), (2, 8)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_bits(where: Where, kind: Any, rows: tuple[int, ...]) -> None:
    for size in SIZES:
        given = operands(where, kind, size, rows, bias=size[1] % 2 == 1)
        wanted, found = product(given), pending(given)
        if not served(where) or (kind is None and wanted[..., 0].numel() > 8):
            assert torch.equal(found, wanted)
            continue
        assert isinstance(found, PendingLinear) and torch.equal(found.alone(), wanted)
        residual = torch.randn_like(wanted)
        assert torch.equal(pending(given).added_to(residual), residual + wanted)
        strided = residual.repeat_interleave(2, -1)[..., ::2]
        assert torch.equal(pending(given).added_to(strided), residual + wanted)
        wide = residual.float()
        assert torch.equal(pending(given).added_to(wide), wide + wanted)
        for activation, op in {"silu": ops.swiglu, "gelu_tanh": ops.geglu}.items():
            for options in ({}, {"gate_multiplier": 0.5, "down_multiplier": 3.0}, {"limit": 0.5, "up_offset": 1.0}):
                assert torch.equal(pending(given).gated(activation, **options), op(wanted, **options))
        assert torch.equal(pending(given).gated("gelu"), ops.geglu(wanted, approximate="none"))


@torch.no_grad()
def test_when(where: Where) -> None:
    """Only where it is asked for, in a step of decoding; and no gated activation of an odd number of channels."""
    given = operands(where, "int4", (7, 130), (2,), bias=False)
    with DecodeLinears():
        assert isinstance(product(given), Tensor) and ops.is_decoding()
    with pending_linears():
        assert isinstance(product(given), Tensor) and not ops.is_decoding()
    with torch.enable_grad(), DecodeLinears(), pending_linears():
        assert product({**given, "x": given["x"].clone().requires_grad_()}).requires_grad
    with DecodeLinears(), pending_linears():
        many = {**given, "x": given["x"].repeat(10, 1)}
        assert product(many).shape == (20, 7)
    if served(where):
        with pytest.raises(InputError, match="needs pairs of channels, and the linear layer before it has 7"):
            pending({**given, "x": given["x"]}).gated("silu")
